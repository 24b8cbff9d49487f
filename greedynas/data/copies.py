"""What makes the accuracy on a test set worth less: test images that were trained on, classes that it does not have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.data.folders import some
from greedynas.data.sources import MOST_HASHED, Files, Source, Splits

WITHHELD_SHARE = 0.1  # of the test images: if as many are copies, the accuracy is not shown as a result
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Copies:
    """Test images that are exact copies of images that are trained on or chosen by."""

    count: int
    images: int  # of the test set
    first: str = ""
    original: str = ""
    unread: int = 0  # files that could not be compared
    first_unread: str = ""

    @property
    def withheld(self) -> bool:
        """Whether so many are copies that the accuracy says nothing about new images."""
        return self.count >= WITHHELD_SHARE * self.images and self.count > 0

    def told(self) -> str:
        """Describe what was found in one sentence."""
        told = "no test image is an exact copy of a training image"
        if self.count:
            told = (
                f"{self.count:,} of {self.images:,} test images are exact copies of training images, "
                f"the first: {self.first} of {self.original}"
            )
        if self.unread:
            told += f"; {self.unread:,} files cannot be read and were not compared, the first: {self.first_unread}"
        return told


def find_copies(splits: Splits, pool_rows: Rows, test_rows: Rows) -> Copies | None:
    """Look for exact copies, file by file or pixel by pixel; None where there are too many images that are no files.

    Of files, only those are read that have the size of one on the other side. One that cannot be read is counted.
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
    """Say which classes the test set has no images of."""
    return f"the test set has no image of class {some([repr(name) for name in absent])}"


def caveats(copies: Copies | None, absent: Sequence[str]) -> dict[str, Any]:
    """Return what belongs beside an accuracy on the test set, as `test.json` holds it."""
    told = [copies.told()] if copies is not None and copies.count else []
    told += [f"{absence_note(absent)}: nothing is known about it"] if len(absent) == 1 else []
    told += [f"{absence_note(absent)}: nothing is known about them"] if len(absent) > 1 else []
    return {
        "copies": None if copies is None else copies.count,
        "absent_classes": list(absent),
        "caveats": told,
        "withheld": copies is not None and copies.withheld,
    }


def withheld_sentence(caveats: Sequence[str]) -> str:
    """Say why an accuracy is not shown."""
    reason = caveats[0] if caveats else "too many test images are copies of training images"
    return f"The accuracy on the test set is withheld, it says nothing about new images: {reason}"
