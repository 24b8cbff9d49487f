"""The images of a run: those that `--data` names, split into train, val and test."""

import hashlib
import json
import logging
import zlib
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from greedynas.data.class_weights import balanced_weights
from greedynas.data.copies import Copies, absence_note, caveats, find_copies
from greedynas.data.folders import shown_path
from greedynas.data.loader import ImageSet, Rows, Shelf, Shelves
from greedynas.data.manifest import Manifest, make_manifest, read_manifest, recall, refuse_difference, rows_of
from greedynas.data.settings import DataSettings
from greedynas.data.sources import MOST_HASHED, Files, Source, Splits
from greedynas.data.specs import InMemory, dataset_splits, read_splits
from greedynas.data.splits import _check_present, _number_classes, _split, _with_every_class
from greedynas.data.transforms import View, normalisation, stored_side
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.spaces.space import Space

logger = logging.getLogger("greedynas")


@dataclass
class Data:
    """The images of a run, split into train, validation and test. The test set is only for the final evaluation.

    Attributes:
        train: The training images.
        val: The validation images, which paths are ranked on.
        class_names: The names of the classes.
        notes: Notes on what was read, how it was split, and what was left out.
        class_weights: The weight of each class on the device; None if all images have the same weight.

    Example:
        >>> import greedynas
        >>> data = greedynas.open_data("photos/", image_size=16)
        >>> len(data.train), len(data.val), len(data.test())
        (42, 6, 12)
    """

    train: ImageSet
    val: ImageSet
    class_names: list[str]
    notes: list[str]  # for the log: what was read, how it was split, what was left out
    class_weights: (
        Tensor | None
    )  # (classes,), with mean 1 over the training images, on the device; None: all weigh the same
    _splits: Splits = field(repr=False)
    _shelves: Shelves = field(repr=False)
    _pool: Shelf = field(repr=False)  # train, and the images held out of it for validation
    _rows: dict[str, Rows] = field(repr=False)  # of the splits, including unreadable images
    _settings: DataSettings = field(repr=False)
    _copies: Copies | None = field(default=None, repr=False)
    _test: ImageSet | None = field(default=None, repr=False)

    def test(self) -> ImageSet:
        """Return the test set, which is opened on the first call."""
        if self._test is None:
            before = len(self.notes)
            self._read_late_test()
            source = self._splits.test or self._splits.train
            self._shelves.notes.clear()
            self._test = self._shelves.open(source, self._rows["test"], "test", trained=False).all()
            self.notes += self._shelves.notes
            if len(self._test) == 0:
                raise GreedyNASError("no readable image is left in the test set: repair or add some")
            for note in self.notes[before:]:
                logger.info(note)
        return self._test

    @property
    def test_count(self) -> int:
        """The number of test images, without opening them; 0 if it is unknown before they are read."""
        return len(self._rows["test"])

    @cached_property
    def manifest(self) -> Manifest:
        """The identity of the images, which a resumed run must find again. Files that were not read yet are read."""
        wanted = np.union1d(self._rows["train"], self._rows["val"])
        skipped = {self._pool.source.relative(row) for row in np.setdiff1d(wanted, self._pool.rows).tolist()}
        if (val := self._splits.val) is not None:
            skipped |= {val.relative(row) for row in np.setdiff1d(np.arange(len(val)), self.val.rows).tolist()}
        return make_manifest(self._splits, self._rows, sorted(skipped))

    def identity(self) -> dict[str, Any]:
        """Return the identity of these images: counts, and a digest of all names, contents and splits."""
        return {**self._counts(), "digest": self.manifest.digest()}

    def labels_identity(self) -> dict[str, Any]:
        """Return the identity that older runs stored in `data.json`, which covers only classes and labels."""
        digest = hashlib.sha256(json.dumps(self.class_names).encode())
        for images in (self.train, self.val):
            digest.update(images.labels.numpy().tobytes())
        return {**self._counts(), "digest": digest.hexdigest()[:16]}

    def _counts(self) -> dict[str, int]:
        return {"classes": len(self.class_names), "train": len(self.train), "val": len(self.val)}

    def caveats(self) -> dict[str, Any]:
        """Return the caveats of an accuracy on the test set: copies of training images in it, and classes it lacks."""
        test = self.test() if self._test is None else self._test
        present = set(test.labels.tolist())
        absent = [name for label, name in enumerate(self.class_names) if label not in present]
        return caveats(self._copies, absent)

    @property
    def balanced(self) -> bool:
        """Whether all classes have the same weight in training and choices, whatever their numbers of images."""
        return self.class_weights is not None

    def weights_for(self, images: ImageSet) -> Tensor | None:
        """Return the class weights for training on these images, or None if all images have the same weight."""
        if self.class_weights is None:
            return None
        return balanced_weights(images.labels, len(self.class_names)).to(self.class_weights.device)

    def train_and_val(self) -> ImageSet:
        """Return the images for retraining: the training images and those held out of them for validation."""
        return self._pool.all()

    def split_anew(self, settings: DataSettings, seed: int) -> "Data | None":
        """Return what `open_data` would return for another seed, without decoding anything again.

        Returns None if that is impossible: images that are not in memory, or a test set that is held out anew, too.
        """
        splits = self._splits
        if self._pool.pixels is None or (splits.test is None and splits.late_test is None):
            return None
        pool = replace(self._pool, view=replace(self._pool.view, seed=seed))
        rows = _with_every_class(_split(splits, settings, seed), pool, self.class_names)
        val = pool.select(rows["val"]) if splits.val is None else self.val.seen(seed=seed)
        test = None if self._test is None else self._test.seen(seed=seed)
        notes = [_summary(settings.source, splits, rows, self.class_names), *self.notes[1:]]
        shelves = self._shelves.of_seed(seed)
        return _assembled(settings, splits, shelves, pool, val, rows, self.class_names, notes, self._copies, test)

    def at_size(self, size: int) -> "Data":
        """Return the same images, with the same split, at another input size. Images in memory are decoded again."""
        if size == self.train.view.size:
            return self
        settings, splits = self._settings, self._splits
        shelves = self._shelves.of_view(self._pool.view.at_size(size))
        pool, val, rows = _opened(splits, shelves, self._rows, self.class_names)
        other = _assembled(settings, splits, shelves, pool, val, rows, self.class_names, [], self._copies)
        return replace(other, notes=shelves.notes)

    def _read_late_test(self) -> None:
        splits = self._splits
        if len(self._rows["test"]) > 0 or splits.late_test is None:
            return
        if splits.test is None:
            splits.test = splits.late_test()
            splits.test.relabel(self.class_names, "test")
        self._rows = {**self._rows, "test": np.arange(len(splits.test))}
        self.notes += splits.test.notes
        if self._settings.check_duplicates:
            self._copies, note = _look_for_copies(splits, self._pool.rows, self._rows["test"])
            self.notes.append(note)


