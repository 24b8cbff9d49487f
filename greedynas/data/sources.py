"""Random access to labelled images from any source, with labels that are known before an image is decoded."""

import hashlib
import io
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from greedynas.data.folders import shown_path
from greedynas.data.transforms import Pixels, open_image, reason, refuse_irregular
from greedynas.runtime.errors import GreedyNASError

WHOLE_BYTES = 4 * 10**9  # of all files together: in larger data sets, only the ends of each file are hashed
END_BYTES = 16_384  # at either end
MOST_HASHED = 200_000  # if more images are not files, this number of evenly spaced ones is hashed
IO_THREADS = 16  # threads that wait for the disk
CHUNK = 512  # files for a thread at a time
EFFECTIVE = os.access in os.supports_effective_ids
FRESH_NS = 2 * 10**9  # a file that changed less than this before it was read may change again at the "same" time


class Source(ABC):
    """Labelled images by index. The values of `labels` are indices of `class_names`."""

    def __init__(self, class_names: Sequence[str], labels: NDArray[np.int64]) -> None:
        self.class_names = list(class_names)
        self.labels = labels
        self.notes: list[str] = []  # for the log

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """Return an image, not decoded yet if possible. Raises whatever the decoder of its format raises."""

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"image {index}"

    def relative(self, index: int) -> str:
        """Return the name of an image in a run, which does not depend on the location of the data set."""
        return self.name(index)

    @abstractmethod
    def digest(self, index: int) -> bytes:
        """Return a digest of an image, which is equal for exact copies."""

    def digests(self, rows: NDArray[np.int64], whole: bool) -> list[bytes]:
        """Return a digest for each row, equal for exact copies; b"" if the image cannot be read.

        Without `whole`, only the ends of files are read.
        """
        return [self.digest(row) for row in rows.tolist()]

    @cached_property
    def all_digest(self) -> str:
        """The hash of all images and the names of their classes; if there are very many images, of a part of them."""
        present = sorted({self.class_names[label] for label in np.unique(self.labels)})
        rank = np.array([present.index(name) if name in present else 0 for name in self.class_names], np.int64)
        found = hashlib.blake2b(digest_size=16)
        found.update(rank[self.labels].tobytes())
        rows = np.unique(np.linspace(0, len(self) - 1, min(len(self), MOST_HASHED)).astype(np.int64))
        for row in rows.tolist():
            found.update(self.digest(row))
        return found.hexdigest()

    def byte_counts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a size of each image, which is equal for exact copies; 0 for all if sizes are expensive to get."""
        return np.zeros(len(rows), np.int64)

    def ready(self, rows: NDArray[np.int64], side: int, channels: int) -> Pixels | None:
        """Return the pixels (n, side, side, channels) if they need no decoding, else None."""
        return None

    def relabel(self, class_names: list[str], split: str) -> None:
        """Renumber the classes like those of the training set."""
        index = {name: i for i, name in enumerate(class_names)}
        present = np.unique(self.labels)
        for label in present:
            if self.class_names[label] not in index:
                raise GreedyNASError(
                    f"the {split} set has a class {self.class_names[label]!r} that the training set lacks; "
                    "remove it, or add training images of it"
                )
        new = np.zeros(len(self.class_names), np.int64)
        new[present] = [index[self.class_names[label]] for label in present]
        self.labels, self.class_names = new[self.labels], class_names


class Files(Source):
    """Image files. Sizes, times and digests are looked up once, on first use."""

    def __init__(
        self, class_names: Sequence[str], labels: NDArray[np.int64], files: Sequence[str], root: str = ""
    ) -> None:
        super().__init__(class_names, labels)
        self.files = np.array(
            [os.fsencode(file) for file in files]
        )  # one object, so that workers do not copy a million strings
        self.root = os.fsencode(os.path.join(root, ""))  # noqa: PTH118 (the prefix that `names` leaves out)
        self.unlisted: list[tuple[str, str]] = []  # folders that cannot be listed, and why
        self._digests = np.zeros(len(self.files), "S32")
        self._hashed = np.zeros(len(self.files), np.bool_)
        self._looked = 0  # when sizes and times were looked up, in ns

    def path(self, index: int) -> Path:
        return Path(os.fsdecode(self.files[index]))

    def image(self, index: int) -> Image.Image:
        return open_image(self.path(index))

    def name(self, index: int) -> str:
        return shown_path(self.files[index])

    def relative(self, index: int) -> str:
        return os.fsdecode(bytes(self.files[index]).removeprefix(self.root))

    def names(self) -> list[str]:
        """Return the names of all files, relative to the root."""
        return [os.fsdecode(file.removeprefix(self.root)) for file in self.files.tolist()]

    @cached_property
    def stats(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sizes in bytes and times of the last change (the system's ctime, in ns); -1 if a file cannot be accessed."""
        self._looked = time.time_ns()
        with ThreadPoolExecutor(IO_THREADS) as threads:
            found = np.concatenate([np.empty((0, 2), np.int64), *threads.map(_stat_all, self._chunks(self.files))])
        return found[:, 0], found[:, 1]

    def byte_counts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.stats[0][rows]

    def digest(self, index: int) -> bytes:
        return self.digests(np.array([index]), whole=True)[0]

    def digests(self, rows: NDArray[np.int64], whole: bool) -> list[bytes]:
        new = rows[~self._hashed[rows]]
        with ThreadPoolExecutor(IO_THREADS) as threads:
            parts = threads.map(
                lambda files: [file_digest(file, whole)[0] for file in files], self._chunks(self.files[new])
            )
            self.recall(new, [digest for part in parts for digest in part])
        return self._digests[rows].tolist()

    def recall(self, rows: NDArray[np.int64], digests: Sequence[bytes]) -> None:
        """Store the digests of these rows, so that the files are not read."""
        self._digests[rows] = list(digests)
        self._hashed[rows] = True

    def trusted_times(self) -> NDArray[np.int64]:
        """Return the times that identify unchanged files; 0 for files that changed just before they were looked up."""
        changed = self.stats[1]
        return np.where(changed > self._looked - FRESH_NS, 0, changed)

    @staticmethod
    def _chunks(files: NDArray[Any]) -> Iterator[list[bytes]]:
        return (files[i : i + CHUNK].tolist() for i in range(0, len(files), CHUNK))


