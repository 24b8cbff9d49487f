"""Classify images with a trained network: from its weights, or from a file of an export format in its own runtime."""

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
from greedynas.deploy.onnx_sandbox import images_at_once
from greedynas.models.model_file import WEIGHTS, Card, find_model
from greedynas.runtime.errors import GreedyNASError


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image, or why the image cannot be read.

    Attributes:
        file: The image file.
        classes: Pairs of class name and probability, most likely first.
        error: Why the file cannot be read; None where it can.

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
    """An image file, and whether it was named itself rather than found in a folder."""

    file: Path
    itself: bool


def predict(
    model: str | Path, images: str | Path | Sequence[str | Path], *, top: int = 5, batch_size: int = 32
) -> Iterator[Prediction]:
    """Classify image files, and those in folders.

    Args:
        model: A run directory, a folder `models/NAME`, a `model.safetensors`, an `.onnx` file of greedynas, or a file of
            another export format.
        images: Image files, and folders of them; one alone need not be in a list.
        top: How many classes each image gets.
        batch_size: The most images that are run together.

    Returns:
        A prediction for each image, as soon as it is made. A file of a folder that cannot be read says so in its place.

    Raises:
        GreedyNASError: There is no such model, it is damaged, or an image that was named itself cannot be read.

    Example:
        >>> import greedynas
        >>> from pathlib import Path
        >>> for prediction in greedynas.predict(Path("runs/photos"), [Path("holiday.jpg")]):
        ...     name, probability = prediction.classes[0]
        >>> name in ("cat", "dog", "owl")
        True
    """
    if top < 1 or batch_size < 1:
        raise GreedyNASError("at least one class of at least one image at a time")
    images = [images] if isinstance(images, (str, Path)) else images
    files = list(_find_images([Path(image) for image in images]))
    classify, card = open_model(Path(model))
    at_once = images_at_once(max(card.image_size, card.stored_size // 16), batch_size)
    return _predictions(files, classify, card, min(top, len(card.class_names)), at_once)


def open_model(where: Path) -> tuple[Classifier, Card]:
    """Open a model, which may be somebody else's.

    Args:
        where: A run directory, a folder `models/NAME`, or a file, whose format is known by its suffix.

    Returns:
        What turns inputs into logits, and the card that says how images become inputs.

    Raises:
        GreedyNASError: There is no such model, it is not one of greedynas, or a package is missing that runs it.
    """
    file = find_model(where, (WEIGHTS, "model.onnx"))
    found = format_of(file)
    # Whatever has no suffix of ours may be weights under another name; if not, this says what it is instead.
    format = make_format("safetensors") if found is None else found
    format.check_packages()
    return format.load(file, torch.get_num_threads())


def read_square(file: Path, card: Card) -> Pixels:
    """The image as the network's images are kept: (side, side, channels), decoded as in training."""
    with open_image(file) as image:
        return square(image, card.image_channels, card.stored_size)


def make_input(squares: Sequence[Pixels], card: Card) -> Tensor:
    """Return the centres of squares, normalised as in training: float32 (n, channels, size, size)."""
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
            except Exception as error:  # whatever Pillow raises for a broken file
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
            f"the outputs of {card.name!r} are not all finite numbers: its weights are damaged, or overflow"
        )
    probabilities, classes = logits.float().softmax(1).topk(top, dim=1)
    for row, names in zip(probabilities.tolist(), classes.tolist(), strict=True):
        yield tuple((card.class_names[name], probability) for name, probability in zip(names, row, strict=True))


def _find_images(images: Sequence[Path]) -> Iterator[_Named]:
    """Files as they are named; of folders the image files at any depth, by name."""
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


# What people and programs see


def prediction_facts(prediction: Prediction) -> dict[str, Any]:
    """For `--json`."""
    classes = [{"name": name, "probability": probability} for name, probability in prediction.classes]
    return {"file": str(prediction.file), "classes": classes, "error": prediction.error}


def show_predictions(predictions: Iterable[Prediction], console: Console) -> None:
    """Each image with its classes as bars, as soon as it is classified; what could not be read in one line."""
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
