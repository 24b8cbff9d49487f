"""Random access to labelled images, whatever they come from, with the labels known before an image is decoded."""

import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from greedynas.errors import GreedyNASError
from greedynas.images import Pixels, open_image


class Source(ABC):
    """Labelled images by index. `labels` index `class_names`."""

    def __init__(self, class_names: Sequence[str], labels: NDArray[np.int64]) -> None:
        self.class_names = list(class_names)
        self.labels = labels
        self.notes: list[str] = []  # for the log

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """The image, not decoded yet where that is possible. Raises whatever the file's format raises."""

    def name(self, index: int) -> str:
        """What messages call the image."""
        return f"image {index}"

    @abstractmethod
    def digest(self, index: int) -> bytes:
        """Equal for exact copies."""

    def byte_counts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Exact copies have the same; where that is not cheap to know, 0 for all."""
        return np.zeros(len(rows), np.int64)

    def ready(self, rows: NDArray[np.int64], side: int, channels: int) -> Pixels | None:
        """The pixels (n, side, side, channels), if they need no decoding."""
        return None

    def relabel(self, class_names: list[str], split: str) -> None:
        """Number the classes as the training set does."""
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
    """Image files."""

    def __init__(self, class_names: Sequence[str], labels: NDArray[np.int64], files: Sequence[str]) -> None:
        super().__init__(class_names, labels)
        self.files = np.array(
            [os.fsencode(file) for file in files]
        )  # one object: workers do not copy a million strings

    def path(self, index: int) -> Path:
        return Path(os.fsdecode(self.files[index]))

    def image(self, index: int) -> Image.Image:
        return open_image(self.path(index))

    def name(self, index: int) -> str:
        return os.fsencode(self.path(index)).decode(errors="replace")

    def digest(self, index: int) -> bytes:
        return fingerprint(self.path(index).read_bytes())

    def byte_counts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([self.path(row).stat().st_size for row in rows], np.int64)


class Arrays(Source):
    """Pixels in memory: uint8 (n, height, width) or (n, height, width, channels)."""

    def __init__(
        self,
        class_names: Sequence[str],
        labels: NDArray[np.int64],
        pixels: Pixels,
        digests: list[bytes] | None = None,  # of the originals, where `pixels` were resized
    ) -> None:
        super().__init__(class_names, labels)
        self.pixels = pixels
        self.digests = digests

    def image(self, index: int) -> Image.Image:
        pixels = self.pixels[index]
        return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)

    def digest(self, index: int) -> bytes:
        return self.digests[index] if self.digests else fingerprint(self.pixels[index].tobytes())

    def ready(self, rows: NDArray[np.int64], side: int, channels: int) -> Pixels | None:
        pixels = self.pixels if self.pixels.ndim == 4 else self.pixels[..., None]
        if pixels.shape[1:3] != (side, side) or pixels.shape[3] not in (1, channels):
            return None
        if len(rows) != len(pixels):  # rows are in order: all of them are the array itself
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
        return cell["bytes"] or Path(cell["path"]).read_bytes()


@dataclass
class Splits:
    """What a data set brings along. What it lacks is held out of `train`."""

    train: Source
    val: Source | None = None
    test: Source | None = None
    late_test: Callable[[], Source] | None = None  # a test set that cannot be opened without reading it


def fingerprint(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