class Arrays(Source):
    """Pixels in memory: uint8 (n, height, width) or (n, height, width, channels)."""

    def __init__(
        self,
        class_names: Sequence[str],
        labels: NDArray[np.int64],
        pixels: Pixels,
        originals: list[bytes] | None = None,  # digests of the original images, if `pixels` were resized
    ) -> None:
        super().__init__(class_names, labels)
        self.pixels = pixels
        self.originals = originals

    def image(self, index: int) -> Image.Image:
        pixels = self.pixels[index]
        return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)

    def digest(self, index: int) -> bytes:
        return self.originals[index] if self.originals else fingerprint(self.pixels[index].tobytes())

    def ready(self, rows: NDArray[np.int64], side: int, channels: int) -> Pixels | None:
        pixels = self.pixels if self.pixels.ndim == 4 else self.pixels[..., None]
        if pixels.shape[1:3] != (side, side) or pixels.shape[3] not in (1, channels):
            return None
        if len(rows) != len(pixels):  # rows are sorted: if all are wanted, that is the array itself
            pixels = pixels[rows]
        return pixels if pixels.shape[3] == channels else np.repeat(pixels, channels, axis=3)


class HuggingFace(Source):
    """A table of encoded images on disk."""

    def __init__(self, class_names: Sequence[str], labels: NDArray[np.int64], table: Any, column: str) -> None:
        super().__init__(class_names, labels)
        self.table = table
        self.column = column

    def image(self, index: int) -> Image.Image:
        return open_image(io.BytesIO(self._bytes(index)))

    def name(self, index: int) -> str:
        return self.table[int(index)][self.column].get("path") or f"image {index}"

    def digest(self, index: int) -> bytes:
        return fingerprint(self._bytes(index))

    def _bytes(self, index: int) -> bytes:
        cell = self.table[int(index)][self.column]
        if cell["bytes"]:
            return bytes(cell["bytes"])
        refuse_irregular(Path(cell["path"]))
        return Path(cell["path"]).read_bytes()


class TorchDataset(Source):
    """A `torch.utils.data.Dataset`, or any sequence, of (image, label).

    Images are PIL images, uint8 arrays (height, width[, channels]), or tensors (channels, height, width), uint8 or floats from
    0 to 1. Labels are read from `targets` or `labels` if the data set has them, else image by image. Class names are
    its `classes`, or the numbers.
    """

    def __init__(self, dataset: Any, name: str = "the dataset") -> None:
        labels = _labels_of(dataset, name)
        names = getattr(dataset, "classes", None) or [str(number) for number in range(int(labels.max(initial=0)) + 1)]
        if len(labels) == 0:
            raise GreedyNASError(f"{name} is empty")
        if labels.min() < 0 or labels.max() >= len(names):
            raise GreedyNASError(
                f"{name} has labels from {labels.min()} to {labels.max()}, but {len(names)} classes: "
                "labels must count from 0"
            )
        super().__init__([str(name) for name in names], labels)
        self.dataset = dataset
        try:
            self.image(0)  # where all images have a form that is not taken, the first tells so
        except GreedyNASError as error:
            raise GreedyNASError(f"{name}: {error}") from None
        except Exception:  # one that cannot be read is skipped later, as in a folder
            return

    def image(self, index: int) -> Image.Image:
        return _as_image(self.dataset[int(index)][0])

    def digest(self, index: int) -> bytes:
        image = self.image(index)
        return fingerprint(f"{image.mode} {image.size} ".encode() + image.tobytes())


