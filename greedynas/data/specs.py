"""The values of `--data`: an image folder, a data set that timm reads by name, or the embedded `fashion`.

Sets without random access (WebDataset, streamed Hugging Face, TFDS) are read into memory once.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from greedynas.data.folders import list_images, shown_path, some
from greedynas.data.sources import Arrays, Files, HuggingFace, Source, Splits, TorchDataset, fingerprint
from greedynas.data.transforms import Pixels, reason, square
from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.runtime.registry import Registry

FASHION = Path(__file__).parent / "fashion.npz"
FASHION_CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]  # fmt: skip

DATASETS: "Registry[Callable[[], Any]]" = Registry("data set", {})  # registered by plugins
FORMS = (
    "a folder with train/ (and val/ or test/), a folder of class folders, a timm name such as torch/cifar10, or fashion"
)
TRAIN = ("train", "training")  # timm's synonyms
VAL = ("val", "valid", "validation", "eval", "evaluation")
TEST = ("test",)
DEFAULT_ROOT = "data"  # folder of data sets by name that have no cache of their own
TORCH = ["cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "imagenet", "places365", "inaturalist"]
MISSING = (
    "name its folder with --set data.root=DIR (--data-root after the training), or train with --set data.download=true"
)
PACKAGES = {"hfds": "datasets", "hfids": "datasets", "tfds": "tensorflow_datasets", "wds": "webdataset"}


@dataclass(frozen=True)
class InMemory:
    """The options for reading sets without random access."""

    side: int
    channels: int
    max_bytes: int
    refuse_unreadable: bool


def names_a_folder(source: str) -> bool:
    """Return whether a value of `--data` is the path of a folder, and not the name of a data set."""
    kind, _, name = source.partition("/")
    return source not in ("", "fashion") and not (name and kind in ("torch", *PACKAGES)) and source not in DATASETS


def at_home(path: str) -> Path:
    """Return a path with `~` replaced by the home directory; it is unchanged if the user does not exist."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (pathlib raises for such a user)


def located(source: str, root: str | None) -> tuple[str, str | None]:
    """Return `data.source` and `data.root` with absolute paths."""
    if names_a_folder(source):
        folder = at_home(source)
        return (os.path.abspath(folder) if folder.is_dir() else source), root  # noqa: PTH100 (links stay links)
    if root is None and source.partition("/")[0] in ("torch", "wds"):
        root = DEFAULT_ROOT
    return source, root if root is None else os.path.abspath(at_home(root))  # noqa: PTH100


def read_splits(source: str, root: str | None, download: bool, in_memory: InMemory) -> Splits:
    """Return the sources of a value of `--data`."""
    if source == "fashion":
        return _fashion()
    if source in DATASETS:
        return dataset_splits(_made(source), source)
    kind, _, name = source.partition("/")
    if kind == "torch" and name:
        return _torch(source, name, root or DEFAULT_ROOT, download)
    if kind in PACKAGES and name:
        if find_spec(PACKAGES[kind]) is None:
            package = PACKAGES[kind].replace("_", "-")
            raise GreedyNASError(f"{source} needs the package {package}, which is not installed: pip install {package}")
        if kind == "wds":
            return _webdataset(source, name, root or DEFAULT_ROOT, in_memory)
        return _tfds(source, name, root, download, in_memory) if kind == "tfds" else _hf(source, root, in_memory)
    with _one_line(f"cannot read {source}", f"give {FORMS}"):
        folder = at_home(source)
        if source and folder.is_dir():
            return _folder(folder, in_memory.refuse_unreadable)
        if source and folder.exists():
            raise GreedyNASError(f"{source} is a file; give {FORMS}")
    hint = f"did you mean torch/{source}?" if source in TORCH else f"give {FORMS}"
    raise GreedyNASError(f"no such data: {source!r}; {hint}")


def _made(name: str) -> Any:
    try:
        return DATASETS[name]()
    except GreedyNASError:
        raise
    except Exception as error:  # a plugin may raise anything
        raise GreedyNASError(f"the data set {name} cannot be made: {error!s:.300}") from error


