"""A first look at a user's images: their number, classes and sizes, and whether they are grey.

Only the headers of a sample are read and a few of its images decoded, so a million files take no longer than a
thousand.
"""

from dataclasses import dataclass

import numpy as np

from greedynas.data.settings import DataSettings
from greedynas.data.sources import Arrays, Source
from greedynas.data.specs import FORMS, InMemory, read_splits
from greedynas.data.transforms import reason, square
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream

HEADERS = 256  # images whose sizes are read
DECODED = 32  # images that are decoded to see whether they have colours
COLOUR = 2.0  # mean difference between channels, of 255, of a colour image; compressed grey images stay below it
GREY_MODES = ("1", "L", "LA", "La", "I", "F")


@dataclass(frozen=True)
class Look:
    """The facts about a user's images."""

    images: int  # of the training set, before images are held out
    class_names: tuple[str, ...]
    fewest: int  # images of the smallest class
    most: int
    own_val: int | None  # size of the source's own validation set, if it has one
    own_test: bool
    looked_at: int
    side: int | None  # median of the shorter sides; None if it is unknown until all images are read
    grey: bool

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def describe(self) -> str:
        sizes = "sizes unknown" if self.side is None else f"half of them at least {self.side} px on the shorter side"
        balance = f"{self.fewest:,}" if self.fewest == self.most else f"{self.fewest:,} to {self.most:,}"
        return (
            f"{self.images:,} {'grey' if self.grey else 'colour'} images in {self.classes:,} classes ({balance} each), "
            f"{sizes} ({self.looked_at:,} examined)"
        )


def look_at(settings: DataSettings, seed: int) -> Look:
    """Return the facts about the images of `settings.source`, the same for the same source and seed."""
    if not settings.source:
        raise GreedyNASError(f"name the data with --data: {FORMS}")
    small = InMemory(side=32, channels=3, max_bytes=4 * 10**9, refuse_unreadable=False)
    splits = read_splits(settings.source, settings.root, settings.download, small)
    source = splits.train
    labels, counts = np.unique(source.labels, return_counts=True)
    if len(labels) < 2:
        raise GreedyNASError(
            f"at least two classes are needed, but {settings.source} has only {', '.join(source.class_names) or 'none'}"
        )
    rows = stream(seed, "look").permutation(len(source))[:HEADERS].tolist()
    headers = [(row, *header) for row in rows if (header := _header(source, row)) is not None]
    if not headers:
        raise GreedyNASError(
            f"none of {len(rows)} images of {settings.source} can be read; one of them is {source.name(rows[0])}"
        )
    resized = isinstance(source, Arrays) and source.originals is not None
    maybe = [row for row, _, mode in headers if mode not in GREY_MODES and not mode.startswith("I;")]
    seen = [colour for row in maybe[:DECODED] if (colour := _has_colour(source, row)) is not None]
    return Look(
        images=len(source),
        class_names=tuple(source.class_names[label] for label in labels),
        fewest=int(counts.min()),
        most=int(counts.max()),
        own_val=None if splits.val is None else len(splits.val),
        own_test=splits.test is not None or splits.late_test is not None,
        looked_at=len(headers),
        side=None if resized else int(np.median([side for _, side, _ in headers])),
        grey=not any(seen) and (bool(seen) or not maybe),
    )


def _header(source: Source, row: int) -> tuple[int, str] | None:
    """Return the shorter side and the mode of an image, or None if the file is not an image."""
    try:
        with source.image(row) as image:
            return min(image.size), image.mode
    except Exception as error:
        reason(error)  # raises errors that the machine causes
        return None


def _has_colour(source: Source, row: int) -> bool | None:
    """Return whether an image has colours, since grey images are often stored as RGB; None if it cannot be decoded."""
    try:
        with source.image(row) as image:
            pixels = square(image, 3, 32).astype(np.int64)
    except Exception as error:
        reason(error)
        return None
    return float(np.ptp(pixels, axis=2).mean()) > COLOUR
