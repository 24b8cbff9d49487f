"""Splits: the choice of images for training, and of those held out for validation and test."""

import numpy as np
import torch

from greedynas.data.loader import ImageSet, Rows, Shelf, shuffled_by_class
from greedynas.data.settings import DataSettings
from greedynas.data.sources import Splits
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream

# Classes and splits


def _number_classes(splits: Splits) -> list[str]:
    """Return the classes with training images, in the order of the source, and renumber the other sets like them."""
    names = [splits.train.class_names[label] for label in np.unique(splits.train.labels)]
    if len(names) < 2:
        raise GreedyNASError(
            f"at least two classes are needed, but the data has {', '.join(names) or 'none'}; add images"
        )
    for source, split in ((splits.train, "training"), (splits.val, "validation"), (splits.test, "test")):
        if source is not None:
            source.relabel(names, split)
    return names


def _check_present(images: ImageSet, class_names: list[str], split: str) -> None:
    """Raise if a class has no images left, because unreadable ones were skipped."""
    counts = torch.bincount(images.labels, minlength=len(class_names))
    for name, count in zip(class_names, counts.tolist(), strict=True):
        if count == 0:
            raise GreedyNASError(f"no readable image of class {name!r} is left in the {split} set: repair or add some")


def _with_every_class(rows: dict[str, Rows], pool: Shelf, class_names: list[str]) -> dict[str, Rows]:
    """Return the split with an image of every class in train and in the images held out for validation.

    Files are split before they are read. If all files of a class in one part are broken and the other part has two
    intact ones, the first of these moves over. In a streaming set, it is unknown which files are broken.
    """
    if pool.pixels is None or len(rows["val"]) == 0:
        return rows
    labels, rows = pool.source.labels, dict(rows)
    for part, other in (("val", "train"), ("train", "val")):
        here, there = (rows[name][np.isin(rows[name], pool.rows)] for name in (part, other))
        for label in np.setdiff1d(np.arange(len(class_names)), labels[here]):
            spare = there[labels[there] == label]
            if len(spare) >= 2:
                rows[part] = np.sort(np.append(rows[part], spare[0]))
                rows[other] = rows[other][rows[other] != spare[0]]
    return rows


def _split(splits: Splits, settings: DataSettings, seed: int) -> dict[str, Rows]:
    """Return the rows of the training source for train and the held-out sets; a separate test set has all its rows."""
    wanted: dict[str, int | float] = {}
    if splits.test is None and splits.late_test is None:
        wanted["test"] = settings.test_images
    if splits.val is None:
        wanted["val"] = settings.val_images
    rows = hold_out(splits.train.labels, splits.train.class_names, wanted, stream(seed, "split"))
    none = np.zeros(0, np.int64)
    own_test = none if splits.test is None else np.arange(len(splits.test))
    return {"val": none, "test": own_test, **rows}


def hold_out(
    labels: Rows, class_names: list[str], wanted: dict[str, int | float], rng: np.random.Generator
) -> dict[str, Rows]:
    """Return stratified random parts with the wanted numbers (or fractions) of images, and the rest as `train`.

    Rows are sorted. The first part does not depend on the size of the second. Every part has an image of each class.
    """
    counts = np.bincount(labels, minlength=len(class_names))
    rarest, needed = int(counts.argmin()), len(wanted) + 1
    if counts[rarest] < needed:
        raise GreedyNASError(
            f"class {class_names[rarest]!r} has too few images ({counts[rarest]}): at least {needed} are needed, "
            f"one each for {', '.join(wanted)} and train"
        )
    order, rank = shuffled_by_class(labels, counts, rng)
    taken = np.zeros_like(counts)
    rows = {}
    for part, size in wanted.items():
        needed -= 1  # images of each class that the remaining parts need
        upto = taken + _allot(counts, counts - taken - needed, part, size)
        rows[part] = np.sort(order[(rank >= np.repeat(taken, counts)) & (rank < np.repeat(upto, counts))])
        taken = upto
    return {**rows, "train": np.sort(order[rank >= np.repeat(taken, counts)])}


def _allot(counts: Rows, most: Rows, part: str, size: int | float) -> Rows:
    """Return the number of images of each class: proportional by largest remainders, from 1 to `most`."""
    total, classes = int(counts.sum()), len(counts)
    n = size if isinstance(size, int) else round(size * total)
    if n < classes:
        raise GreedyNASError(
            f"data.{part}_images = {size} of {total:,} images is {n}, fewer than the {classes} classes: "
            f"set it to at least {classes}"
        )
    if n > most.sum():
        raise GreedyNASError(
            f"data.{part}_images = {size} needs {n:,} images, but of {total:,} at most {most.sum():,} can be held out: "
            "lower it, or add images"
        )
    quota = n * counts / total
    allotted = np.clip(np.floor(quota).astype(np.int64), 1, most)
    while missing := n - int(allotted.sum()):  # one more (or less) for the classes with the largest remainders
        free = allotted < most if missing > 0 else allotted > 1
        due = np.where(free, (quota - allotted) * np.sign(missing), -np.inf)
        allotted[np.argsort(-due, kind="stable")[: min(abs(missing), int(free.sum()))]] += np.sign(missing)
    return allotted
