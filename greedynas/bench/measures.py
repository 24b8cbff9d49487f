"""The measures of `greedynas bench`: a training step, a forward evaluation, a filtering and a ranking.

Each returns a `Measurement` with the seconds of single tasks, each of which was first run untimed. Tasks with the same
key have the same paths, so that two variants can be compared on the tasks that both finished within the time limit.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from greedynas.bench.floor import TRAINING, copy_bandwidth, stem_traffic, traffic_table
from greedynas.bench.variants import Subject
from greedynas.data.datasets import Data
from greedynas.gpu.recording import SMALL, worth_recording
from greedynas.greedy.filtering import filter_paths
from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.state import TrainState
from greedynas.greedy.validation import FilterLosses
from greedynas.models.engine import warm_up
from greedynas.runtime.rng import stream
from greedynas.runtime.stopwatch import wait
from greedynas.settings.schema import Config
from greedynas.spaces.costs import CostTable, IntArray, tree_cost
from greedynas.spaces.paths import OpPath

GROUP = 20  # steps of small images on a GPU that are timed together, because one is shorter than waiting for it
SUBTREE = 729  # largest number of paths from which a ranking is projected
LR = 1e-6  # so small that nothing is learned from random pixels


@dataclass(frozen=True)
class Work:
    """The paths, the data and the limits of the measures, which are the same for every variant of a space."""

    config: Config
    data: Data
    device: torch.device
    batch: int
    paths: tuple[OpPath, ...]  # random ones; the first has the median cost
    ranked: IntArray  # paths of the ranking
    rank_images: int
    seconds: float  # time for one measure of one variant; a task that was started is finished

    @cached_property
    def traffic(self) -> CostTable:
        return traffic_table(self.config.space)

    def floor(self, paths: Sequence[OpPath], times: int) -> float:
        """Return the seconds in which the activations of a batch can be moved `times` times, averaged over paths."""
        return self._moved(times * self.batch * float(self.traffic(np.array(paths)).mean()))

    def tree_floor(self, paths: IntArray, images: int) -> float:
        """Return the seconds in which the activations of a joint evaluation of paths on images can be moved."""
        return self._moved(images * tree_cost(self.traffic, stem_traffic(self.config.space), np.unique(paths, axis=0)))

    def _moved(self, values: float) -> float:
        return values * (2 if self.device.type == "cuda" else 4) / copy_bandwidth(self.device)


@dataclass
class Measurement:
    """The seconds of single tasks, and further results of a measure."""

    images: int  # images of one task
    seconds: dict[int, float]  # seconds of each task by its key
    floors: dict[int, float]  # the floor by copy bandwidth, by key
    startup: float | None = None  # time until the first task was finished, including compilation and recording
    stalls: list[float] = field(default_factory=list)  # first run of a new path minus the second
    peak: int | None = None  # bytes of GPU memory for the first path
    paths: int = 0  # number of distinct paths
    note: str = ""
    rounds: list[float] = field(default_factory=list)  # the medians of several rounds

    @property
    def median(self) -> float:
        return statistics.median(self.seconds.values())

    def add_round(self, other: "Measurement") -> None:
        """Add another round: the times of each task are then the means over the rounds that have it."""
        before = len(self.rounds) or 1
        self.rounds = [*(self.rounds or [self.median]), other.median]
        for key in self.seconds.keys() & other.seconds.keys():
            self.seconds[key] += (other.seconds[key] - self.seconds[key]) / (before + 1)


def choose_paths(config: Config, count: int) -> tuple[OpPath, ...]:
    """Return distinct random paths, the one with median cost first, for variants that have time for only one."""
    paths = list(dict.fromkeys(map(tuple, config.space.sample(4 * count, stream(config.seed, "bench")).tolist())))
    paths = paths[:count]
    costs = config.space.costs(paths).macs
    typical = int(np.argsort(costs, kind="stable")[len(paths) // 2])
    return (paths[typical], *paths[:typical], *paths[typical + 1 :])


def training_step(subject: Subject, work: Work) -> Measurement:
    """Measure training steps with the optimizer, on a new path each; small images on a GPU include augmentation."""
    batches = _batches(subject, work)
    images, labels = next(batches)
    grouped = worth_timing_together(images)
    with subject.running():
        start = time.perf_counter()
        if subject.variant.ours and work.device.type == "cuda" and not worth_recording(images):
            warm_up(work.config.space, work.batch, work.device)
        step = subject.step()

        def train(path: OpPath) -> None:
            step(*(next(batches) if grouped else (images, labels)), [path], LR)

        found = _path_by_path(train, subject, work, start, TRAINING)
        if grouped:  # all of these paths have been run before
            _in_groups(found, train, work.paths[: found.paths], work)
    return found


def forward_evaluation(subject: Subject, work: Work) -> Measurement:
    """Measure the evaluation of one path on one batch with the statistics of the batch, including loss and accuracy."""
    images, labels = next(_batches(subject, work))
    start = time.perf_counter()

    def evaluate(path: OpPath) -> None:
        subject.evaluate([path], images, labels, work.batch)

    def score(path: OpPath) -> None:
        subject.score(path, images, labels)

    with subject.running():
        if worth_timing_together(images):  # `evaluate_paths` records forward passes
            return _path_by_path(evaluate, subject, work, start, 1)
        with subject.evaluating():
            return _path_by_path(score, subject, work, start, 1)


def _path_by_path(
    run: Callable[[OpPath], None], subject: Subject, work: Work, start: float, traffic: int
) -> Measurement:
    """Time each path in its second run, after a first one in which it is new. A single path is timed several times."""
    paths = (work.paths[0],) if subject.variant.compiled else work.paths
    turns = 5 if len(paths) == 1 else 1
    found = Measurement(work.batch, {}, {})
    floors: list[float] = []
    deadline = math.inf
    for key, path in enumerate(paths):
        once = partial(run, path)
        first = clocked(once, work.device)
        if key == 0:
            found.startup = time.perf_counter() - start
            floors = [work.floor([each], traffic) for each in paths]  # computed before the time limit starts
            deadline = time.perf_counter() + work.seconds
            found.peak = peak_memory(once, work.device)
        found.seconds[key] = statistics.median(clocked(once, work.device) for _ in range(turns))
        found.floors[key] = floors[key]
        found.paths += 1
        if key:
            found.stalls.append(first - found.seconds[key])
        if time.perf_counter() > deadline:
            break
    return found


def _in_groups(found: Measurement, run: Callable[[OpPath], object], paths: Sequence[OpPath], work: Work) -> None:
    """Replace the times of single steps by those of groups, between which, as in training, nothing waits for a step."""
    found.seconds, found.floors = {}, {}
    deadline = time.perf_counter() + work.seconds
    for key in range(max(3, len(paths) // 5)):
        group = [paths[(GROUP * key + i) % len(paths)] for i in range(GROUP)]
        taken = clocked(partial(_all, run, group), work.device)
        found.seconds[key], found.floors[key] = taken / GROUP, work.floor(group, TRAINING)
        if time.perf_counter() > deadline:
            break


def _all(run: Callable[[OpPath], object], paths: Sequence[OpPath]) -> None:
    for path in paths:
        run(path)


def filtering(subject: Subject, work: Work) -> Measurement:
    """Measure Algorithm 1 as a run does it: m paths on new filter images, ranked. The paths are the same every time."""
    settings, seed = work.config.train, work.config.seed
    data = subject.see(work.data)
    state = TrainState(CandidatePool(settings.pool_size))

    def filter_once() -> None:
        rng = stream(seed, "bench filtering")
        losses = FilterLosses(subject.net, data, settings, seed, state, subject.eval_precision)
        filter_paths(subject.net.space, losses, settings.m, settings.k, rng)

    found = _repeated(filter_once, subject, work, settings.m * settings.filter_images)
    drawn = work.config.space.sample(settings.m, stream(work.config.seed, "bench filtering"))
    found.floors = dict.fromkeys(found.seconds, work.tree_floor(drawn, settings.filter_images))
    found.paths = settings.m
    return found


def ranking(subject: Subject, work: Work) -> Measurement:
    """Measure the ranking of many paths on many images.

    If ranking all of a small space would take too long, the time is projected from a part of its tree: below a prefix
    of some layers, the tree has the same shapes, whatever the prefix.
    """
    chunk = min(work.config.train.bn_images, work.rank_images)
    pixels, labels = subject.see(work.data).val.eval_batch(np.arange(work.rank_images))
    part = work.ranked
    while len(part) > SUBTREE:
        column = np.flatnonzero((part != part[0]).any(axis=0))[0]
        part = part[part[:, column] == part[0, column]]
    share = len(part) / len(work.ranked) * chunk / work.rank_images

    def rank(paths: IntArray, count: int) -> None:
        subject.evaluate([tuple(path) for path in paths.tolist()], pixels[:count], labels[:count], chunk)

    with subject.running():
        startup = clocked(lambda: rank(part, chunk), work.device)
        peak = peak_memory(lambda: rank(part[:9], chunk), work.device)
        seconds = clocked(lambda: rank(part, chunk), work.device) / share
        note = "" if share == 1 else f"projected from {len(part):,} paths on {chunk:,} images"
        if share < 1 and seconds <= work.seconds:
            seconds, note = clocked(lambda: rank(work.ranked, work.rank_images), work.device), ""
    floor = work.tree_floor(work.ranked, work.rank_images)
    images, paths = len(work.ranked) * work.rank_images, len(work.ranked)
    return Measurement(images, {0: seconds}, {0: floor}, startup, [], peak, paths, note)


def _batches(subject: Subject, work: Work) -> Iterator[tuple[Tensor, Tensor]]:
    data = subject.see(work.data)
    for epoch in itertools.count():
        yield from data.train.train_batches(epoch, work.batch)


def worth_timing_together(images: Tensor) -> bool:
    """Return whether these are small images on a GPU, where single steps are too short to be timed."""
    return images.device.type == "cuda" and images.shape[-1] <= SMALL


def _repeated(work_once: Callable[[], object], subject: Subject, work: Work, images: int, most: int = 5) -> Measurement:
    found = Measurement(images, {}, {})
    with subject.running():
        found.startup = clocked(work_once, work.device)
        found.peak = peak_memory(work_once, work.device)
        start = time.perf_counter()
        for key in range(most):
            found.seconds[key] = clocked(work_once, work.device)
            if time.perf_counter() - start > work.seconds:
                break
    return found


def clocked(work: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def peak_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak of GPU memory in bytes, including weights and recorded graphs, or None on a CPU."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device)
