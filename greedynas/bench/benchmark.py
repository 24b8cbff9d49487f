"""`greedynas bench`: a comparison of several ways to run a supernet on this machine.

    record = run_bench(["mobilenet"], BenchSettings(), console)
    show_bench(record, console)

The row of a variant that fails has the reason, and the other variants are still measured.
"""

import gc
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from greedynas.bench.data import Need, augmentation, repeated_rate, synthetic_data, write_photos
from greedynas.bench.measures import (
    Measurement,
    Work,
    choose_paths,
    filtering,
    forward_evaluation,
    ranking,
    training_step,
)
from greedynas.bench.record import Row, machine_facts, row_facts
from greedynas.bench.variants import EAGER, PLAIN, VARIANTS, Subject, Variant, choose_variants, failure_text, why_not
from greedynas.data.datasets import open_data
from greedynas.data.loader import cores, cpus
from greedynas.data.settings import DataSettings
from greedynas.greedy.settings import TrainSettings
from greedynas.jobs.estimates import machine_name
from greedynas.jobs.resolving import load_config
from greedynas.rundir.schemas import VERSIONS
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.runtime.files import write_json
from greedynas.runtime.rng import stream
from greedynas.settings.loading import preset_names
from greedynas.settings.schema import Config
from greedynas.spaces.space import Space, load_space

SCHEMA_VERSION = VERSIONS["bench"]
SPACES = ("mobilenet", "mobilenet-se", "macro")
MEASURES: dict[str, Callable[[Subject, Work], Measurement]] = {
    "train": training_step,
    "forward": forward_evaluation,
    "filter": filtering,
    "rank": ranking,
}
DATA = "data"  # loading images, which no variant changes
FIXED = ("train", "forward")  # measures that need only one path
PAPER = TrainSettings()
ENUMERATED = 10_000  # a space with at most this number of paths is ranked as a whole
ORDER = (
    "greedynas",
    EAGER,
    PLAIN,
    "fp32-nhwc",
    "toolkits",
    "fp16",
    "bf16",
    "compiled",
)  # the order in which variants are measured


@dataclass(frozen=True)
class BenchSettings:
    """The options of a benchmark. Those that are None are chosen for the machine and the space."""

    batch: int | None = None
    image_size: int | None = None
    steps: int | None = None  # paths of the training and forward measures
    seconds: float | None = None  # time for one measure of one variant, after its start
    total: float | None = None  # seconds after which no further measure is started
    variants: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    data: str | None = None  # images for the data rows; None: synthetic ones
    device: str = "auto"
    seed: int = 0
    rounds: int = 1  # how often all variants are measured, in turn
    apart: bool | None = (
        None  # a process of its own for every variant; None: on a CPU, where the allocator is set up once
    )


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measures."""

    image_size: int
    batch: int
    steps: int
    seconds: float
    filter_images: int
    ranked: int  # paths
    rank_images: int


@dataclass
class Bench:
    """The benchmark of one space, with its rows."""

    space: Space
    sizes: Sizes
    work: Work
    rows: list[Row] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)


def run_bench(
    spaces: Sequence[str], settings: BenchSettings, console: Console, out: Path | None = None
) -> dict[str, Any]:
    """Run the benchmark and return its record. With `out`, that file always has the results so far."""
    device = choose_device(settings.device)
    variants = choose_variants(settings.variants)
    measures = choose_measures(settings.measures)
    configs = [config_for(name, settings) for name in spaces or SPACES]
    if settings.data is not None:
        open_photos(settings.data, configs[0][1].image_size, device)  # errors before anything is measured
    start = time.perf_counter()
    over = math.inf if settings.total is None else start + settings.total
    record: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "machine": machine_facts(device), "spaces": {}}
    _save(record, out, start)  # an error if the file cannot be written, before the work
    benches = [Bench(config.space, sizes, make_work(config, sizes, device)) for config, sizes in configs]
    slow: dict[str, str] = {}  # variants that take too long to start on another space

    def note() -> None:
        record["spaces"] = {bench.space.name: bench_facts(bench) for bench in benches}
        _save(record, out, start)

    apart = device.type == "cpu" if settings.apart is None else settings.apart
    # Each variant is measured on all spaces before the next one, so that the most important are done if time runs out.
    for _ in range(settings.rounds):
        for variant in sorted(variants, key=lambda one: ORDER.index(one.name)):
            for bench in benches:
                with console.status(f"{bench.space.name}: {variant.label}"):
                    measure = measured_apart if apart else measure_variant
                    bench.rows = joined(bench.rows, measure(variant, bench.work, measures, slow, over))
                note()
    for bench in benches if DATA in measures and time.perf_counter() < over else ():
        with console.status(f"{bench.space.name}: loading images"):
            bench.data = data_rows(bench.work, settings.data)
        note()
    return record


def _save(record: dict[str, Any], out: Path | None, start: float) -> None:
    record["seconds"] = round(time.perf_counter() - start, 1)
    if out is not None:
        try:
            write_json(out, record)
        except OSError as error:
            raise GreedyNASError(f"cannot write {out}: {error.strerror}") from None


# Choices


def choose_measures(names: Sequence[str]) -> tuple[str, ...]:
    known = (*MEASURES, DATA)
    for name in names:
        if name not in known:
            raise unknown("measure", name, list(known))
    return tuple(name for name in known if not names or name in names)


def config_for(name: str, settings: BenchSettings) -> tuple[Config, Sizes]:
    """Return the preset of a space, or the paper's settings if there is none, with the sizes of the benchmark."""
    space = load_space(name)
    presets = [load_config(preset) for preset in preset_names() if preset != "auto"]
    config = next(
        (preset for preset in presets if preset.space.name == space.name), Config(name=space.name, space=space)
    )
    sizes = choose_sizes(space, settings, choose_device(settings.device).type == "cuda")
    space = space.adapt(image_size=sizes.image_size)
    train = config.train.model_copy(
        update={
            "batch_size": sizes.batch,
            "filter_images": sizes.filter_images,
            "bn_images": min(PAPER.bn_images, max(sizes.rank_images, sizes.filter_images)),
        }
    )
    return config.model_copy(update={"space": space, "train": train, "seed": settings.seed}), sizes