def dataset_splits(datasets: Any, name: str = "the data set") -> Splits:
    """Return the splits of a torch data set, or of several in a mapping with the keys "train", "val" and "test"."""
    if not isinstance(datasets, Mapping):
        datasets = {"train": datasets}
    if "train" not in datasets or not set(datasets) <= {"train", "val", "test"}:
        keys = ", ".join(sorted(map(str, datasets))) or "nothing"
        raise GreedyNASError(
            f"{name} must be a data set, or a mapping with the keys train and, optionally, val and test; got {keys:.80}"
        )
    sources = {split: TorchDataset(dataset, f"{split} of {name}") for split, dataset in datasets.items()}
    train, val, test = (sources.get(split) for split in ("train", "val", "test"))
    assert train is not None
    if test is None:
        val, test = None, val  # as with folders, a single other set is the test set
    return Splits(train, val, test)


def _fashion() -> Splits:
    with np.load(FASHION, allow_pickle=False) as arrays:
        train, test = (
            Arrays(FASHION_CLASSES, arrays[f"{split}_labels"].astype(np.int64), arrays[f"{split}_images"])
            for split in ("train", "test")
        )
    return Splits(train, test=test)


# Folders


def _folder(root: Path, refuse_unreadable: bool) -> Splits:
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    train, val, test = (_split_folder(folders, names) for names in (TRAIN, VAL, TEST))
    others = [folder for folder in folders if folder not in (train, val, test)]
    if train is not None and others and not any(entry.is_dir() for entry in train.iterdir()):
        train = None  # bus/ car/ train/: here train is a class
    read = partial(_read_folder, root, refuse_unreadable)
    if train is None:
        if folders and not others:
            raise GreedyNASError(f"{root} has no train/ beside {' and '.join(f'{folder.name}/' for folder in folders)}")
        return Splits(read(root))
    if test is None:
        val, test = None, val  # a single other set is the test set
    splits = Splits(
        read(train), read(val, every_class=False) if val else None, read(test, every_class=False) if test else None
    )
    if others:
        beside = some([shown_path(f"{folder.name}/") for folder in others])
        splits.train.notes.append(f"not read, beside {train.name}/: {beside}")
    return splits


def _split_folder(folders: list[Path], names: tuple[str, ...]) -> Path | None:
    found = [folder for folder in folders if folder.name.lower() in names]
    if len(found) > 1:
        raise GreedyNASError(f"{found[0]} and {found[1]} mean the same split; rename or merge one of them")
    return found[0] if found else None


def _read_folder(root: Path, refuse_unreadable: bool, folder: Path, every_class: bool = True) -> Files:
    """Return the images at any depth below each class folder, in the same order of names on every machine."""
    with _one_line(f"cannot read {folder}", f"give {FORMS}"):
        listing = list_images(str(folder))
    if listing.unlisted and refuse_unreadable:
        name, why = listing.unlisted[0]
        raise GreedyNASError(f"cannot list {folder}/{name}: {why}; repair it, or set data.unreadable to skip")
    instead = "".join(f"; {note}" for note in listing.notes())
    if not listing.files and not listing.stray:
        raise GreedyNASError(f"no images in {folder}: it should have a folder of images for each class{instead}")
    if not listing.files:
        raise GreedyNASError(f"the images in {folder} are not in class folders: make a folder of images for each class")
    if listing.empty and every_class:
        raise GreedyNASError(
            f"no images of class {some(listing.empty)} in {folder}: add some, or remove the folder{instead}"
        )
    classes = listing.classes()
    index = {name: i for i, name in enumerate(classes)}
    labels = np.array([index[parts[0]] for parts in listing.files], np.int64)
    source = Files(classes, labels, [os.path.join(folder, *parts) for parts in listing.files], str(root))  # noqa: PTH118
    source.unlisted = [(str(folder / name), why) for name, why in listing.unlisted]
    source.notes += [f"{shown_path(folder.name)}: {note}" for note in listing.notes()]
    if listing.stray:
        source.notes.append(f"ignored, in no class folder of {shown_path(str(folder))}: {some(listing.stray)}")
    return source


# Data sets by name


def _torch(source: str, name: str, root: str, download: bool) -> Splits:
    if name not in TORCH:
        raise unknown("torchvision data set", source, [f"torch/{known}" for known in TORCH])
    with _one_line(f"cannot read {source} in {root}", MISSING):
        if download:
            Path(root).mkdir(parents=True, exist_ok=True)
        train, test = (
            _from_torchvision(_timm(source, root=root, split=split, download=download), root)
            for split in ("train", "validation")
        )
    return Splits(train, test=test)


