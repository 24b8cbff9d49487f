"""`greedynas bench data`, which shows whether training waits for images, and the data rows of `greedynas bench`."""

import math
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from greedynas.data.datasets import Data, open_data
from greedynas.data.loader import ImageSet, Rows, Shelf, Shelves, cores, cpus, machine_memory
from greedynas.data.settings import DataSettings
from greedynas.data.sources import Arrays, Files, Source, Splits
from greedynas.data.transforms import View, stored_side
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream
from greedynas.runtime.stopwatch import wait
from greedynas.runtime.text import duration, percent, size
from greedynas.spaces.space import Space

BATCH = 64  # images that a worker decodes at a time; few, so that the rate settles within seconds
MOST = 20_000  # largest number of distinct files that are read
DISTINCT = 512  # number of distinct synthetic images, which are repeated if more are needed
ENOUGH = 0.97  # share of the rate of training that counts as sufficient


@dataclass(frozen=True)
class Feed:
    """The rate at which the loader delivers images on this machine, and what it depends on."""

    source: str
    images: int  # number of training images
    image_size: int
    workers: int
    cores: int
    first: float  # images/s when files are read that are not in the system's memory
    again: float  # images/s when they are
    file_bytes: float  # size of all training files; 0 if the images are not in files
    kept_bytes: int  # size of all training images, decoded
    memory: int  # bytes of memory of this machine
    stays: bool  # whether a run would keep the decoded images in memory

    @property
    def cached(self) -> bool:
        """Whether the files stay in the system's memory from the second epoch on."""
        return self.file_bytes < 0.6 * self.memory

    @property
    def rate(self) -> float:
        """The images per second after the first epoch."""
        return self.again if self.cached else self.first


@dataclass(frozen=True)
class Need:
    """The images per second that training takes, and the source of this number."""

    rate: float
    known_from: str


def verdict(feed: Feed, need: Need) -> str:
    """Return a sentence that says whether training waits for images, and what would help."""
    if feed.stays:
        return (
            f"All {feed.images:,} images stay in memory ({size(feed.kept_bytes)} at {feed.image_size} px): they are decoded "
            f"once, in about {duration(feed.images / feed.first)}, and training does not wait for storage or decoding."
        )
    head = f"The loader delivers {feed.rate:,.0f} images/s, training takes {need.rate:,.0f}"
    if feed.rate >= ENOUGH * need.rate:
        slow = feed.first < ENOUGH * need.rate
        return f"{head}: training does not wait for data" + (
            f", except in the first epoch, which gets {feed.first:,.0f} images/s." if slow else "."
        )
    waiting = percent(1 - feed.rate / need.rate)
    return f"{head}: training would wait for data {waiting} of the time; {_advice(feed, need)}."


def _advice(feed: Feed, need: Need) -> str:
    helps = []
    if not feed.cached and feed.first < 0.7 * feed.again:
        helps.append(
            f"the storage is the limit ({feed.again:,.0f} images/s once files are in memory): use faster storage, or a "
            f"machine with enough memory for the {size(feed.file_bytes)} of files"
        )
    if feed.again < ENOUGH * need.rate:
        wanted = math.ceil(need.rate * max(1, feed.workers) / feed.again)
        if wanted <= feed.cores:
            helps.append(f"use {wanted} workers (data.workers={wanted})")
        else:
            helps.append(f"decoding that fast needs about {wanted} cores, and there are {feed.cores}")
            if max(1, feed.workers) < feed.cores:
                helps.append(f"use all cores (data.workers={feed.cores})")
            helps.append(f"files resized to a shorter side of {stored_side(feed.image_size)} px decode faster")
    helps.append(
        f"decoded images in memory would take {size(feed.kept_bytes)} (data.memory_gb={_gigabytes(feed.kept_bytes)})"
    )
    return "; ".join(helps)


def _gigabytes(value: float) -> str:
    return f"{math.ceil(value / 1e8) / 10:g}"


# Measuring