def choose_sizes(space: Space, settings: BenchSettings, gpu: bool) -> Sizes:
    """Return realistic sizes for a GPU, or sizes so small that a CPU needs only a minute or two."""
    small = space.image_size <= 64
    whole = space.size <= ENUMERATED
    if gpu:
        chosen = Sizes(
            image_size=space.image_size,
            batch=256 if small else 512,
            steps=50,
            seconds=15.0,
            filter_images=PAPER.filter_images,
            ranked=space.size if whole else 10,
            rank_images=5000 if whole else 512,
        )
    else:
        chosen = Sizes(
            image_size=min(space.image_size, 64),
            batch=8,
            steps=3,
            seconds=1.5,
            filter_images=16,
            ranked=min(27, space.size) if whole else 6,
            rank_images=16,
        )
    asked = {key: getattr(settings, key) for key in ("image_size", "batch", "steps", "seconds")}
    return Sizes(**{**vars(chosen), **{key: value for key, value in asked.items() if value is not None}})


def make_work(config: Config, sizes: Sizes, device: torch.device) -> Work:
    space = config.space
    if sizes.ranked == space.size:
        ranked = np.indices(space.num_ops).reshape(len(space.layers), -1).T
    elif space.size <= ENUMERATED:  # a part of the tree with all ops of the last layers
        ranked = np.indices(space.num_ops).reshape(len(space.layers), -1).T[: sizes.ranked]
    else:
        ranked = space.sample(sizes.ranked, stream(config.seed, "bench ranking"))
    images = max(sizes.filter_images, sizes.rank_images)
    data = synthetic_data(space, 20 * sizes.batch, images, config.seed, device)
    paths = choose_paths(config, sizes.steps)
    return Work(config, data, device, sizes.batch, paths, ranked, sizes.rank_images, sizes.seconds)


# Measuring


def measure_variant(
    variant: Variant, work: Work, measures: Sequence[str], slow: dict[str, str], over: float = math.inf
) -> list[Row]:
    """Return a row for every measure of one variant. If a measure fails, the others are still done."""
    wanted = [name for name in MEASURES if name in measures and variant.measures(name, FIXED)]
    skipped = why_not(variant, work.device) or slow.get(variant.name, "")
    if skipped:
        return [Row(name, variant, skipped=skipped) for name in wanted]
    rows = []
    subject = None
    for name in wanted:
        row = Row(name, variant)
        rows.append(row)
        if time.perf_counter() > over:
            row.skipped = "the total time had run out (--total)"
            continue
        try:
            subject = subject or Subject(variant, work.config, work.device, work.paths[0])
            row.found = MEASURES[name](subject, work)
        except Exception as error:  # out of memory, no compiler: reported in the row
            row.error = failure_text(error)
        _note_slow(row, work, slow)
    del subject
    free_memory(work.device)
    return rows