def _from_torchvision(data: Any, root: str = "") -> Source:
    names = getattr(data, "wnids", None) or getattr(data, "all_categories", None) or getattr(data, "classes", None)
    if hasattr(data, "all_categories"):  # iNaturalist
        files = [str(Path(data.root) / data.all_categories[label] / file) for label, file in data.index]
        return Files(names or [], np.array([label for label, _ in data.index], np.int64), files, root)
    if hasattr(data, "imgs"):
        labels = np.array([label for _, label in data.imgs], np.int64)
        return Files(names or [], labels, [file for file, _ in data.imgs], root)
    labels = np.asarray(data.targets, np.int64)
    labels = labels[:, 0] if labels.ndim == 2 else labels  # QMNIST has more columns than the digit
    return Arrays(names or [str(i) for i in range(labels.max() + 1)], labels, np.asarray(data.data, np.uint8))


def _hf(source: str, root: str | None, in_memory: InMemory) -> Splits:
    datasets: Any = import_module("datasets")
    kind, _, name = source.partition("/")
    with _one_line(f"cannot read {source}", "check the name, and that it was downloaded or the network is available"):
        builder = datasets.load_dataset_builder(name, cache_dir=root)
        if kind == "hfds" and builder.info.features is None:
            builder.download_and_prepare()  # some formats show their columns only then; timm would do the same next
        keys = _hf_columns(builder.info.features)
        splits = _named_splits(source, list(builder.info.splits or datasets.get_dataset_split_names(name)))

    def read(split: str) -> Source:
        other = "try it as hfds/" if kind == "hfids" else "check its columns: an image and a label are needed"
        with _one_line(f"cannot read {split} of {source}", other):
            mode = "RGB" if kind == "hfds" else ""
            data = _timm(source, root=root, split=split, input_img_mode=mode, **keys)
            features = data.reader.dataset.features if kind == "hfds" else builder.info.features
            names = getattr((features or {}).get(keys["target_key"]), "names", None)
            if kind == "hfids":
                return _read_through(source, data, names, in_memory, [])
            class_names, labels = _classes(data.reader.dataset[keys["target_key"]][:], names)
            table = data.reader.dataset.select_columns([keys["input_key"]])
            return HuggingFace(class_names, labels, table, keys["input_key"])

    return _read_named(splits, read, late_test=kind == "hfids")


def _hf_columns(features: Any) -> dict[str, str]:
    """Return the names of the columns of the image and of its class, which differ between data sets."""
    kinds = {name: type(feature).__name__ for name, feature in (features or {}).items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), "image")
    label = next((name for name, kind in kinds.items() if kind == "ClassLabel"), "label")
    return {"input_key": image, "target_key": "label" if "label" in kinds else label}


def _tfds(source: str, name: str, root: str | None, download: bool, in_memory: InMemory) -> Splits:
    with _one_line(f"cannot read {source}", MISSING):
        info = import_module("tensorflow_datasets").builder(name, data_dir=root).info
        splits = _named_splits(source, list(info.splits))

    def read(split: str) -> Source:
        mode = "L" if in_memory.channels == 1 else "RGB"
        with _one_line(f"cannot read {split} of {source}", MISSING):
            data = _timm(source, root=root, split=split, download=download, input_img_mode=mode)
            return _read_through(source, data, getattr(info.features.get("label"), "names", None), in_memory, [])

    return _read_named(splits, read, late_test=True)


def _webdataset(source: str, name: str, root: str, in_memory: InMemory) -> Splits:
    candidates = [Path(root) / name, Path(name), Path(root)]
    folder = next((path for path in candidates if path.is_dir() and any(path.glob("*.tar"))), None)
    if folder is None:
        raise GreedyNASError(
            f"no shards (*.tar) for {source} in {candidates[0]}: set data.root to the folder that has them"
        )
    shards = _shards(folder)
    splits = _named_splits(source, list(shards))
    files = sorted(str(file) for file in folder.glob("*.tar"))

    def read(split: str) -> Source:
        advice = "its shards should hold images (jpg, png, webp) and .cls files"
        with _one_line(f"cannot read {split} of {source}", advice), _skipped_by_timm() as skipped:
            data = _timm(source, root=str(folder), split=shards[split], input_img_mode="")
            return _read_through(source, data, None, in_memory, skipped)

    found = _read_named(splits, read, late_test=True)
    found.archives = Files([], np.zeros(len(files), np.int64), files, str(folder))
    return found