def measure_feed(
    source: str, image_size: int, workers: int | None, seconds: float, device: torch.device, seed: int = 0
) -> Feed:
    """Measure how fast training images of a data set are read, as in a run that does not keep them in memory."""
    used = cpus() if workers is None else workers
    settings = DataSettings(
        source=source,
        augment=augmentation(image_size),
        memory_gb=0.0,
        workers=used,
        check_duplicates=False,
    )
    data = open_data(settings, image_size=image_size, image_channels=3, seed=seed, device=device)
    shelf, rows = data._pool, data.train._rows
    some = stream(seed, "bench data").permutation(rows)[:MOST]
    forget(shelf.source, some)
    batch = max(1, min(BATCH, len(some) // (4 * max(1, used))))
    first, read = loader_rate(ImageSet(shelf, some), batch, seconds, used, device)
    again = repeated_rate(ImageSet(shelf, some), batch, seconds, used, device, only=read)
    shelves = Shelves(shelf.view, device, used, None, False)
    kept = shelves.bytes_of(shelf.source, rows, crops=settings.augment == "resized_crop")
    return Feed(
        source=source,
        images=len(rows),
        image_size=image_size,
        workers=used,
        cores=cores(),
        first=first,
        again=max(first, again),
        file_bytes=float(shelf.source.byte_counts(some[:1000]).mean() * len(rows)),
        kept_bytes=kept,
        memory=machine_memory(),
        stays=kept <= shelves.max_bytes,
    )


def augmentation(image_size: int) -> Literal["pad_crop", "resized_crop"]:
    """Return the augmentation that the presets use at this image size."""
    return "resized_crop" if image_size > 64 else "pad_crop"


def loader_rate(images: ImageSet, batch: int, seconds: float, workers: int, device: torch.device) -> tuple[float, int]:
    """Read augmented batches of an epoch for at most `seconds`, and return images per second and the images read.

    The clock starts when every worker has delivered one batch, so that the start of workers does not count.
    """
    begin = start = end = time.perf_counter()
    counted, read = 0, 0
    batches = images.train_batches(0, batch)
    for number, (pixels, _) in enumerate(batches):
        wait(device)
        read, end = read + len(pixels), time.perf_counter()
        if number < max(1, workers):
            start = end
        else:
            counted += len(pixels)
            if end - start > seconds:
                break
    batches.close()  # type: ignore[attr-defined]  # closing the generator ends its worker processes
    return (counted / (end - start) if counted else read / (end - begin)), read


def repeated_rate(
    images: ImageSet, batch: int, seconds: float, workers: int, device: torch.device, only: int | None = None
) -> float:
    """Return the images per second when the same images are read repeatedly: all, or the first `only` of an epoch."""
    order = stream(images.view.seed, "order", 0).permutation(len(images))[:only]
    repeats = math.ceil(max(4 * max(1, workers) * batch, seconds * 20_000) / len(order))
    repeated = ImageSet(images._shelf, np.tile(images._rows[order], repeats))
    return loader_rate(repeated, batch, seconds, workers, device)[0]


def forget(source: Source, rows: Rows) -> None:
    """Ask the system to drop these files from its memory, so that they are read from storage."""
    if not isinstance(source, Files) or not hasattr(os, "posix_fadvise"):
        return
    for row in rows:
        with suppress(OSError):
            handle = os.open(source.path(row), os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


# Synthetic images


def synthetic_data(space: Space, train: int, val: int, seed: int, device: torch.device) -> Data:
    """Return data of random pixels in memory, in the form that `open_data` returns."""
    side = space.image_size
    stored = stored_side(side)
    view = View(
        size=side,
        stored=stored,
        channels=space.image_channels,
        augment=augmentation(side),
        pad=4,
        min_scale=0.08,
        flip=True,
        seed=seed,
    )
    shelves = Shelves(view, device, 0, None, False)
    names = [str(i) for i in range(space.num_classes)]

    def images(count: int, purpose: str) -> tuple[Shelf, ImageSet]:
        distinct = min(count, DISTINCT)
        shape = (distinct, stored, stored, space.image_channels)
        pixels = stream(seed, purpose).integers(0, 256, shape, dtype=np.uint8)
        shelf = shelves.open(Arrays(names, np.arange(distinct) % len(names), pixels), np.arange(distinct), purpose)
        return shelf, ImageSet(shelf, np.arange(count) % distinct)

    shelf, train_set = images(train, "train")
    _, val_set = images(val, "val")
    rows = {"train": shelf.rows, "val": np.zeros(0, np.int64), "test": np.zeros(0, np.int64)}
    return Data(
        train_set,
        val_set,
        names,
        [],
        None,
        Splits(shelf.source),
        shelves,
        shelf,
        rows,
        DataSettings(check_duplicates=False),
    )


def write_photos(folder: Path, image_size: int, count: int, seed: int = 0) -> None:
    """Write class folders of JPEG files, which exceed the image size as much as ImageNet's exceed 224 px."""
    width, height = round(500 / 224 * image_size), round(375 / 224 * image_size)
    for i in range(count):
        file = folder / f"class {i % 4}" / f"{i}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse = stream(seed, "photos", i).integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, quality=90)


# Output


def feed_facts(feed: Feed, need: Need) -> dict[str, Any]:
    return {
        "schema_version": 1,
        **asdict(feed),
        "images_per_second": feed.rate,
        "needed_images_per_second": need.rate,
        "need_known_from": need.known_from,
        "waiting": 0.0 if feed.stays else max(0.0, 1 - feed.rate / need.rate),
        "verdict": verdict(feed, need),
    }


def show_feed(feed: Feed, need: Need, console: Console) -> None:
    title = f"{feed.source}: {feed.images:,} training images at {feed.image_size} px"
    table = Table("", "images/s", title=Text(title), title_justify="left")
    table.columns[1].justify = "right"
    workers = f"{feed.workers} worker{'s' if feed.workers != 1 else ''} on {feed.cores} cores"
    table.add_row(f"delivered, files read for the first time ({workers})", f"{feed.first:,.0f}")
    table.add_row("delivered, files in the system's memory", f"{feed.again:,.0f}")
    table.add_row(f"training takes ({need.known_from})", f"{need.rate:,.0f}")
    console.print(table)
    console.print(verdict(feed, need), highlight=False, markup=False)


def check_source(source: str | None) -> str:
    if not source:
        raise GreedyNASError("name the images with --data: a folder of class folders, or a folder with train/")
    return source