def measured_apart(
    variant: Variant, work: Work, measures: Sequence[str], slow: dict[str, str], over: float = math.inf
) -> list[Row]:
    """Measure one variant in a process of its own, which leaves nothing behind, such as an allocator that keeps memory."""
    left = over - time.perf_counter()
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_measured_here, variant, work, measures, slow, left, torch.get_num_threads()).result()


def _measured_here(
    variant: Variant, work: Work, measures: Sequence[str], slow: dict[str, str], left: float, threads: int
) -> list[Row]:
    torch.set_num_threads(threads)
    return measure_variant(variant, work, measures, slow, time.perf_counter() + left)


def joined(rows: list[Row], more: list[Row]) -> list[Row]:
    """Return rows with the times of another round."""
    before = {(row.measure, row.variant.name): row for row in rows}
    for row in more:
        old = before.get((row.measure, row.variant.name))
        if old is None:
            rows = [*rows, row]
        elif old.found is not None and row.found is not None:
            old.found.add_round(row.found)
    return rows


def _note_slow(row: Row, work: Work, slow: dict[str, str]) -> None:
    startup = None if row.found is None else row.found.startup
    if row.variant.compiled and startup is not None and startup > work.seconds:
        name = work.config.space.name
        slow[row.variant.name] = f"compiling one path of {name} took {startup:.0f} s: run this space alone"


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def data_rows(work: Work, source: str | None) -> list[dict[str, Any]]:
    """Return the images per second of augmented training batches, from memory and decoded from files by workers."""
    rows: list[dict[str, Any]] = []

    def row(label: str, measured: Callable[[], float]) -> None:
        facts: dict[str, Any] = {"label": label, "images_per_second": None, "error": None}
        try:
            facts["images_per_second"] = measured()
        except Exception as error:
            facts["error"] = failure_text(error)
        rows.append(facts)

    seconds, size, device = min(work.seconds, 5.0), work.config.space.image_size, work.device
    on = "GPU" if device.type == "cuda" else "CPU"
    row(f"from memory, on the {on}", lambda: repeated_rate(work.data.train, work.batch, min(seconds, 1.0), 0, device))
    with tempfile.TemporaryDirectory() as folder:
        photos = source
        if photos is None:
            photos = folder
            write_photos(Path(folder), size, 256 if device.type == "cuda" else 64)
        label = f"from {'synthetic JPEG' if source is None else ''} files, {cpus()} workers on {cores()} cores"
        row(" ".join(label.split()), lambda: _from_files(photos, size, work.batch, seconds, device))
    return rows


def _from_files(source: str, size: int, batch: int, seconds: float, device: torch.device) -> float:
    data = open_photos(source, size, device)
    return repeated_rate(data.train, min(batch, 64), seconds, cpus(), device)


def open_photos(source: str, size: int, device: torch.device) -> Any:
    settings = DataSettings(source=source, augment=augmentation(size), memory_gb=0.0, check_duplicates=False)
    return open_data(settings, image_size=size, image_channels=3, seed=0, device=device)


def measured_need(image_size: int, seconds: float, device: torch.device) -> Need:
    """Measure the images per second that training takes on this machine, with `mobilenet` or (small images) `macro`."""
    name = "macro" if image_size <= 64 else "mobilenet"
    settings = BenchSettings(image_size=image_size, seconds=seconds, device=device.type)
    config, sizes = config_for(name, settings)
    work = make_work(config, sizes, device)
    row = measure_variant(VARIANTS[-1], work, ("train",), {})[0]
    if row.found is None:
        raise GreedyNASError(f"the training rate could not be measured ({row.error}): give it with --need")
    return Need(row.found.images / row.found.median, f"{name} at {image_size} px on {machine_name(device)}, measured")


def bench_facts(bench: Bench) -> dict[str, Any]:
    by_measure = {(row.measure, row.variant.name): row.found for row in bench.rows}
    order = [variant.name for variant in VARIANTS]
    rows = sorted(bench.rows, key=lambda row: ([*MEASURES].index(row.measure), order.index(row.variant.name)))
    facts = [row_facts(row, by_measure.get((row.measure, PLAIN)), by_measure.get((row.measure, EAGER))) for row in rows]
    return {**vars(bench.sizes), "classes": bench.space.num_classes, "rows": facts, "data": bench.data}
