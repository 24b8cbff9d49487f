"""Tests of what a training of a supernet has for spaces around a base: limits, the whole network, and a teacher."""

import io
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from greedynas import Callback, Fixed, GreedyNASError, Space, Stage, Supernet, build_network
from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.steps import TrainingStep, supernet_optimizer, train_step
from greedynas.greedy.training import train_supernet
from greedynas.greedy.validation import FilterLosses
from greedynas.models.bases.timm_bases import load_base
from greedynas.models.losses import teacher_logits
from greedynas.models.shared_supernet import SharedSupernet
from greedynas.runtime.rng import torch_stream
from greedynas.settings.schema import Config
from greedynas.spaces.paths import most_expensive
from greedynas.stages.run import Run
from tests.helpers.base_runs import NAME, SIZES
from tests.helpers.pictures import paint
from tests.helpers.training import SETTINGS, rows_of, same_tensors, snapshot, without_wall_clock

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = Console(file=io.StringIO())
SIZED = load_base(NAME, sizes=SIZES, num_classes=3)
PLAIN = Space(
    name="plain",
    ops=["ID", "MB2_K3", "MB4_K5_SE", "MB6_K7"],
    stages=[Stage(channels=8, repeat=2), Stage(channels=12, repeat=2, stride=2)],
    **{"stem": [Fixed(op="CONV_K3", channels=8, stride=2)], "head": [Fixed(op="CONV_K1", channels=16)]},
    **{"image_size": 16, "num_classes": 3},
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = paint(tmp_path_factory.mktemp("images"), {"a": 14, "b": 14, "c": 14}, size=(26, 24))
    settings = DataSettings(source=str(folder), workers=0, pad=2, val_images=6, test_images=6)
    return {space.name: open_data(settings, space=space, device="cpu") for space in (SIZED, PLAIN)}


def fresh(space):
    kind = SharedSupernet if space.base is not None else Supernet
    return kind(space, generator=torch_stream(0, "init"))


def teacher_of(space, seed=5):
    """Return a network for the images of a space, which are the largest that a path sees."""
    whole = most_expensive(space)
    network = build_network(
        whole[1:] if space.sizes else whole, space.settle(whole)[0], generator=torch_stream(seed, "t")
    )
    with torch.no_grad():
        network.classifier.weight.normal_(0, 2, generator=torch_stream(seed, "classifier"))  # it is sure of its classes
    return network.eval().requires_grad_(False)


class Paths:
    """Records the trained and the evaluated paths of a training."""

    def __init__(self, net, monkeypatch):
        self.trained, self.evaluated = [], []
        net.register_forward_pre_hook(lambda module, given: self.trained.append(given[1]) if module.training else None)
        evaluate = FilterLosses.__call__

        def recorded(losses, paths):
            self.evaluated += paths
            return evaluate(losses, paths)

        monkeypatch.setattr(FilterLosses, "__call__", recorded)


def settings_of(**changes):
    return TrainSettings(**{**SETTINGS, "max_epochs": 4, **changes})


# Limits


@pytest.mark.parametrize("space", [SIZED, PLAIN], ids=lambda space: space.name)
@pytest.mark.parametrize("sampler", ["greedy", "uniform"])
@pytest.mark.parametrize("cost", ["macs", "params"])
def test_every_explored_path_is_within_the_limits(images, space, sampler, cost, monkeypatch):
    """Of all paths, at most a third is within these limits."""
    cells = space.cost_tables[cost](space.sample(2000, np.random.default_rng(0)))
    low, high = sorted(cells)[100], sorted(cells)[600]
    net, data = fresh(space), images[space.name]
    seen = Paths(net, monkeypatch)
    limits = {f"min_{cost}": int(low), f"max_{cost}": int(high)}
    state = train_supernet(net, data, settings_of(sampler=sampler, limits=limits, filter_images=3))
    assert len(seen.trained) == state.step == 12
    if sampler == "greedy":
        assert len(set(seen.evaluated)) > 8
        assert {path for path, _ in state.pool.best(6)} <= set(seen.evaluated)
    explored = [*seen.trained, *seen.evaluated]
    costs = getattr(space.costs(explored), cost)
    assert (low <= costs).all()
    assert (costs <= high).all()
    if space.sizes and cost == "params":  # which do not depend on the size
        assert {path[0] for path in explored} == {0, 1}


def test_limits_that_only_the_small_size_keeps(images, monkeypatch):
    low = SIZED.adapt(image_size=SIZES[1]).cost_tables["macs"].range[0]
    net = fresh(SIZED)
    seen = Paths(net, monkeypatch)
    train_supernet(net, images[SIZED.name], settings_of(limits={"max_macs": low - 1}))
    assert {path[0] for path in seen.trained} == {0}


def test_limits_that_no_path_keeps_are_refused_before_training(images):
    with pytest.raises(GreedyNASError, match=r"no path is within macs from 0 to 10: the cheapest has [\d,]+") as error:
        train_supernet(fresh(SIZED), images[SIZED.name], settings_of(limits={"max_macs": 10}))
    assert "\n" not in str(error.value)


# The whole network


@pytest.mark.parametrize(
    ("every", "expected"), [(None, ""), (1, "xWxWxWxWxWxW"), (2, "xWxxWxxWxxWx"), (3, "xWxxxWxxxWxx")]
)
def test_the_whole_network_is_trained_after_every_nth_draw(images, every, expected, monkeypatch):
    """Its multiply-adds are above the limit, so no draw trains it."""
    whole = most_expensive(SIZED)
    macs = int(SIZED.costs([whole]).macs[0])
    net = fresh(SIZED)
    seen = Paths(net, monkeypatch)
    train_supernet(
        net, images[SIZED.name], settings_of(sampler="uniform", whole_every=every, limits={"max_macs": macs - 1})
    )
    assert whole == tuple(count - 1 for count in SIZED.num_ops)
    assert "".join("W" if path == whole else "x" for path in seen.trained) == (expected or 12 * "x")


def test_the_whole_network_follows_the_kept_paths_of_a_filtering(images, monkeypatch):
    """Every draw after the warm-up keeps k = 2 paths, and each second draw is followed by the whole network."""
    whole = most_expensive(SIZED)
    net = fresh(SIZED)
    seen = Paths(net, monkeypatch)
    limits = {"max_macs": int(SIZED.costs([whole]).macs[0]) - 1}
    state = train_supernet(net, images[SIZED.name], settings_of(warmup=2, whole_every=2, limits=limits))
    # draws: 0 (one path) W, 1 to 5 (two paths each)
    assert "".join("W" if path == whole else "x" for path in seen.trained) == "xW" + "xx" + "xxW" + "xx" + "xxW"
    assert whole not in dict(state.pool.best(6))  # it is trained without being ranked


# The teacher


@pytest.mark.parametrize(("weight", "temperature"), [(0.5, 1.0), (0.3, 3.0), (1.0, 2.0), (0.0, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_with_a_teacher_is_the_one_of_the_formula(images, weight, temperature, smoothing):
    """(1 - w) CE + w T² KL(teacher ‖ path), both at temperature T, by hand and in float64."""
    data, path = images[SIZED.name], (0, 1, 5, 3, 2)
    settings = settings_of(teacher_weight=weight, temperature=temperature, label_smoothing=smoothing)
    net, teacher = fresh(SIZED).train(), teacher_of(SIZED)
    batch, labels = data.train.eval_batch()
    with torch.no_grad():
        logits, wanted = deepcopy(net)(batch, path).double(), teacher(batch).double()
    picked = -logits.log_softmax(1)
    entropy = (1 - smoothing) * picked[range(len(labels)), labels] + smoothing * picked.mean(1)
    theirs = (wanted / temperature).exp() / (wanted / temperature).exp().sum(1, keepdim=True)
    ours = (logits / temperature).exp() / (logits / temperature).exp().sum(1, keepdim=True)
    distance = (theirs * (theirs / ours).log()).sum(1)
    expected = float(((1 - weight) * entropy + weight * temperature**2 * distance).mean())
    assert float(distance.mean()) > 1e-3
    before, unlike = snapshot(teacher), supernet_optimizer(net, settings)
    loss = train_step(
        net, unlike, batch, labels, [path], 0.1, settings, None, "fp32", teacher_logits(teacher, batch, "fp32")
    )
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert same_tensors(before, teacher.state_dict())


def test_gradients_pull_a_path_towards_its_teacher(images):
    """With the whole loss from the teacher, labels do not matter, and the distance shrinks."""
    data, path = images[PLAIN.name], (1, 1, 2, 1)
    settings = settings_of(teacher_weight=1.0)
    teacher, batch = teacher_of(PLAIN), data.train.eval_batch()[0]
    first, second = fresh(PLAIN).train(), fresh(PLAIN).train()
    wrong = torch.zeros(len(batch), dtype=torch.int64)
    losses = {}
    for net, labels in ((first, wrong), (second, wrong + 1)):
        optimizer = supernet_optimizer(net, settings)
        losses[net] = [
            float(
                train_step(
                    net,
                    optimizer,
                    batch,
                    labels,
                    [path],
                    0.02,
                    settings,
                    None,
                    "fp32",
                    teacher_logits(teacher, batch, "fp32"),
                )
            )
            for _ in range(6)
        ]
    assert losses[first] == losses[second]
    assert same_tensors(first.state_dict(), second.state_dict())
    assert losses[first][-1] < 0.7 * losses[first][0]


def test_classes_are_weighted_in_the_entropy_alone(images):
    data, path = images[PLAIN.name], (1, 1, 2, 1)
    batch, labels = data.train.eval_batch()
    teacher, weights = teacher_of(PLAIN), torch.tensor([0.2, 1.0, 1.8])
    net = fresh(PLAIN).train()
    with torch.no_grad():
        logits, wanted = deepcopy(net)(batch, path).double(), teacher(batch).double()
    entropy = (F.cross_entropy(logits, labels, reduction="none") * weights.double()[labels]).mean()
    distance = (wanted.softmax(1) * (wanted.log_softmax(1) - logits.log_softmax(1))).sum(1).mean()
    settings = settings_of(teacher_weight=0.25)
    loss = train_step(
        net,
        supernet_optimizer(net, settings),
        batch,
        labels,
        [path],
        0.1,
        settings,
        weights,
        "fp32",
        teacher_logits(teacher, batch, "fp32"),
    )
    assert float(loss) == pytest.approx(float(0.75 * entropy + 0.25 * distance), rel=1e-5)


def taught_by(teacher):
    return partial(TrainingStep, teacher=teacher, teacher_precision="fp32")


def trained(images, teacher, **settings):
    net = fresh(SIZED)
    state = train_supernet(net, images[SIZED.name], settings_of(**settings), make_step=taught_by(teacher))
    return net, state


def test_a_teacher_without_weight_teaches_nothing(images):
    alone, state = trained(images, None)
    ignored, same = trained(images, teacher_of(SIZED), teacher_weight=0.0)
    taught, _ = trained(images, teacher_of(SIZED), teacher_weight=0.5)
    assert same_tensors(alone.state_dict(), ignored.state_dict())
    assert state.pool.best(6) == same.pool.best(6)
    assert not same_tensors(alone.state_dict(), taught.state_dict())


class Interruption(Callback):
    """Interrupts a training at a step, in the middle of an epoch and of the paths of one filtering."""

    def __init__(self, step):
        self.step = step

    def log(self, kind, step, epoch, values):
        if kind == "step" and step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [4, 9])
def test_a_resumed_training_with_limits_and_a_teacher_is_the_uninterrupted_one(images, tmp_path, at):
    limits = {"max_macs": 200_000}
    settings = settings_of(warmup=2, whole_every=2, limits=limits, checkpoint_steps=1, teacher_weight=0.5)
    config, teacher = Config(name="sized", space=SIZED, train=settings), teacher_of(SIZED)

    def train(folder, callbacks=()):
        with Run.start(folder, config) as run:
            net = fresh(SIZED)
            return net, train_supernet(
                net,
                images[SIZED.name],
                settings,
                run=run,
                callbacks=callbacks,
                make_step=taught_by(teacher),
                console=QUIET,
            )

    whole, state = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", [Interruption(at)])
    with Run.open(tmp_path / "cut") as run:
        assert 0 < run.load_checkpoint()[1]["step"] < 12
    resumed, same = train(tmp_path / "cut")
    assert same_tensors(whole.state_dict(), resumed.state_dict())
    assert same.pool.best(6) == state.pool.best(6)
    for kind, rows in rows_of(tmp_path / "whole").items():
        assert without_wall_clock(rows) == without_wall_clock(rows_of(tmp_path / "cut")[kind])
