"""Test helpers shared by `tests.greedy.test_training` and others."""

import json
import math

import torch

from greedynas import Fixed, Space, Stage, Supernet
from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.training import train_supernet
from greedynas.runtime.rng import torch_stream
from greedynas.settings.experiments import hooks_of
from greedynas.settings.schema import Config
from greedynas.stages.run import Run

WALL_CLOCK = {"seconds", "images_per_second", "measured_ratio", "corrected_images_measured"}


def tiny_space(ops=("ID", "MB2_K3", "MB3_K3_SE"), repeat=2, **changes):
    stages = [Stage(channels=8, repeat=repeat), Stage(channels=12, repeat=repeat, stride=2)]
    fixed = {"stem": [Fixed(op="CONV_K3", channels=8, stride=2)], "head": [Fixed(op="CONV_K1", channels=16)]}
    return Space(name="tiny", ops=list(ops), stages=stages, image_size=8, num_classes=3, **fixed, **changes)


SETTINGS = {
    "m": 4,
    "k": 2,
    "filter_images": 6,
    "bn_images": 6,
    "calibration_images": 16,
    "pool_size": 6,
    "warmup": 4,
    "stopping": False,
    "max_epochs": 3,
    "batch_size": 10,
    "lr": 0.05,
    "log_every": 1,
}


def opened(folder, **settings):
    settings = DataSettings(source=str(folder), workers=0, pad=1, **{"val_images": 12, "test_images": 6, **settings})
    return open_data(settings, image_size=8, image_channels=3, seed=0, device=torch.device("cpu"))


def new_net(space=None):
    return Supernet(space or tiny_space(), generator=torch_stream(0, "init"))


def new_run(folder, space=None, experimental=None, **settings):
    train = TrainSettings(**{**SETTINGS, **settings})
    config = Config(name="tiny", space=space or tiny_space(), train=train, experimental=experimental or {})
    return Run.start(folder, config)


def train(data, space=None, *, run=None, net=None, callbacks=(), experimental=None, **settings):
    net, settings = net or new_net(space), TrainSettings(**{**SETTINGS, **settings})
    lasting = hooks_of(experimental or {}).lasting_steps(Schedule(settings, len(data.train)))
    return net, train_supernet(net, data, settings, run=run, callbacks=callbacks, lasting_steps=lasting)


def recorded(folder, data, space=None, *, net=None, callbacks=(), experimental=None, **settings):
    """Train in a run directory; return the net, the state, and the rows of metrics by kind."""
    with new_run(folder, space, experimental, **settings) as run:
        net, state = train(data, space, run=run, net=net, callbacks=callbacks, experimental=experimental, **settings)
    return net, state, rows_of(folder)


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    return {kind: [row for row in rows if row["kind"] == kind] for kind in ("step", "filter", "epoch")}


def same_tensors(first, second):
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def snapshot(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def without_wall_clock(rows):
    return [{name: value for name, value in row.items() if name not in WALL_CLOCK} for row in rows]
