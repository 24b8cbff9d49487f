"""The speed of this machine at a job, measured by a few seconds of the real work, which leaves no trace in a run."""

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
from greedynas.models.losses import teacher_logits
from greedynas.models.model_file import make_network
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
from greedynas.stages.network_choice import Target, make_card
from greedynas.stages.recipes import make_optimizer, make_recipe
from greedynas.stages.run import choose_precisions, supernet_of

PATIENCE = 0.5  # seconds for one repetition of a part; longer work is measured with fewer images
DECODED = 64  # different images that are decoded for the measurement
SPREAD = 4  # paths of different costs that represent all paths
FOUND = 0.9  # assumed cost of a found network, as a quantile within the budget: the best networks are seldom cheap


@dataclass(frozen=True)
class Pace:
    """The seconds that each part of a job takes."""

    step: float  # an update of the supernet by one path
    waiting: float  # the wait for the images of an update
    filtering: float  # m paths on the filter images
    evaluation: float  # a searched path on all validation images, in a population with shared prefixes
    retrain_step: float  # an update of a found network, with loading of its images
    classification: float  # an image by a found network on the CPU, as exported files are tested
    measuring: float  # the measurement itself
    adapt_step: float = 0.0  # an update of the pretrained base, with loading of its images; 0 without one


def measure_pace(config: Config, data: Data, device: torch.device, budget: Budget | None = None) -> Pace:
    """Measure every part of a job for a moment, with images of the run and fresh weights, and return the pace.

    A latency limit in the budget is ignored.
    """
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
            adapt_step=_adapt_step(config, data, device, precision),
            classification=_classification(config, space, data, budget),
            measuring=time.perf_counter() - start,
        )


_known: dict[str, Pace] = {}


def known_pace(config: Config, data: Data, device: torch.device, budget: Budget | None = None) -> Pace:
    """Return the pace, measured once per process for settings that differ only in lengths.

    Both `--hours` and the plan of the settings that it chose need it.
    """
    lengths = {
        "train": {"max_epochs", "warmup", "pool_size"},
        "search": {"generations", "population"},
        "retrain": {"epochs", "top_epochs"},
        "adapt": {"epochs", "top_epochs"},
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
    paths = _spread(net.space, config.train.limits, config.seed)

    teacher = None if config.pretrained is None else _pretrained(config, data, images.device)
    eval_precision = choose_precisions(config, images.device)[1]
    step = TrainingStep(net, optimizer, config.train, data.class_weights, precision, teacher, eval_precision)

    def work(n: int) -> None:
        for path in paths:
            step(images[:n], labels[:n], [tuple(path)], 1e-3)

    if worth_recording(images):  # a recording is for one batch size, and fast with a whole batch
        work(size)
        return statistics.median(_clock(work, size, images.device, warm=True) for _ in range(3)) / len(paths)
    return _seconds(work, size, images.device) / len(paths)


def _filtering(config: Config, net: Supernet, data: Data, precision: str) -> float:
    settings = config.train
    size = min(settings.filter_images, len(data.val))
    images, labels = _some(data.val, size)
    sampled = settings.m if settings.filtering else settings.k
    paths = list(net.space.sample(sampled, stream(config.seed, "pace of filtering"), settings.limits))
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
    """Return the seconds per path of a population, measured on a few paths and scaled by the layers that are shared."""
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
    taught = config.pretrained is not None and config.retrain.teacher == config.pretrained[0]
    teacher = _pretrained(config, data, device) if taught else None

    def work(n: int) -> None:
        if teacher is not None:
            teacher_logits(teacher, images[:n], choose_precisions(config, device)[1])
        with seeded_generators(config.seed, "pace", device=device), autocast(device, precision):
            logits = network(images[:n])
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(full_precision(logits), labels[:n], label_smoothing=recipe.label_smoothing).backward()
        optimizer.step()

    step = _seconds(work, size, device)
    return step + _waiting(everything, size, step, device) + _augmenting(everything, size, recipe)


def _pretrained(config: Config, data: Data, device: torch.device) -> nn.Module:
    """Return the pretrained network of a run, with fresh weights, in evaluation mode."""
    assert config.pretrained is not None  # which the callers have checked
    name, model = config.pretrained
    network = make_network(make_card(Target(name, timm=model), data))
    return network.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore[call-overload]


def _adapt_step(config: Config, data: Data, device: torch.device, precision: str) -> float:
    """Return the seconds of an update of the pretrained network, with loading of its images; 0 if there is none."""
    if config.pretrained is None:
        return 0.0
    recipe = make_recipe(config.adapt)
    size = min(recipe.batch_size, len(data.train))
    images, labels = _some(data.train, size)
    network = _pretrained(config, data, device).train().requires_grad_(True)
    optimizer = make_optimizer(network, recipe)

    def work(n: int) -> None:
        with autocast(device, precision):
            logits = network(images[:n])
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(full_precision(logits), labels[:n]).backward()
        optimizer.step()

    step = _seconds(work, size, device)
    return step + _waiting(data.train, size, step, device)


def _classification(config: Config, space: Space, data: Data, budget: Budget | None) -> float:
    images = _some(data.val, 32)[0].cpu()
    network = _found(config, space, budget).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]

    def work(n: int) -> None:
        with torch.no_grad():
            network(images[:n])

    return _seconds(work, 32, images.device) / 32 + _decoding(data.val, 32) / 32