def open_data(
    source: Any,
    *,
    space: Space | None = None,
    settings: DataSettings | None = None,
    image_size: int | None = None,
    image_channels: int | None = None,
    normalised: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
) -> Data:
    """Read images and split them into train, validation and test. Test images are not decoded before `Data.test()`.

    Args:
        source: Anything that `--data` takes (a folder of images, "fashion", "torch/cifar10"…), a `DataSettings`, a
            torch `Dataset` of (image, label), or a mapping of such data sets with the keys "train", "val" and "test".
            Missing sets are held out of "train".
        space: The space that the images are for, which sets their size, their channels and their normalisation.
        settings: How images are split and augmented, unless `source` is a `DataSettings`.
        image_size: The height and width of the networks' input in pixels, if no space is given.
        image_channels: 1 or 3, if no space is given.
        normalised: The mean and the standard deviation of each channel for pixels in [0, 1], if they differ from those of
            the space and of ImageNet.
        seed: The seed of the split and of augmentation.
        device: The device of the batches.
        folder: A run directory. If a run was started there, the images must be the same, and its split is used.

    Returns:
        The images: `.train`, `.val`, `.test()`, `.class_names`.

    Raises:
        GreedyNASError: If the images cannot be read, are too few, or are not those of the run.

    Example:
        >>> import greedynas
        >>> data = greedynas.open_data("fashion", space=greedynas.load_space("fashion"))
        >>> len(data.train), len(data.val), len(data.class_names)
        (7200, 800, 10)
    """
    image_size = image_size or (None if space is None else space.image_size)
    if image_size is None:
        raise GreedyNASError("open_data needs a space or an image_size")
    image_channels = image_channels or (3 if space is None else space.image_channels)
    device, given = torch.device(device), None
    if isinstance(source, DataSettings):
        settings = source
    elif isinstance(source, (str, Path)):
        settings = (settings or DataSettings()).model_copy(update={"source": str(source)})
    else:
        settings, given = settings or DataSettings(), dataset_splits(source)
    mean, std = normalised or ((None, None) if space is None else (space.mean, space.std))
    view = _view(settings, image_size, image_channels, seed, mean, std)
    refuse = settings.unreadable == "refuse"
    shelves = Shelves(view, device, settings.workers, settings.memory_gb, refuse)
    in_memory = InMemory(view.stored, view.channels, shelves.max_bytes, refuse)
    if settings.download and ranks.size() > 1:  # once, before all ranks read it
        ranks.on_first(lambda: bool(read_splits(settings.source, settings.root, True, in_memory)))
    splits = given or read_splits(settings.source, settings.root, settings.download, in_memory)
    kept = _kept(folder, splits)
    class_names = _number_classes(splits)
    seen = [(zlib.crc32(source.labels.tobytes()), _names_crc(source)) for source in splits.sources().values()]
    ranks.refuse_disagreement("images", [class_names, seen])
    rows = _agreed_rows(kept, splits, settings, seed)

    pool, val, rows = _opened(splits, shelves, rows, class_names)
    notes = [_summary(settings.source, splits, rows, class_names)]
    notes += [note for source in (splits.train, splits.val, splits.test) if source for note in source.notes]
    notes += shelves.notes
    copies = None
    if settings.check_duplicates and splits.late_test is None:
        copies, note = _look_for_copies(splits, pool.rows, rows["test"])
        notes.append(note)
    if splits.test is not None:
        absent = sorted(set(range(len(class_names))) - set(splits.test.labels.tolist()))
        notes += [absence_note([class_names[label] for label in absent])] if absent else []
    return _assembled(settings, splits, shelves, pool, val, rows, class_names, notes, copies)


