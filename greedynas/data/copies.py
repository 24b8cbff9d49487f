"""Caveats of the accuracy on a test set: test images that were trained on, and classes without test images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.data.folders import some
from greedynas.data.sources import MOST_HASHED, Files, Source, Splits

WITHHELD_SHARE = 0.1  # of the test images: if this share or more are copies, the accuracy is not shown as a result
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Copies:
    """The test images that are exact copies of training or validation images."""

    count: int
    images: int  # in the test set
    first: str = ""
    original: str = ""
    unread: int = 0  # files that could not be compared
    first_unread: str = ""

    @property
    def withheld(self) -> bool:
        """Whether there are too many copies for the accuracy to say anything about new images."""
        return self.count >= WITHHELD_SHARE * self.images and self.count > 0

    def sentence(self) -> str:
        """Return what was found, in one sentence."""
        text = "no test image is an exact copy of a training image"
        if self.count:
            text = (
                f"{self.count:,} of {self.images:,} test images are exact copies of training images, "
                f"the first: {self.first} of {self.original}"
            )
        if self.unread:
            text += f"; {self.unread:,} files cannot be read and were not compared, the first: {self.first_unread}"
        return text


def find_copies(splits: Splits, pool_rows: Rows, test_rows: Rows) -> Copies | None:
    """Return the exact copies, compared file by file or pixel by pixel; None if too many images are not files.

    A file is read only if a file on the other side has the same size. Files that cannot be read are counted.
    """
    test = splits.test or splits.train
    known: list[tuple[Source, Rows]] = [(splits.train, pool_rows)]
    if splits.val is not None:
        known.append((splits.val, np.arange(len(splits.val))))
    not_files = [(source, rows) for source, rows in (*known, (test, test_rows)) if not isinstance(source, Files)]
    if sum(len(rows) for _, rows in not_files) > MOST_HASHED:
        return None
    lengths = test.byte_counts(test_rows)
    found_lengths = np.unique(np.concatenate([source.byte_counts(rows) for source, rows in known]))
    originals: dict[bytes, str] = {}
    unread: list[str] = []
    for source, rows in known:
        alike = rows[np.isin(source.byte_counts(rows), lengths)]
        for row, digest in zip(alike.tolist(), source.digests(alike, splits.whole()), strict=True):
            originals.setdefault(digest, source.name(row)) if digest else unread.append(source.name(row))
    suspects = test_rows[np.isin(lengths, found_lengths)]
    digests = test.digests(suspects, splits.whole())
    unread += [test.name(row) for row, digest in zip(suspects.tolist(), digests, strict=True) if not digest]
    copies = [i for i, digest in enumerate(digests) if digest in originals]
    first = copies[0] if copies else None
    return Copies(
        count=len(copies),
        images=len(test_rows),
        first="" if first is None else test.name(int(suspects[first])),
        original="" if first is None else originals[digests[first]],
        unread=len(unread),
        first_unread=unread[0] if unread else "",
    )


def absence_note(absent: Sequence[str]) -> str:
    """Return a sentence that names the classes without test images."""
    return f"the test set has no image of class {some([repr(name) for name in absent])}"


def caveats(copies: Copies | None, absent: Sequence[str]) -> dict[str, Any]:
    """Return the caveats of an accuracy on the test set, as stored in `test.json`."""
    sentences = [copies.sentence()] if copies is not None and copies.count else []
    sentences += [f"{absence_note(absent)}: nothing is known about it"] if len(absent) == 1 else []
    sentences += [f"{absence_note(absent)}: nothing is known about them"] if len(absent) > 1 else []
    return {
        "copies": None if copies is None else copies.count,
        "absent_classes": list(absent),
        "caveats": sentences,
        "withheld": copies is not None and copies.withheld,
    }


def withheld_sentence(caveats: Sequence[str]) -> str:
    """Return a sentence that says why an accuracy is not shown."""
    reason = caveats[0] if caveats else "too many test images are copies of training images"
    return f"The accuracy on the test set is withheld, because it says nothing about new images: {reason}"