def _found(config: Config, space: Space, budget: Budget | None, dropout: float = 0.0) -> nn.Module:
    """Return a network such as a search might find, with fresh weights."""
    path = tuple(_by_cost(space, budget, config.seed, np.array([FOUND]))[0].tolist())
    return build_network(path, space, dropout=dropout, generator=torch_stream(config.seed, "pace"))


# Images


def _some(images: ImageSet, count: int) -> tuple[Tensor, Tensor]:
    """Return `count` images without augmentation; images that must be decoded first are repeated."""
    different = min(count, len(images) if images.in_memory else min(DECODED, len(images)))
    rows = np.arange(count) % max(different, 1)
    batch, labels = images.eval_batch(np.arange(different))
    return batch[rows].contiguous(memory_format=torch.channels_last), labels[rows]


def _waiting(images: ImageSet, size: int, step: float, device: torch.device) -> float:
    """Return the seconds that an update waits for its images; worker processes decode while a GPU computes."""
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
    """Return the seconds for decoding `count` images by all workers, or 0 for a set in memory."""
    if images.in_memory or count == 0:
        return 0.0
    some = min(DECODED, len(images), count)
    images.eval_batch(np.arange(min(some, 2)))
    start = time.perf_counter()
    images.eval_batch(np.arange(some))
    return (time.perf_counter() - start) * count / some


def _augmenting(images: ImageSet, size: int, recipe: ResolvedRecipe) -> float:
    """Return the seconds for RandAugment and erasing of a batch, which workers share if there are enough images."""
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
    """Return a few paths from cheap to expensive, whose mean cost is that of all paths within the budget."""
    return _by_cost(space, budget, seed, (np.arange(SPREAD) + 0.5) / SPREAD)


def _by_cost(space: Space, budget: Budget | None, seed: int, quantiles: np.ndarray) -> IntArray:
    paths = space.sample(1000, stream(seed, "pace of paths"), budget)
    order = np.argsort(space.costs(paths).macs, kind="stable")
    return paths[order[(quantiles * len(paths)).astype(np.int64)]]


def tree_macs(space: Space, paths: IntArray) -> int:
    """Return the multiply-adds of paths that are evaluated together, with each shared prefix counted once."""
    if space.sizes:
        groups = [(space.adapt(image_size=size), paths[paths[:, 0] == i, 1:]) for i, size in enumerate(space.sizes)]
        return sum(tree_macs(at_size, group) for at_size, group in groups if len(group))
    stem = sum(layer.cost(layer.ops[0]).macs for layer in space.stem_layers)
    return tree_cost(space.cost_tables["macs"], stem, paths)


# The clock


def _seconds(work: Callable[[int], None], size: int, device: torch.device) -> float:
    """Return the seconds of `work` with `size` images, extrapolated on a CPU from as many images as PATIENCE allows."""
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
    # The rest is extrapolated in proportion or a little less: a part of the time does not depend on the images.
    return taken + (size - n) * min(max(slope, 0.5 * taken / n), taken / n)


def _clock(work: Callable[[int], None], n: int, device: torch.device, warm: bool = False) -> float:
    """Return the seconds of one call; with `warm`, another call before it chooses and compiles the kernels."""
    if warm:
        work(n)
    return max(seconds(lambda: work(n), device), 1e-9)  # a coarse clock may show no difference
