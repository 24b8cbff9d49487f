"""Sets of images as batches on the device: from memory, or streaming through worker processes.

In both cases, the order of an epoch depends only on (seed, epoch) and a sample's augmentation on (seed, epoch, sample),
so that the number of workers has no effect.
"""

import logging
import math
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from greedynas.data.crops import Growing, WholeImages
from greedynas.data.sources import Source
from greedynas.data.transforms import (
    GONE,
    Numbers,
    Pixels,
    Unreadable,
    View,
    decoded_alike,
    random_crop,
    reason,
    square,
    square_and_whole,
    whole,
    whole_size,
)
from greedynas.runtime import signals
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.runtime.rng import stream

Rows = NDArray[np.int64]
Problem = tuple[str, str]  # the name of an unreadable image, and why
Batch = tuple[Tensor, Tensor, list[Problem]]
Item = TypeVar("Item")
logger = logging.getLogger("greedynas")

NAMED = 20  # number of unreadable files that the notes name
FEW = 2000  # fewer images are decoded in this process, because starting workers would take longer
CHUNK = 128  # images that a worker decodes at a time
HEADERS = 256  # images whose sizes are read to estimate the memory of all
MARGIN = 1.05  # factor of safety for such an estimate
PARTS = 5  # tensors of a loaded chunk


