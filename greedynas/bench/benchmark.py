"""`greedynas bench`: ways to run a supernet side by side on the present machine.

    record = run_bench(["mobilenet"], BenchSettings(), console)
    show_bench(record, console)

A variant that fails has its reason in its row; the others go on.
"""

import gc
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from greedynas.bench.data import Need, augmentation, over_and_over, synthetic_data, write_photos
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
from greedynas.bench.variants import EAGER, PLAIN, VARIANTS, Subject, Variant, choose_variants, told_failure, why_not
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
FIXED = ("train", "forward")  # what can be measured of one path
PAPER = TrainSettings()
ENUMERATED = 10_000  # paths: a space that has no more is ranked whole
ORDER = ("greedynas", EAGER, PLAIN, "fp16", "bf16", "compiled")  # in which variants are measured


@dataclass(frozen=True)
class BenchSettings:
    """What is asked for; None: chosen for the machine and the space."""

    batch: int | None = None
    image_size: int | None = None
    steps: int | None = None  # paths of the training and forward measures
    seconds: float | None = None  # for one measure of one variant, after its start
    total: float | None = None  # seconds after which no other measure is begun
    variants: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    data: str | None = None  # images for the data rows; synthetic ones if not given
    device: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    image_size: int
    batch: int
    steps: int
    seconds: float
    filter_images: int
    ranked: int  # paths
    rank_images: int


@dataclass
class Bench:
    """The rows of one space."""

    space: Space
    sizes: Sizes
    work: Work
    rows: list[Row] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)


def run_bench(
    spaces: Sequence[str], settings: BenchSettings, console: Console, out: Path | None = None
) -> dict[str, Any]:
    """Measure, and return the record; with `out`, what is known so far is in that file at any time."""
    device = choose_device(settings.device)
    variants = choose_variants(settings.variants)
    measures = choose_measures(settings.measures)
    configs = [config_for(name, settings) for name in spaces or SPACES]
    if settings.data is not None:
        open_photos(settings.data, configs[0][1].image_size, device)  # refused before anything is measured
    start = time.perf_counter()
    over = math.inf if settings.total is None else start + settings.total
    record: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "machine": machine_facts(device), "spaces": {}}
    _save(record, out, start)  # a file that cannot be written is told before the work
    benches = [Bench(config.space, sizes, make_work(config, sizes, device)) for config, sizes in configs]
    slow: dict[str, str] = {}  # variants that take too long to start for another space

    def note() -> None:
        record["spaces"] = {bench.space.name: bench_facts(bench) for bench in benches}
        _save(record, out, start)

    # A variant on every space before the next one: what counts most is known first, should the time run out.
    for variant in sorted(variants, key=lambda one: ORDER.index(one.name)):
        for bench in benches:
            with console.status(f"{bench.space.name}: {variant.label}"):
                bench.rows += measure_variant(variant, bench.work, measures, slow, over)
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


# What is measured


def choose_measures(names: Sequence[str]) -> tuple[str, ...]:
    known = (*MEASURES, DATA)
    for name in names:
        if name not in known:
            raise unknown("measure", name, list(known))
    return tuple(name for name in known if not names or name in names)


def config_for(name: str, settings: BenchSettings) -> tuple[Config, Sizes]:
    """The preset of a space with the sizes of the benchmark, which are the paper's; of spaces without one the paper's settings."""
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
    """On a GPU the real ones; on a CPU so little that all is done in a minute or two."""
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
    elif space.size <= ENUMERATED:  # a part of the tree: all ops of the last layers
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
    """Every measure of one variant, each on its own: a failure ends none of the others."""
    wanted = [name for name in MEASURES if name in measures and (name in FIXED or not variant.compiled)]
    skipped = why_not(variant, work.device) or slow.get(variant.name, "")
    if skipped:
        return [Row(name, variant, skipped=skipped) for name in wanted]
    rows = []
    subject = None
    for name in wanted:
        row = Row(name, variant)
        rows.append(row)
        if time.perf_counter() > over:
            row.skipped = "the time for all was over (--total)"
            continue
        try:
            subject = subject or Subject(variant, work.config, work.device, work.paths[0])
            row.found = MEASURES[name](subject, work)
        except Exception as error:  # out of memory, no compiler: the row says it
            row.error = told_failure(error)
        _note_slow(row, work, slow)
    del subject
    free_memory(work.device)
    return rows


def _note_slow(row: Row, work: Work, slow: dict[str, str]) -> None:
    startup = None if row.found is None else row.found.startup
    if row.variant.compiled and startup is not None and startup > work.seconds:
        name = work.config.space.name
        slow[row.variant.name] = f"compiling one path of {name} took {startup:.0f} s: ask for this space alone"


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def data_rows(work: Work, source: str | None) -> list[dict[str, Any]]:
    """Images per second of augmented training batches: from memory, and decoded from files by worker processes."""
    rows: list[dict[str, Any]] = []

    def row(label: str, measured: Callable[[], float]) -> None:
        facts: dict[str, Any] = {"label": label, "images_per_second": None, "error": None}
        try:
            facts["images_per_second"] = measured()
        except Exception as error:
            facts["error"] = told_failure(error)
        rows.append(facts)

    seconds, size, device = min(work.seconds, 5.0), work.config.space.image_size, work.device
    on = "GPU" if device.type == "cuda" else "CPU"
    row(f"from memory, on the {on}", lambda: over_and_over(work.data.train, work.batch, min(seconds, 1.0), 0, device))
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
    return over_and_over(data.train, min(batch, 64), seconds, cpus(), device)


def open_photos(source: str, size: int, device: torch.device) -> Any:
    settings = DataSettings(source=source, augment=augmentation(size), memory_gb=0.0, check_duplicates=False)
    return open_data(settings, image_size=size, image_channels=3, seed=0, device=device)


def measured_need(image_size: int, seconds: float, device: torch.device) -> Need:
    """What training takes on this machine: `mobilenet`, or `macro` for small images, as a run would train them."""
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
