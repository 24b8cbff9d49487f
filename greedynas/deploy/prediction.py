"""The classification of images with a trained network, from its weights or from an exported file in its own runtime."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch import Tensor

from greedynas.data.folders import EXTENSIONS
from greedynas.data.transforms import Pixels, centre, normalised, open_image, reason, square
from greedynas.deploy.formats.format import Classifier, format_of, make_format
from greedynas.deploy.sandbox.process import images_at_once
from greedynas.models.model_file import WEIGHTS, Card, find_model
from greedynas.runtime.errors import GreedyNASError


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image, or the reason why the image cannot be read.

    Attributes:
        file: The image file.
        classes: Pairs of class name and probability, most likely first.
        error: Why the file cannot be read; None if it was read.

    Example:
        >>> import greedynas
        >>> from pathlib import Path
        >>> [prediction] = greedynas.predict(Path("runs/photos"), [Path("holiday.jpg")], top=1)
        >>> prediction.classes[0][0] in ("cat", "dog", "owl"), prediction.error
        (True, None)
    """

    file: Path
    classes: tuple[tuple[str, float], ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class _Named:
    """An image file, and whether the user named it, as opposed to a file that was found in a folder."""

    file: Path
    itself: bool


def predict(
    model: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    batch_size: int = 32,
    trust: bool = False,
) -> Iterator[Prediction]:
    """Classify image files, including all images in folders.

    Args:
        model: A run directory, a folder `models/NAME`, a `model.safetensors`, an `.onnx` file of greedynas, or a file of
            another export format.
        images: Image files and folders of images, or a single one of them.
        top: The number of classes that are returned for each image.
        batch_size: The largest number of images that are run together.
        trust: Whether a file may execute code when it is opened, which files of `torch.export` (.pt2) can do.

    Returns:
        An iterator of one prediction for each image. For an unreadable file in a folder, the prediction has the error.

    Raises:
        GreedyNASError: There is no such model, it is damaged, or an image that is named in `images` cannot be read.

    Example:
        >>> import greedynas
        >>> from pathlib import Path
        >>> for prediction in greedynas.predict(Path("runs/photos"), [Path("holiday.jpg")]):
        ...     name, probability = prediction.classes[0]
        >>> name in ("cat", "dog", "owl")
        True
    """
    if top < 1 or batch_size < 1:
        raise GreedyNASError("top and batch_size must be at least 1")
    images = [images] if isinstance(images, (str, Path)) else images
    files = list(_find_images([Path(image) for image in images]))
    classify, card = open_model(Path(model), trust)
    at_once = images_at_once(max(card.image_size, card.stored_size // 16), batch_size)
    return _predictions(files, classify, card, min(top, len(card.class_names)), at_once)


def open_model(where: Path, trust: bool = False) -> tuple[Classifier, Card]:
    """Open a model, which may be untrusted.

    Args:
        where: A run directory, a folder `models/NAME`, or a file, whose format is recognised by its suffix.
        trust: Whether a file may execute code when it is opened.

    Returns:
        A function that takes inputs and returns logits, and the card with the preprocessing.

    Raises:
        GreedyNASError: There is no such model, it is not a greedynas model, or a package of its runtime is missing.
    """
    is_file = where.is_dir() and format_of(where) is not None  # a folder that a format writes as one file
    file = where if is_file else find_model(where, (WEIGHTS, "model.onnx"))
    found = format_of(file)
    # A file without a known suffix may be weights under another name; if not, `load` describes the problem.
    format = make_format("safetensors") if found is None else found
    format.check_packages()
    if format.executes_code and not trust:
        raise GreedyNASError(
            f"{file} was not opened, because files of {format.runtime_name} can execute code: add --trust (in Python, "
            "trust=True) if you know who made it"
        )
    return format.load(file, torch.get_num_threads())


def read_square(file: Path, card: Card) -> Pixels:
    """Read an image, decoded as in training, as a square (side, side, channels) of the size that the card says."""
    with open_image(file) as image:
        return square(image, card.image_channels, card.stored_size)


def make_input(squares: Sequence[Pixels], card: Card) -> Tensor:
    """Return the centres of squares, normalised as in training, as float32 (n, channels, size, size)."""
    return normalised(centre(torch.from_numpy(np.stack(squares)), card.image_size), card.mean, card.std)


def _predictions(
    files: list[_Named], classify: Classifier, card: Card, top: int, batch_size: int
) -> Iterator[Prediction]:
    for start in range(0, len(files), batch_size):
        batch = files[start : start + batch_size]
        squares: dict[Path, Pixels] = {}
        problems: dict[Path, str] = {}
        for image in batch:
            try:
                squares[image.file] = read_square(image.file, card)
            except Exception as error:  # Pillow raises many types for broken files
                problems[image.file] = reason(error)
                if image.itself:
                    raise GreedyNASError(f"cannot read {image.file}: {problems[image.file]}") from None
        best = iter(_likeliest(classify(make_input(list(squares.values()), card)), card, top) if squares else ())
        likeliest = {file: next(best) for file in squares}
        for image in batch:
            yield Prediction(image.file, likeliest.get(image.file, ()), problems.get(image.file))


def _likeliest(logits: Tensor, card: Card, top: int) -> Iterator[tuple[tuple[str, float], ...]]:
    if not logits.isfinite().all():
        raise GreedyNASError(
            f"the outputs of {card.name!r} are not all finite numbers: its weights are damaged or overflow"
        )
    probabilities, classes = logits.float().softmax(1).topk(top, dim=1)
    for row, names in zip(probabilities.tolist(), classes.tolist(), strict=True):
        yield tuple((card.class_names[name], probability) for name, probability in zip(names, row, strict=True))


def _find_images(images: Sequence[Path]) -> Iterator[_Named]:
    """Yield the named files in order, and for each folder its image files at any depth, sorted by name."""
    if not images:
        raise GreedyNASError("name at least one image, or a folder of images")
    for path in images:
        if path.is_dir():
            found = sorted(_images_below(path))
            if not found:
                raise GreedyNASError(f"no images in {path}")
            yield from (_Named(file, itself=False) for file in found)
        elif path.exists():
            yield _Named(path, itself=True)
        else:
            raise GreedyNASError(f"no such image: {path}")


def _images_below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and name.lower().endswith(EXTENSIONS):
                yield Path(parent, name)


# Output


def prediction_facts(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON, for `--json`."""
    classes = [{"name": name, "probability": probability} for name, probability in prediction.classes]
    return {"file": str(prediction.file), "classes": classes, "error": prediction.error}


def show_predictions(predictions: Iterable[Prediction], console: Console) -> None:
    """Print each image with its classes as bars as soon as it is classified, or one line if it could not be read."""
    for prediction in predictions:
        title = Text(str(prediction.file), style="bold")
        if prediction.error is not None:
            console.print(title, f" skipped: {prediction.error}", sep="", soft_wrap=True)
            continue
        table = Table.grid(padding=(0, 1))
        for name, probability in prediction.classes:
            bar = ProgressBar(total=1.0, completed=probability, width=24, complete_style="cyan", finished_style="cyan")
            table.add_row("", Text(f"{probability:7.2%}"), bar, name)
        console.print(Group(title, table))