def _opened(
    splits: Splits, shelves: Shelves, rows: dict[str, Rows], class_names: list[str]
) -> tuple[Shelf, ImageSet, dict[str, Rows]]:
    """Open the images of training and validation, and return the split in which every class is present."""
    pool = shelves.open(
        splits.train, np.sort(np.concatenate([rows["train"], rows["val"]])), "train" if splits.val else "train and val"
    )
    rows = _with_every_class(rows, pool, class_names)
    if splits.val is not None:
        return pool, shelves.open(splits.val, np.arange(len(splits.val)), "val", trained=False).all(), rows
    if pool.pixels is None:  # a small part may fit even if the whole set does not
        return pool, shelves.open(splits.train, rows["val"], "val", trained=False).all(), rows
    return pool, pool.select(rows["val"]), rows


def _kept(folder: Path | None, splits: Splits) -> Manifest | None:
    """Return the manifest of the run in `folder`, after a check that these are the same images; None without one.

    One rank of every machine reads it, to avoid reading all files again; rank 0 compares.
    """
    if folder is None or ranks.local_rank() > 0:
        return None
    kept = read_manifest(folder)
    if kept is not None:
        recall(kept, splits)
        if ranks.is_first():
            refuse_difference(kept, splits, folder)
    return kept


def _agreed_rows(kept: Manifest | None, splits: Splits, settings: DataSettings, seed: int) -> dict[str, Rows]:
    """Return the split of the run, as read by rank 0, or a new one."""
    if not ranks.broadcast(kept is not None):
        return _split(splits, settings, seed)
    own = rows_of(kept, splits) if kept is not None and ranks.is_first() else {}
    sent = ranks.broadcast_tensors({part: torch.from_numpy(rows) for part, rows in own.items() if len(rows)})
    none = np.zeros(0, np.int64)
    return {part: sent[part].numpy() if part in sent else none for part in ("train", "val", "test")}


def _names_crc(source: Source) -> int:
    return zlib.crc32("\0".join(source.names()).encode(errors="surrogateescape")) if isinstance(source, Files) else 0


def _look_for_copies(splits: Splits, pool_rows: Rows, test_rows: Rows) -> tuple[Copies | None, str]:
    """Return the copies of training images in the test set, which rank 0 finds for all ranks, and a note."""

    def found() -> dict[str, Any] | None:
        copies = find_copies(splits, pool_rows, test_rows)
        return None if copies is None else asdict(copies)

    seen = ranks.on_first(found)
    if seen is None:
        return None, f"train and test were not compared for copies: there are more than {MOST_HASHED:,} images"
    copies = Copies(**seen)
    return copies, copies.sentence()


def _assembled(
    settings: DataSettings,
    splits: Splits,
    shelves: Shelves,
    pool: Shelf,
    val: ImageSet,
    rows: dict[str, Rows],
    class_names: list[str],
    notes: list[str],
    copies: Copies | None,
    test: ImageSet | None = None,
) -> Data:
    train = pool.select(rows["train"])
    _check_present(train, class_names, "training")
    if splits.val is None:
        _check_present(val, class_names, "validation")
    if len(val) == 0:
        raise GreedyNASError("no readable image is left in the validation set: repair or add some")
    weights = None
    if settings.class_weights == "balanced":
        weights = balanced_weights(train.labels, len(class_names)).to(pool.device)
    return Data(train, val, class_names, notes, weights, splits, shelves, pool, rows, settings, copies, test)


def _view(
    settings: DataSettings,
    image_size: int,
    image_channels: int,
    seed: int,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> View:
    normalisation(image_channels)  # raises for other numbers of channels than 1 and 3
    return View(
        size=image_size,
        stored=stored_side(image_size, settings.crop_fraction),
        channels=image_channels,
        augment=settings.augment,
        pad=settings.pad,
        min_scale=settings.min_scale,
        flip=settings.flip,
        seed=seed,
        mean=mean,
        std=std,
        crop_fraction=settings.crop_fraction,
    )


def _summary(source: str, splits: Splits, rows: dict[str, Rows], class_names: list[str]) -> str:
    val = f"{len(splits.val):,}" if splits.val else f"{len(rows['val']):,} (held out of train)"
    test = f"{len(rows['test']):,}" + ("" if splits.test else " (held out of train)")
    test = "read at the end" if splits.late_test else test
    return (
        f"data {shown_path(source)}: {len(class_names):,} classes; train {len(rows['train']):,}, val {val}, test {test}"
    )