def _labels_of(dataset: Any, name: str) -> NDArray[np.int64]:
    """Return the labels of a data set as integers."""
    try:
        size = len(dataset)
        for attribute in ("targets", "labels"):
            known = getattr(dataset, attribute, None)
            if known is not None and len(known) == size:
                return _whole(known).reshape(size)
        return np.array([int(_whole(dataset[index][1])) for index in range(size)], np.int64)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise GreedyNASError(
            f"{name} is not a data set of (image, label) with a length and whole numbers as labels: {error!s:.200}"
        ) from None


def _whole(labels: Any) -> NDArray[np.int64]:
    """Return labels as whole numbers; those that are none, such as 0.5, are refused and not rounded."""
    numbers = np.asarray(labels)
    whole = numbers.astype(np.int64)
    if np.issubdtype(numbers.dtype, np.inexact) and not np.array_equal(whole, numbers):
        raise ValueError(f"got the label {numbers[whole != numbers].flat[0]}")
    return whole


def _as_image(value: Any) -> Image.Image:
    """Return a PIL image of an image of any supported type. Values are never wrapped or clipped to fit into bytes."""
    if isinstance(value, Image.Image):
        return value
    pixels = np.asarray(value)
    if hasattr(value, "detach") and pixels.ndim == 3:  # tensors have the channels first
        pixels = pixels.transpose(1, 2, 0)
    if pixels.size == 0 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] > 4):
        raise GreedyNASError(
            "images of a data set are PIL images, arrays (height, width[, channels]) or tensors (channels, height, width), "
            f"got {type(value).__name__} of shape {pixels.shape}"
        )
    floats = np.issubdtype(pixels.dtype, np.floating)
    if not (floats or np.issubdtype(pixels.dtype, np.integer)) or not (
        pixels.min() >= 0 and pixels.max() <= (1 if floats else 255)
    ):
        raise GreedyNASError(
            "images of a data set are PIL images, whole numbers from 0 to 255, or floats from 0 to 1 (leave out normalisation, "
            f"which is done here), got {pixels.dtype}{_extent(pixels)}"
        )
    pixels = (np.rint(pixels * 255) if floats else pixels).astype(np.uint8)
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)


def _extent(pixels: NDArray[Any]) -> str:
    return f" from {pixels.min()} to {pixels.max()}" if np.issubdtype(pixels.dtype, np.number) else ""


@dataclass
class Splits:
    """The sets of a data set. Missing ones are held out of `train`."""

    train: Source
    val: Source | None = None
    test: Source | None = None
    late_test: Callable[[], Source] | None = None  # a test set that cannot be opened without reading it
    archives: Files | None = None  # the files that the sets are read from
    read_whole: bool | None = None  # whether files are hashed as a whole; None: decided by their total size

    def sources(self) -> dict[str, Source]:
        """Return the open sets by name."""
        found = {"train": self.train, "val": self.val, "test": self.test}
        return {name: source for name, source in found.items() if source is not None}

    def whole(self) -> bool:
        """Return whether files are hashed as a whole, decided once for all sets."""
        if self.read_whole is None:
            files = [source for source in (*self.sources().values(), self.archives) if isinstance(source, Files)]
            self.read_whole = sum(int(source.stats[0].clip(0).sum()) for source in files) <= WHOLE_BYTES
        return self.read_whole


def fingerprint(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def file_digest(file: bytes, whole: bool) -> tuple[bytes, str]:
    """Return the hash of a file's size and contents, in hex, and "" or why it cannot be read (with an empty hash).

    Without `whole`, only the first and the last `END_BYTES` of a larger file are read. Never more is read than the size
    that the system reports, so that a growing or endless file does no harm.
    """
    found = hashlib.blake2b(digest_size=16)
    try:
        left = size = refuse_irregular(file).st_size
        found.update(size.to_bytes(8, "little"))
        if size == 0:  # includes files like /proc/kmsg, which block when they are opened
            return found.hexdigest().encode(), ""
        with open(file, "rb", buffering=0) as handle:  # noqa: PTH123 (a million paths as objects take seconds)
            if not whole and size > 2 * END_BYTES:
                found.update(handle.read(END_BYTES))
                handle.seek(size - END_BYTES)
                left = END_BYTES
            while left and (block := handle.read(min(left, 2**20))):
                found.update(block)
                left -= len(block)
    except OSError as error:
        return b"", reason(error)
    return found.hexdigest().encode(), ""


def _stat_all(files: Sequence[bytes]) -> NDArray[np.int64]:
    found = np.full((len(files), 2), -1, np.int64)
    for i, file in enumerate(files):
        try:
            status = os.stat(file)  # noqa: PTH116
        except OSError:
            continue
        # A file that only others may read gets no time, so that it is read again.
        found[i] = status.st_size, status.st_ctime_ns if os.access(file, os.R_OK, effective_ids=EFFECTIVE) else -1
    return found
