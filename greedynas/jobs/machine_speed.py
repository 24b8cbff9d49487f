"""How quick this machine is at a job: a few seconds of the real work on copies, nothing of which a run sees afterwards."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greedynas.data.augmentation import augment_more, seeded_generators
from greedynas.data.datasets import Data
from greedynas.data.loader import FEW, ImageSet, cpus
from greedynas.gpu import engine
from greedynas.gpu.recording import worth_recording
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.steps import TrainingStep, supernet_optimizer
from greedynas.models.batchnorm import calibrates
from greedynas.models.network import build_network
from greedynas.models.supernet import Supernet
from greedynas.runtime.devices import autocast, full_precision
from greedynas.runtime.rng import stream, torch_stream
from greedynas.runtime.stopwatch import seconds, wait
from greedynas.settings.recipes import ResolvedRecipe
from greedynas.settings.schema import Config
from greedynas.spaces.budget import Budget
from greedynas.spaces.costs import IntArray, tree_cost
from greedynas.spaces.space import Space
from greedynas.stages.recipes import make_optimizer, make_recipe
from greedynas.stages.run import choose_precisions, supernet_of

PATIENCE = 0.5  # seconds for one repetition of a part; what would take longer is done with fewer images
DECODED = 64  # different images that are decoded for it
SPREAD = 4  # paths of different costs that stand for all
FOUND = 0.9  # the cost of a found network among those within the budget, as a quantile: the best are seldom cheap


@dataclass(frozen=True)
class Pace:
    """Seconds of each part."""

    step: float  # an update of the supernet by one path
    waiting: float  # for the images of an update
    filtering: float  # m paths on the filter images
    evaluation: float  # a searched path on all validation images, of which others share a part
    retrain_step: float  # an update of a found network, with its images
    classification: float  # an image by a found network on the CPU, as exported files are tested
    measuring: float  # that it took to find this out


def measure_pace(config: Config, data: Data, device: torch.device, budget: Budget | None = None) -> Pace:
    """Do a little of everything, with images of the run and fresh weights. A latency limit is not looked at."""
    start = time.perf_counter()
    space = config.space.adapt(num_classes=len(data.class_names))
    budget = None if budget is None else budget.model_copy(update={"max_latency_ms": None, "min_latency_ms": None})
    precision, eval_precision = choose_precisions(config, device)
    net = supernet_of(config, len(data.class_names), device)
    size = min(config.train.batch_size, len(data.train))
    with engine.using(config.engine):
        step = _step(config, net, data, size, precision)
        return Pace(
            step=step,
            waiting=_waiting(data.train, size, step, device),
            filtering=_filtering(config, net, data, eval_precision),
            evaluation=_evaluation(config, net, data, budget, eval_precision),
            retrain_step=_retrain_step(config, space, data, budget, device, precision),
            classification=_classification(config, space, data, budget),
            measuring=time.perf_counter() - start,
        )


_known: dict[str, Pace] = {}


def known_pace(config: Config, data: Data, device: torch.device, budget: Budget | None = None) -> Pace:
    """The same, measured once in this process for settings that differ in lengths alone: `--hours` asks for it, and then
    the plan of what it chose."""
    lengths = {
        "train": {"max_epochs", "warmup", "pool_size"},
        "search": {"generations", "population"},
        "retrain": {"epochs", "top_epochs"},
    }
    settings = config.model_dump_json(exclude={"asked": True, "reasons": True, **lengths})
    limits = None if budget is None else budget.model_dump_json()
    key = repr((settings, limits, str(device), len(data.train), len(data.val)))
    if key not in _known:
        _known[key] = measure_pace(config, data, device, budget)
    return _known[key]


def _step(config: Config, net: Supernet, data: Data, size: int, precision: str) -> float:
    images, labels = _some(data.train, size)
    net.train()
    optimizer = supernet_optimizer(net, config.train)
    paths = _spread(net.space, None, config.seed)

    step = TrainingStep(net, optimizer, config.train, data.class_weights, precision)

    def work(n: int) -> None:
        for path in paths:
            step(images[:n], labels[:n], [tuple(path)], 1e-3)

    if worth_recording(images):  # for one size of batch, and quick with all of it
        work(size)
        return statistics.median(_clock(work, size, images.device, warm=True) for _ in range(3)) / len(paths)
    return _seconds(work, size, images.device) / len(paths)


def _filtering(config: Config, net: Supernet, data: Data, precision: str) -> float:
    settings = config.train
    size = min(settings.filter_images, len(data.val))
    images, labels = _some(data.val, size)
    sampled = settings.m if settings.filtering else settings.k
    paths = list(net.space.sample(sampled, stream(config.seed, "pace of filtering")))
    calibration, extra = None, 0
    if calibrates(settings.bn):
        extra = min(settings.calibration_images, len(data.train))
        calibration, _ = _some(data.train, extra)

    def work(n: int) -> None:
        used = None if calibration is None else calibration[: max(2, extra * n // size)]
        shared = max(2, settings.bn_images * n // size)
        evaluate_paths(
            net, paths, images[:n], labels[:n], settings.bn, bn_images=shared, calibration=used, precision=precision
        )

    return _seconds(work, size, images.device) + _decoding(data.val, size) + _decoding(data.train, extra)


def _evaluation(config: Config, net: Supernet, data: Data, budget: Budget | None, precision: str) -> float:
    """Of a few paths that share little; a population shares more of its first layers."""
    settings = config.search
    chunk = min(settings.bn_images, len(data.val))
    images, labels = _some(data.val, chunk)
    everyone = net.space.sample(settings.population, stream(config.seed, "pace of the search"), budget)
    paths = everyone[:8]
    calibration = None
    if calibrates(settings.bn):
        calibration, _ = _some(data.train, min(settings.calibration_images, len(data.train)))

    def work(n: int) -> None:
        options = {"bn_images": n, "calibration": calibration, "precision": precision}
        evaluate_paths(net, list(paths), images[:n], labels[:n], settings.bn, **options)  # type: ignore[arg-type]

    measured = _seconds(work, chunk, images.device) * len(data.val) / chunk
    sharing = tree_macs(net.space, everyone) / tree_macs(net.space, paths)
    return (measured * sharing + _decoding(data.val, len(data.val))) / len(everyone)


def _retrain_step(
    config: Config, space: Space, data: Data, budget: Budget | None, device: torch.device, precision: str
) -> float:
    recipe = make_recipe(config.retrain)
    everything = data.train_and_val().seen(randaugment=recipe.randaugment, erasing=recipe.erasing)
    size = min(recipe.batch_size, len(everything))
    images, labels = _some(everything, size)
    network = _found(config, space, budget, recipe.dropout)
    network.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = make_optimizer(network, recipe)

    def work(n: int) -> None:
        with seeded_generators(config.seed, "pace", device=device), autocast(device, precision):
            logits = network(images[:n])
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(full_precision(logits), labels[:n], label_smoothing=recipe.label_smoothing).backward()
        optimizer.step()

    step = _seconds(work, size, device)
    return step + _waiting(everything, size, step, device) + _augmenting(everything, size, recipe)


def _classification(config: Config, space: Space, data: Data, budget: Budget | None) -> float:
    images = _some(data.val, 32)[0].cpu()
    network = _found(config, space, budget).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]

    def work(n: int) -> None:
        with torch.no_grad():
            network(images[:n])

    return _seconds(work, 32, images.device) / 32 + _decoding(data.val, 32) / 32


def _found(config: Config, space: Space, budget: Budget | None, dropout: float = 0.0) -> nn.Module:
    """A network as a search might find it, with fresh weights."""
    path = _by_cost(space, budget, config.seed, np.array([FOUND]))[0]
    return build_network(path, space, dropout=dropout, generator=torch_stream(config.seed, "pace"))


# Images


def _some(images: ImageSet, count: int) -> tuple[Tensor, Tensor]:
    """So many images without augmentation, a few of them over and over where they must be decoded first."""
    different = min(count, len(images) if images.in_memory else min(DECODED, len(images)))
    rows = np.arange(count) % max(different, 1)
    batch, labels = images.eval_batch(np.arange(different))
    return batch[rows].contiguous(memory_format=torch.channels_last), labels[rows]


def _waiting(images: ImageSet, size: int, step: float, device: torch.device) -> float:
    """What an update waits for its images: while a GPU computes, worker processes decode the next ones."""
    if not images.in_memory:
        return max(_decoding(images, size) - (step if device.type == "cuda" else 0.0), 0.0)
    plain = images.seen(randaugment=None, erasing=0.0)
    batches = plain.train_batches(0, size)
    times = []
    for _ in range(min(4, plain.steps_per_epoch(size))):
        start = time.perf_counter()
        next(batches)
        wait(device)
        times.append(time.perf_counter() - start)
    usual = statistics.median(times[1:] or times)
    return usual + max(times[0] - usual, 0) / plain.steps_per_epoch(size)  # the epoch is planned before its first batch


def _decoding(images: ImageSet, count: int) -> float:
    """Seconds for so many images of a set that is not in memory, as its workers share them."""
    if images.in_memory or count == 0:
        return 0.0
    some = min(DECODED, len(images), count)
    images.eval_batch(np.arange(min(some, 2)))
    start = time.perf_counter()
    images.eval_batch(np.arange(some))
    return (time.perf_counter() - start) * count / some


def _augmenting(images: ImageSet, size: int, recipe: ResolvedRecipe) -> float:
    """RandAugment and erasing go image by image, in worker processes where there are enough images."""
    if recipe.randaugment is None and recipe.erasing == 0:
        return 0.0
    some = min(16, len(images))
    side = images.view.size
    pixels = torch.zeros((some, side, side, images.view.channels), dtype=torch.uint8)
    start = time.perf_counter()
    augment_more(images.view, pixels, 0, np.arange(some))
    workers = cpus() if len(images) >= FEW else 1
    return (time.perf_counter() - start) * size / some / workers


# Paths


def _spread(space: Space, budget: Budget | None, seed: int) -> IntArray:
    """A few paths whose mean cost is that of all, from cheap to dear."""
    return _by_cost(space, budget, seed, (np.arange(SPREAD) + 0.5) / SPREAD)


def _by_cost(space: Space, budget: Budget | None, seed: int, quantiles: np.ndarray) -> IntArray:
    paths = space.sample(1000, stream(seed, "pace of paths"), budget)
    order = np.argsort(space.costs(paths).macs, kind="stable")
    return paths[order[(quantiles * len(paths)).astype(np.int64)]]


def tree_macs(space: Space, paths: IntArray) -> int:
    """Multiply-adds of paths that are evaluated together, each shared prefix once."""
    stem = sum(layer.cost(layer.ops[0]).macs for layer in space.stem_layers)
    return tree_cost(space.cost_tables["macs"], stem, paths)


# The clock


def _seconds(work: Callable[[int], None], size: int, device: torch.device) -> float:
    """What `work` takes with `size` images, from as many of them as there is patience for. A GPU is quick with all."""
    n = size if device.type == "cuda" else min(size, 8)
    taken, slope = _clock(work, n, device, warm=True), 0.0
    while n < size and taken < PATIENCE:
        before, fewer = taken, n
        n = min(size, 4 * n)
        taken = _clock(work, n, device, warm=True)
        slope = (taken - before) / (n - fewer)
    times = [taken]
    while len(times) < 3 and sum(times) + taken < 2 * PATIENCE:
        times.append(_clock(work, n, device))
    taken = statistics.median(times)
    # The rest in proportion, or a little less: a part of the time does not depend on the images.
    return taken + (size - n) * min(max(slope, 0.5 * taken / n), taken / n)


def _clock(work: Callable[[int], None], n: int, device: torch.device, warm: bool = False) -> float:
    """One call; with `warm` after another one, in which kernels are chosen and compiled."""
    if warm:
        work(n)
    return max(seconds(lambda: work(n), device), 1e-9)  # a clock may stand still