class ImageSet:
    """A set of labelled images, as batches on the device. `open_data` makes them."""

    def __init__(self, shelf: "Shelf", rows: Rows) -> None:
        self._shelf = shelf
        self._rows = rows  # of the shelf's pixels if they are in memory, else of its source
        self._labels = shelf.source.labels[shelf.rows[rows] if shelf.pixels is not None else rows]
        self.labels = torch.from_numpy(self._labels)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def in_memory(self) -> bool:
        return self._shelf.pixels is not None

    @property
    def rows(self) -> Rows:
        """The rows of the source that are in this set."""
        return self._shelf.rows[self._rows] if self.in_memory else self._rows

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of batches of an epoch; an incomplete last batch is dropped, unless it is the only one."""
        return max(1, len(self) // batch_size)

    def train_batches(self, epoch: int, batch_size: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch from `start` on: augmented float32 (n, channels, size, size), and labels.

        With several ranks, each gets its share of every batch.
        """
        order = stream(self._shelf.view.seed, "order", epoch).permutation(len(self))
        order = order[start * batch_size : self.steps_per_epoch(batch_size) * batch_size]
        batches = [ranks.share_of_batch(order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
        shelf = self._shelf
        if not shelf.can_train:
            rows = self._rows if shelf.pixels is None else shelf.rows[self._rows]
            return self._from_workers(_Decode(shelf.source, rows, shelf.view), epoch, batches, shelf.workers)
        if shelf.view.more:
            recall = _Recall(shelf.on_cpu, shelf.wholes_on_cpu, self._rows, self._labels, shelf.view)
            return self._from_workers(recall, epoch, batches, shelf.workers if len(self) >= FEW else 0)
        return self._from_wholes(epoch, batches) if shelf.wholes is not None else self._from_memory(epoch, batches)

    def seen(self, **changes: Any) -> "ImageSet":
        """Return the same images with a changed view, such as another seed or more augmentation."""
        return ImageSet(replace(self._shelf, view=replace(self._shelf.view, **changes)), self._rows)

    @property
    def view(self) -> View:
        return self._shelf.view

    def eval_batch(self, indices: Sequence[int] | NDArray[Any] | None = None) -> tuple[Tensor, Tensor]:
        """Return these images (None: all) without augmentation: float32 (n, channels, size, size), and labels."""
        shelf = self._shelf
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        if shelf.pixels is not None:
            rows, labels = (
                sent(torch.from_numpy(self._rows[chosen]), shelf.device),
                sent(self.labels[chosen], shelf.device),
            )
            return shelf.view.normalise(shelf.view.centre(shelf.pixels)[rows]), labels
        decode = _Decode(shelf.source, self._rows, shelf.view)
        with ThreadPoolExecutor(max(1, shelf.workers)) as threads:
            pixels, labels, problems = decode.collect(list(threads.map(decode.one, chosen.tolist())))
        shelf.report(problems, nothing=len(labels) < len(chosen))
        return shelf.view.normalise(shelf.view.centre(pixels).to(shelf.device)), labels.to(shelf.device)

    def balanced(self, n: int, rng: np.random.Generator) -> Rows:
        """Return n different random images, equally many of all classes; classes with too few contribute all."""
        if not 0 <= n <= len(self):
            raise GreedyNASError(f"cannot draw {n:,} different images: there are only {len(self):,}")
        counts = np.bincount(self._labels)
        take = np.zeros_like(counts)
        while (missing := n - int(take.sum())) > 0:
            rich = np.flatnonzero(take < counts)
            if missing < len(rich):
                take[rng.permutation(rich)[:missing]] += 1
            else:
                take[rich] += np.minimum(missing // len(rich), (counts - take)[rich])
        order, rank = shuffled_by_class(self._labels, counts, rng)
        return rng.permutation(order[rank < np.repeat(take, counts)])  # so that every chunk has images of many classes

    def _from_memory(self, epoch: int, batches: list[Rows]) -> Iterator[tuple[Tensor, Tensor]]:
        shelf = self._shelf
        if not batches or shelf.pixels is None:
            return
        # The indices of the whole epoch are sent at once, so that no batch waits for its own.
        order, size = np.concatenate(batches), len(batches[0])
        plans = sent(shelf.view.plan(epoch, order), shelf.device).split(size)
        rows = sent(torch.from_numpy(self._rows[order]), shelf.device).split(size)
        labels = sent(self.labels[order], shelf.device).split(size)
        for i in range(len(batches)):
            yield shelf.view.batch(shelf.pixels, rows[i], plans[i]), labels[i]

    def _from_wholes(self, epoch: int, batches: list[Rows]) -> Iterator[tuple[Tensor, Tensor]]:
        shelf = self._shelf
        assert shelf.wholes is not None
        for batch in batches:
            rows, labels = self._rows[batch], sent(self.labels[batch], shelf.device)
            plan = shelf.view.crop_plan(epoch, batch, shelf.wholes.aspects[rows])
            yield shelf.view.normalise(shelf.wholes.crops(rows, plan, shelf.view.size)), labels

    def _from_workers(
        self, dataset: Dataset[Batch], epoch: int, batches: list[Rows], workers: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        shelf = self._shelf
        keys = [(epoch, batch) for batch in batches]
        for pixels, labels, problems in _loader(dataset, keys, workers, pin_memory=shelf.device.type == "cuda"):
            shelf.report(problems, nothing=len(labels) == 0)
            pixels, labels = (tensor.to(shelf.device, non_blocking=True) for tensor in (pixels, labels))
            yield shelf.view.normalise(pixels), labels


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device, without waiting for earlier work of the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def shuffled_by_class(labels: Rows, counts: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Return all indices, class by class, in random order within each, and the position of each within its class."""
    order = np.lexsort((rng.random(len(labels)), labels))
    return order, np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass
class Shelf:
    """The images of one source, from which sets are made."""

    source: Source
    rows: Rows  # of the source, in order
    pixels: Tensor | None  # of those rows, uint8 (n, stored, stored, channels) on the device; None: decoded when needed
    view: View
    device: torch.device
    workers: int
    refuse: bool
    reported: set[str] = field(default_factory=set)
    wholes: WholeImages | None = None  # of those rows, if they are in memory and training uses random crops

    @property
    def can_train(self) -> bool:
        """Whether training batches can come from memory."""
        return self.pixels is not None and (self.wholes is not None or self.view.augment != "resized_crop")

    @cached_property
    def on_cpu(self) -> Tensor:
        """The pixels in CPU memory, where worker processes can read them."""
        assert self.pixels is not None
        return self.pixels.cpu()

    @cached_property
    def wholes_on_cpu(self) -> WholeImages | None:
        return None if self.wholes is None else self.wholes.on_cpu()

    def all(self) -> ImageSet:
        return self.select(self.rows)

    def select(self, rows: Rows) -> ImageSet:
        """Return the set of these rows of the source; rows that are not on the shelf are ignored."""
        if self.pixels is None:
            return ImageSet(self, rows)
        return ImageSet(self, np.flatnonzero(np.isin(self.rows, rows)))

    def report(self, problems: list[Problem], nothing: bool) -> None:
        """Raise for unreadable files that streaming found, or log each of them once, depending on `refuse`.

        Files that have disappeared are always refused: without them, a resumed run would have other images.
        """
        for name, why in problems:
            if why == GONE:
                raise GreedyNASError(f"cannot read {name}: {why}; restore it, and give the same command again")
            if self.refuse:
                raise _refusal(name, why)
            if name not in self.reported:
                self.reported.add(name)
                logger.warning("cannot read %s: %s; the next readable image takes its place", name, why)
        if nothing:
            raise GreedyNASError(f"none of the images can be read, for example {problems[0][0]}: {problems[0][1]}")


class Shelves:
    """A factory of shelves, which decides what stays in memory and collects notes for the log."""

    def __init__(
        self, view: View, device: torch.device, workers: int | None, memory_gb: float | None, refuse: bool
    ) -> None:
        self.view, self.device, self.refuse = view, device, refuse
        self.workers = max(1, cpus() // ranks.local_size()) if workers is None else workers
        most = _share_of_memory(device) if memory_gb is None else int(1e9 * memory_gb)
        self.max_bytes = min(ranks.gather_values(most))  # so that all ranks decide the same
        self.notes: list[str] = []

    def of_seed(self, seed: int) -> "Shelves":
        """Return the same factory for another seed of order and augmentation."""
        return self.of_view(replace(self.view, seed=seed))

    def of_view(self, view: View) -> "Shelves":
        """Return the same factory for images that are seen in another way."""
        other = copy(self)
        other.view, other.notes = view, []
        return other

    def open(self, source: Source, rows: Rows, what: str, trained: bool = True) -> Shelf:
        """Return the images of these rows. Images that are not `trained` on need no whole images for crops."""
        crops = trained and self.view.augment == "resized_crop"
        size = self.bytes_of(source, rows, crops)
        if size <= self.max_bytes and (loaded := self._load(source, rows, crops, size)) is not None:
            pixels, wholes, rows = loaded
            size = pixels.nbytes + (0 if wholes is None else wholes.own_bytes(pixels))
            self.notes.append(f"{what}: {len(rows):,} images in memory ({self.device.type}, {size / 1e6:,.0f} MB)")
            return Shelf(source, rows, pixels, self.view, self.device, self.workers, self.refuse, wholes=wholes)
        self.notes.append(f"{what}: {len(rows):,} images, streaming ({size / 1e9:,.1f} GB would not stay in memory)")
        return Shelf(source, rows, None, self.view, self.device, self.workers, self.refuse)

    def bytes_of(self, source: Source, rows: Rows, crops: bool) -> int:
        """Return the memory that these images need; with `crops` including whole ones, estimated from some sizes."""
        squares = len(rows) * self.view.stored**2 * self.view.channels
        if not crops or source.ready(rows[:1], self.view.stored, self.view.channels) is not None:
            return squares
        some = rows[np.unique(np.linspace(0, len(rows) - 1, min(HEADERS, len(rows)), dtype=np.int64))]
        pixels = [
            math.prod(whole_size(*size, self.view.whole)) for row in some if (size := _size(source, row)) is not None
        ]
        return squares + math.ceil(float(np.mean(pixels or [0])) * len(rows)) * self.view.channels

    def _load(
        self, source: Source, rows: Rows, crops: bool, size: int
    ) -> tuple[Tensor, WholeImages | None, Rows] | None:
        """Return the squares of all readable rows, with `crops` also the whole images, and these rows.

        Returns None if the whole images turn out to need more memory than is allowed.
        """
        side, channels = self.view.stored, self.view.channels
        ready = source.ready(rows, side, channels)
        if ready is not None:
            pixels = torch.from_numpy(np.ascontiguousarray(ready)).to(self.device)
            return pixels, WholeImages.of_squares(pixels) if crops else None, rows
        pixels = torch.empty((len(rows), side, side, channels), dtype=torch.uint8, device=self.device)
        growing = None
        if crops:
            expected = math.ceil(MARGIN * (size - pixels.nbytes) / channels)
            growing = Growing(channels, self.device, expected, (self.max_bytes - pixels.nbytes) // channels)
        keys = [rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK)]
        workers = self.workers if len(rows) >= FEW else 0
        done, kept, problems = 0, [np.empty(0, np.int64)], []
        for (squares, good, flat, sizes, aspects), bad in _from_all_ranks(
            _Load(source, self.view, crops), keys, workers
        ):
            if growing is not None and not growing.add(flat, sizes.numpy(), aspects.numpy()):
                return None
            pixels[done : done + len(squares)] = squares.to(self.device)
            done += len(squares)
            kept.append(good.numpy())
            problems += bad
            if problems and self.refuse:
                raise _refusal(*problems[0])
        self.notes += [f"skipped, unreadable: {name} ({why})" for name, why in problems[:NAMED]]
        if len(problems) > NAMED:
            self.notes.append(f"skipped, unreadable: {len(problems) - NAMED:,} more")
        return pixels[:done], None if growing is None else growing.wholes(), np.concatenate(kept)


def _size(source: Source, row: int) -> tuple[int, int] | None:
    """Return the width and height of an image from its header, or None if it is not an image."""
    try:
        with source.image(row) as image:
            return image.size
    except Exception as error:
        reason(error)  # raises again an error of the machine
        return None


Loaded = tuple[list[Tensor], list[Problem]]


class _Load(Dataset[Loaded]):
    """The readable rows of a source in the form that is kept in memory, in chunks of rows.

    A chunk has squares, rows, and of whole images (if they are kept) the concatenated pixels, heights and widths, and
    aspects; and the problems of unreadable images.
    """

    def __init__(self, source: Source, view: View, crops: bool) -> None:
        self.source, self.view, self.crops = source, view, crops

    def __getitem__(self, rows: Rows) -> Loaded:
        squares = np.empty((len(rows), self.view.stored, self.view.stored, self.view.channels), np.uint8)
        good: list[int] = []
        problems: list[Problem] = []
        flat = [np.empty((0, self.view.channels), np.uint8)]
        sizes, aspects = [], []
        for row in rows.tolist():
            try:
                if self.crops:
                    squares[len(good)], image, aspect = _read_both(self.source, row, self.view)
                    flat.append(image.reshape(-1, self.view.channels))
                    sizes.append(image.shape[:2])
                    aspects.append(aspect)
                else:
                    squares[len(good)] = _read(self.source, row, self.view)
                good.append(row)
            except Unreadable as error:
                problems.append((self.source.name(row), str(error)))
        parts = (squares[: len(good)], np.array(good, np.int64), np.concatenate(flat))
        shapes = (np.array(sizes, np.int64).reshape(-1, 2), np.array(aspects, np.float64))
        return [torch.from_numpy(part) for part in (*parts, *shapes)], problems


class _Decode(Dataset[Batch]):
    """The batches of a streaming set. An unreadable image is replaced by the next readable one, in any process."""

    def __init__(self, source: Source, rows: Rows, view: View) -> None:
        self.source, self.rows, self.view = source, rows, view

    def __getitem__(self, key: tuple[int, Rows]) -> Batch:
        """Return the samples of a batch in an epoch: (augmented pixels, labels, problems)."""
        epoch, samples = key
        if self.view.augment == "resized_crop":  # crop the whole image, not only the square that would be kept
            numbers = self.view.numbers(epoch, samples)
            found = self.collect([self.one(sample, numbers[i]) for i, sample in enumerate(samples.tolist())])
            pixels, labels, problems = found
        else:
            pixels, labels, problems = self.collect([self.one(sample) for sample in samples.tolist()])
            rows = torch.arange(len(pixels))
            pixels = self.view.augmented(pixels, rows, self.view.plan(epoch, samples)[rows])
        return _augmented_more(self.view, pixels, epoch, samples), labels, problems

    def one(self, sample: int, numbers: Numbers | None = None) -> tuple[Pixels | None, int, list[Problem]]:
        """Return pixels, label and problems of a sample or its replacement: a square, or a crop by the numbers."""
        problems: list[Problem] = []
        for attempt in range(len(self.rows)):
            row = int(self.rows[(sample + attempt) % len(self.rows)])
            try:
                return _read(self.source, row, self.view, numbers), int(self.source.labels[row]), problems
            except Unreadable as error:
                problems.append((self.source.name(row), str(error)))
        return None, -1, problems

    def collect(self, found: list[tuple[Pixels | None, int, list[Problem]]]) -> Batch:
        """Return one batch of the samples that could be read; if there are none, the parent process raises."""
        squares = [pixels for pixels, _, _ in found if pixels is not None]
        none = np.empty((0, self.view.stored, self.view.stored, self.view.channels), np.uint8)
        labels = torch.tensor([label for pixels, label, _ in found if pixels is not None], dtype=torch.int64)
        problems = [problem for _, _, problems in found for problem in problems]
        return torch.from_numpy(np.stack(squares) if squares else none), labels, problems


class _Recall(Dataset[Batch]):
    """The batches of a set in memory, made by workers, for augmentation that is too slow for the main process."""

    def __init__(self, pixels: Tensor, wholes: WholeImages | None, rows: Rows, labels: Rows, view: View) -> None:
        self.pixels, self.wholes, self.rows, self.labels, self.view = pixels, wholes, rows, labels, view

    def __getitem__(self, key: tuple[int, Rows]) -> Batch:
        epoch, samples = key
        rows = self.rows[samples]
        if self.wholes is not None:
            plan = self.view.crop_plan(epoch, samples, self.wholes.aspects[rows])
            pixels = self.wholes.crops(rows, plan, self.view.size)
        else:
            pixels = self.view.augmented(self.pixels, torch.from_numpy(rows), self.view.plan(epoch, samples))
        return _augmented_more(self.view, pixels, epoch, samples), torch.from_numpy(self.labels[samples]), []


def _augmented_more(view: View, pixels: Tensor, epoch: int, samples: Rows) -> Tensor:
    if not view.more or len(pixels) == 0:
        return pixels
    from greedynas.data.augmentation import augment_more  # it imports timm

    return augment_more(view, pixels, epoch, samples)


def _read(source: Source, row: int, view: View, numbers: Numbers | None = None) -> Pixels:
    """Return the square of an image, or a random crop of the whole image by the numbers."""
    try:
        with source.image(row) as image:
            if numbers is None:
                return square(image, view.channels, view.stored)
            pixels = random_crop(image, view.channels, view.size, numbers, view.min_scale)
            return pixels[:, ::-1] if view.flips(numbers[None])[0] else pixels
    except Exception as error:
        raise Unreadable(reason(error)) from None


def _read_both(source: Source, row: int, view: View) -> tuple[Pixels, Pixels, float]:
    """Return the square of an image, the whole image for crops, and its aspect."""
    try:
        with source.image(row) as image:
            if decoded_alike(image, view.stored, view.whole):
                return square_and_whole(image, view.channels, view.stored, view.whole)
            pixels = square(image, view.channels, view.stored)
        with source.image(row) as image:
            return pixels, *whole(image, view.channels, view.whole)
    except Exception as error:
        raise Unreadable(reason(error)) from None


def _refusal(name: str, why: str) -> GreedyNASError:
    return GreedyNASError(f"cannot read {name}: {why}; repair or remove it, or set data.unreadable to skip")


def _loader(dataset: Dataset[Item], keys: list[Any], workers: int, pin_memory: bool = False) -> Iterator[Item]:
    """Yield the items of the keys, in order."""
    if workers == 0 or not keys:
        yield from (dataset[key] for key in keys)
        return
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,
        num_workers=min(workers, len(keys)),
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise the workers' seeds are drawn from the global generator
        worker_init_fn=partial(_prepare_worker, os.getpid()),
    )
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        # PyTorch has no message of its own for a worker that was killed while it sent an item.
        raise RuntimeError(f"DataLoader worker has ended while it sent images: {error}") from None


def _from_all_ranks(dataset: Dataset[Loaded], keys: list[Any], workers: int) -> Iterator[Loaded]:
    """Yield the items of the keys, in order; each is made by one rank and sent to the others."""
    if ranks.size() == 1:
        yield from _loader(dataset, keys, workers)
        return
    mine = iter(_loader(dataset, keys[ranks.rank() :: ranks.size()], workers))
    nothing: Loaded = ([torch.empty(0)] * PARTS, [])
    for start in range(0, len(keys), ranks.size()):
        tensors, problems = next(mine, nothing)
        parts = [ranks.gather(part.numpy()) for part in tensors]
        items = list(zip(zip(*parts, strict=True), ranks.gather_values(problems), strict=True))
        for arrays, bad in items[: len(keys) - start]:
            yield [torch.from_numpy(array) for array in arrays], [(name, why) for name, why in bad]


def _prepare_worker(parent: int, _: int) -> None:
    """Make a worker ignore signals, and end it if its parent was killed while it started.

    Without that check, such a worker would wait for work forever, because torch's own watchdog starts later. Ctrl-C and
    SIGTERM reach workers, too; they continue, so that their parent can finish its step, and end with it.
    """
    for number in signals.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if os.getppid() != parent:
        os._exit(1)


def cpus() -> int:
    """Return the default number of processes that decode images."""
    return min(8, cores())


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _share_of_memory(device: torch.device) -> int:
    """Return the memory that a split may use by default: a share of all memory.

    The share does not depend on the memory that is free now, so that the same run on the same machine always decides
    the same.
    """
    if device.type == "cuda":
        return int(0.4 * torch.cuda.get_device_properties(device).total_memory)
    return machine_memory() // 4 // ranks.local_size()


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: those of the machine or of its container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        file = Path("/sys/fs/cgroup") / limit
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total