def _shards(folder: Path) -> dict[str, str]:
    """Return timm's name of each split: from an info file if there is one, else from the names of the shards."""
    for name in ("_info.json", "info.json"):
        if (folder / name).is_file():
            with _one_line(f"cannot read {folder / name}", "remove it, or make it list the splits"):
                return {split: split for split in json.loads((folder / name).read_text())["splits"]}
    groups: dict[str, list[str]] = {}
    for shard in sorted(folder.glob("*.tar")):
        words = "".join(letter if letter.isalpha() else " " for letter in shard.stem.lower()).split()
        split = next((word for word in words if word in (*TRAIN, *VAL, *TEST)), "train")
        groups.setdefault(split, []).append(shard.name)
    return {split: "::".join(names) for split, names in groups.items()}


def _named_splits(source: str, names: list[str]) -> dict[str, str | None]:
    """Return which splits of a data set are train, val and test; a single one is train, whatever its name."""
    roles = {role: next((name for name in names if name.lower() in synonyms), None)
             for role, synonyms in (("train", TRAIN), ("val", VAL), ("test", TEST))}  # fmt: skip
    if roles["train"] is None:
        if len(names) != 1:
            raise GreedyNASError(f"{source} has no split named train; it has: {', '.join(names) or 'none'}")
        return {"train": names[0], "val": None, "test": None}
    return roles


def _read_named(splits: dict[str, str | None], read: Callable[[str], Source], late_test: bool) -> Splits:
    train, val, test = splits["train"], splits["val"], splits["test"]
    assert train is not None
    if test is None:
        val, test = None, val  # a single other set is the test set
    found = Splits(read(train), read(val) if val else None)
    if test is None:
        return found
    if late_test:
        found.late_test = lambda: read(test)
        return found
    found.test = read(test)
    if found.test.class_names == ["-1"]:  # published without labels, like ImageNet's
        found.train.notes.append(f"split {test} has no labels and is not used")
        found.test, found.val = found.val, None
    return found


def _read_through(
    source: str, data: Iterable[tuple[Image.Image, Any]], names: Any, in_memory: InMemory, skipped: list[str]
) -> Arrays:
    """Return all images of an iterable set, decoded to squares. `skipped` has the problems of unreadable ones."""
    squares: list[Pixels] = []
    values: list[Any] = []
    digests: list[bytes] = []
    for image, value in data:
        try:
            squares.append(square(image, in_memory.channels, in_memory.side))
        except Exception as error:
            skipped.append(reason(error))
            continue
        values.append(value)
        digests.append(fingerprint(f"{image.mode} {image.size}".encode() + image.tobytes()))
        if len(squares) * squares[0].nbytes > in_memory.max_bytes:
            raise GreedyNASError(
                f"{source} has no random access and does not fit into the allowed {in_memory.max_bytes / 1e9:.1f} GB: "
                "raise data.memory_gb, or unpack it into an image folder, which can stream"
            )
    problem = f"{len(skipped)} unreadable images in {source}, the first: {skipped[0]}" if skipped else ""
    if skipped and in_memory.refuse_unreadable:
        raise GreedyNASError(f"{problem}; repair them, or set data.unreadable to skip")
    if not squares:
        raise GreedyNASError(f"no readable images in {source}")
    class_names, labels = _classes(values, names)
    arrays = Arrays(class_names, labels, np.stack(squares), digests)
    if skipped:
        arrays.notes.append(f"skipped {problem}")
    return arrays


@contextmanager
def _skipped_by_timm() -> Iterator[list[str]]:
    """Collect the log lines of timm's WebDataset reader about images that it could not read and skipped."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = " ".join(record.getMessage().split())
            if text.startswith("Handling webdataset error ("):
                lines.append(text.partition("(")[2].removesuffix("). Ignoring."))

    log, handler = logging.getLogger("timm.data.readers.reader_wds"), Collect()
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def _classes(values: Sequence[Any], names: Sequence[str] | None) -> tuple[list[str], NDArray[np.int64]]:
    """Return class names and labels from the values of a column: indices of `names`, other numbers, or text."""
    present, labels = np.unique(np.asarray(values), return_inverse=True)
    text = [str(names[value]) if names and 0 <= value < len(names) else str(value) for value in present.tolist()]
    return text, labels.astype(np.int64)


def _timm(name: str, **options: Any) -> Any:
    """Return a data set of timm, which is imported only here, because that takes seconds."""
    return import_module("timm.data").create_dataset(name, **options)


@contextmanager
def _one_line(what: str, advice: str) -> Iterator[None]:
    """Turn any error of timm and the libraries it uses into one line that says what to do."""
    try:
        yield
    except (GreedyNASError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        text = text if len(text) <= 200 else f"{text[:150]} … {text[-50:]}"
        raise GreedyNASError(f"{what}: {text.rstrip('.')}; {advice}") from None
