"""The jobs that tests of many ranks run in each rank (`python -m tests.helpers.ranks FOLDER JOBS`), and their
launch."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.greedy import steps, training
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.samplers.sampler import make_sampler
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.settings import SearchSettings, TrainSettings
from greedynas.models.network import build_network
from greedynas.models.supernet import Supernet
from greedynas.rundir.callbacks import Callback
from greedynas.runtime.parallel import ranks as distributed
from greedynas.runtime.parallel.reduction import traffic
from greedynas.runtime.rng import stream, torch_stream
from greedynas.settings.experiments import hooks_of
from greedynas.settings.schema import Config, RetrainSettings
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import make_recipe
from greedynas.stages.run import Run
from tests.helpers.training import SETTINGS, opened, tiny_space

TINY = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", "GLOO_SOCKET_IFNAME": "lo"}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(ranks, *command, **more):
    """Start the processes that torchrun would start, without torchrun's own process."""
    return start_by_hand([{"arguments": command, **more}] * ranks)


def start_by_hand(ranks, port=None):
    """Start a process for each rank, with its `arguments`, environment variables `env`, and options of Popen."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", *map(str, rank["arguments"])],
            env={**os.environ, **variables, **rank.get("env", {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **{key: value for key, value in rank.items() if key not in ("arguments", "env")},
        )
        for rank, variables in zip(ranks, variables_of(len(ranks), port), strict=True)
    ]


def variables_of(ranks, port=None):
    """Return the environment variables of each rank."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), "WORLD_SIZE": str(ranks), **TINY}
    common["LOCAL_WORLD_SIZE"] = str(ranks)
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def outcome(processes, seconds=100):
    """Wait for the processes; return their exit codes, their standard outputs and their standard errors."""
    until = time.monotonic() + seconds
    try:
        outputs = [process.communicate(timeout=max(1, until - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], [out for out, _ in outputs], [err for _, err in outputs]


def launch(ranks, folder, *jobs):
    """Run jobs (name, arguments) one after the other in a process per rank; all must succeed."""
    codes, _, errors = outcome(start(ranks, "tests.helpers.ranks", folder, json.dumps(jobs)))
    assert codes == [0] * ranks, "\n".join(errors)


def left(folder, name, ranks=1):
    """Load the results that the ranks of a job have left."""
    return [torch.load(folder / f"{name}-{rank}-of-{ranks}.pt") for rank in range(ranks)]


def leave(folder, name, result):
    torch.save(result, folder / f"{name}-{distributed.rank()}-of-{distributed.size()}.pt")


def in_float64(module, first):
    module.double()
    first.register_forward_pre_hook(lambda _, images: (images[0].double(),))
    return module


class Diary:
    """A record of the paths, images and traffic of every update."""

    def __init__(self, net, stop_after=None):
        self.updates, self.net, self.stop_after = [], net, stop_after
        self.step = steps.train_step
        steps.train_step = self

    def __call__(self, net, optimizer, images, labels, paths, *rest):
        before = dict(traffic)
        loss = self.step(net, optimizer, images, labels, paths, *rest)
        sent = {key: traffic[key] - before.get(key, 0) for key in traffic}
        active = {parameter for path in paths for parameter in net.path_parameters(path)}
        size = sum(parameter.nbytes for parameter in active)
        # The sum of the pixels identifies an augmented image.
        images = images.double().sum((1, 2, 3)).tolist()
        paths = [tuple(path) for path in paths]  # a mixture has tensors
        self.updates.append({"paths": paths, "sent": sent, "active": size, "images": images, "loss": float(loss)})
        if len(self.updates) == self.stop_after:
            if distributed.size() == 1:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGKILL) if distributed.rank() == 1 else None
        return loss

    def close(self):
        steps.train_step = self.step


class Ending(Callback):
    """Counts the calls it receives, and ends a training after a number of epochs."""

    def __init__(self, epochs):
        self.epochs, self.begun, self.lines = epochs, 0, 0

    def begin(self, folder, step):
        self.begun += 1

    def log(self, kind, step, epoch, values):
        self.lines += 1

    def stop(self, state):
        return "enough is enough" if state.epoch == self.epochs else None


def train(
    folder,
    name,
    photos,
    out=None,
    stop_after=None,
    double=True,
    class_weights=None,
    experimental=None,
    end_after=None,
    method=False,
    **settings,
):
    """Train a tiny supernet: with `out` in a run directory, with `end_after` until a callback ends it.

    `method` takes the space and the supernet of tests of methods with architecture parameters.
    """
    data = opened(photos)
    if class_weights is not None:
        data = replace(data, class_weights=torch.tensor(class_weights, dtype=torch.float64 if double else None))
    chosen = TrainSettings(**{**SETTINGS, **settings})
    space = tiny_space(["ID", "MB2_K3", "MB4_K5"]) if method else tiny_space()
    net = make_sampler(chosen.sampler).supernet(space, generator=torch_stream(0, "init"))
    if double:
        in_float64(net, net.stem)
    config = Config(name="tiny", space=tiny_space(), train=chosen, experimental=experimental or {})
    lasting = hooks_of(config.experimental).lasting_steps(Schedule(chosen, len(data.train)))
    diary, ending = Diary(net, stop_after), Ending(end_after)
    try:
        with nullcontext() if out is None else Run.start(Path(out), config) as run:
            watched = {"callbacks": [ending], "lasting_steps": lasting}
            state = training.train_supernet(net, data, chosen, run=run, **watched)
    finally:
        diary.close()
    result = {
        "updates": diary.updates,
        "pool": state.pool.best(),
        "stopped": (state.epoch, state.stopped),
        "told": (ending.begun, ending.lines),
        "images": (state.optimization_images, state.evaluation_images),
        "weights": net.state_dict(),
        "memory": state.memory,
    }
    leave(folder, name, result)


def told(evaluation):
    return {key: getattr(value, "tolist", lambda value=value: value)() for key, value in vars(evaluation).items()}


def evaluate(folder, name, photos):
    """Evaluate paths on images; leave the results and the number of forward passes of this rank."""
    data = opened(photos)
    net = Supernet(tiny_space(), generator=torch_stream(0, "init"))
    passes = []
    net.classifier.register_forward_hook(lambda *_: passes.append(1))
    paths = [tuple(path) for path in net.space.sample(9, stream(1, "paths")).tolist()]
    images, labels = data.val.eval_batch()
    results = [
        told(
            evaluate_paths(
                net, some, images, labels, mode, bn_images=6, calibration=images, keep_correct=True, balanced=balanced
            )
        )
        for some in (paths, paths[:1])  # with one path, only one rank has work
        for mode, balanced in (("batch", False), ("recalibrate", False), ("batch", True))
    ]
    leave(folder, name, {"results": results, "passes": len(passes), "distinct": len(set(paths))})


def search(folder, name, run):
    """Search the supernet of a run."""
    from greedynas.stages.search import make_requests, search_stage  # slow to import

    settings = SearchSettings(population=6, generations=3, bn_images=6)
    limits = {"macs": (["100M"], None), "params": (None, None), "latency_ms": (None, None)}
    requests = make_requests(Path(run), limits, "evolution", (), True, None, [], None, settings)
    results = search_stage(Path(run), requests, None, Console(quiet=True))
    leave(folder, name, [{**result, "seconds": None} for result in results])


def fit(folder, name, photos, double=True, sync_bn=False, **settings):
    """Train a network with a recipe."""
    network = build_network([1, 2, 1, 2], tiny_space(), generator=torch_stream(0, "init"))
    if double:
        in_float64(network, network.stem)
    weights = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64 if double else None)
    recipe = make_recipe(RetrainSettings(**settings))
    images = opened(photos).train_and_val()
    averaged, state = retrain(network, images, recipe, class_weights=weights, sync_bn=sync_bn)
    result = {"average": averaged.state_dict(), "weights": network.state_dict(), "images": state.optimization_images}
    leave(folder, name, result)


def study(folder, name, photos, out):
    """Run the part of `study macro` that trains a supernet and ranks all paths."""
    from greedynas.studies.macro.run import MacroOptions, make_part
    from greedynas.studies.study import run_parts

    images = DataSettings(source=photos, workers=0, pad=1, val_images=12, test_images=6)
    search = SearchSettings(bn_images=6)
    config = Config(name="tiny", space=tiny_space(), data=images, train=TrainSettings(**SETTINGS), search=search)
    part = make_part("greedy", 0, config, MacroOptions({}, epochs=3.0, bn=("batch", "running")))
    done = run_parts(Path(out), [part], Console(quiet=True), jobs=1)[part.name]
    leave(folder, name, {key: value.tolist() for key, value in done.arrays.items()})


def read(folder, name, photos, **settings):
    """Read a source; leave all images, this rank's batches of an epoch, and the notes about the data."""
    chosen = DataSettings(source=photos, **{"workers": 0, "pad": 1, "val_images": 12, "test_images": 6, **settings})
    data = open_data(chosen, image_size=8, image_channels=3, seed=0, device=torch.device("cpu"))
    everything, labels = data.train_and_val().eval_batch()
    batches = [
        (images.sum((1, 2, 3)).tolist(), classes.tolist()) for images, classes in data.train.train_batches(1, 10)
    ]
    result = {"images": everything, "labels": labels, "batches": batches, "notes": data.notes}
    leave(folder, name, {**result, "weights": data.class_weights})


JOBS = {job.__name__: job for job in (train, evaluate, search, fit, study, read)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    with distributed.ranks():
        for job, arguments in json.loads(sys.argv[2]):
            JOBS[job](Path(sys.argv[1]), **arguments)
