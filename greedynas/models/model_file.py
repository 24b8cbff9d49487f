"""A trained network on disk: the file `model.safetensors`, with a card in its metadata.

The card has all that is needed to rebuild the network and to prepare its input. Loading a file executes nothing:
neither the weights nor the card can hold code.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from greedynas.models.network import build_network
from greedynas.runtime.errors import GreedyNASError, first_problem
from greedynas.runtime.files import write_atomically
from greedynas.spaces.paths import parse_path
from greedynas.spaces.space import Space

KEY = "greedynas"  # the key of the card in the metadata of safetensors and ONNX files
WEIGHTS = "model.safetensors"
MAX_CARD = 16 * 2**20  # characters; a million class names fit
MAX_SIDE = 8192  # pixels
PICKLES = (b"PK", b"\x80")  # the first bytes of files of torch.save and of pickle

Finite = Annotated[float, Field(allow_inf_nan=False)]
Shapes = dict[str, list[int]]


class Card(BaseModel):
    """The description of a trained network: its architecture, its classes, and how images become its input.

    It is stored in the metadata of `model.safetensors` and in ONNX files, or beside a file as `model.json`.

    Example:
        >>> import greedynas
        >>> network, card = greedynas.load_network("runs/photos")
        >>> card.class_names, card.image_size
        (('cat', 'dog', 'owl'), 16)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=200)]  # the network's name in its run
    space: Space | None = None  # with the network's own number of classes and image size
    path: tuple[int, ...] | None = None
    # A timm model, instead of a space and a path. Colons and slashes would let timm read from other places.
    timm: Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_.\-]+$")] | None = None
    class_names: Annotated[tuple[str, ...], Field(min_length=1, max_length=1_000_000)]
    image_size: Annotated[int, Field(ge=1, le=4096)]
    image_channels: Literal[1, 3]
    crop_fraction: Annotated[float, Field(gt=0, le=1)]  # the share of the largest square that the network sees
    mean: tuple[Finite, ...]  # for pixels in [0, 1], as std
    std: tuple[Annotated[Finite, Field(gt=0)], ...]

    @model_validator(mode="after")
    def _one_architecture(self) -> Self:
        if (self.timm is None) == (self.space is None) or (self.space is None) != (self.path is None):
            raise GreedyNASError("a card must name either a space and a path, or a timm model")
        if self.space is not None:
            parse_path(self.path, self.space)
            if self.space.num_classes != len(self.class_names):
                raise GreedyNASError(
                    f"a network with {self.space.num_classes} outputs cannot have {len(self.class_names)} class names"
                )
            if (self.space.image_channels, self.space.image_size) != (self.image_channels, self.image_size):
                raise GreedyNASError("the image size or channels of the card are not those of its space")
        if not len(self.mean) == len(self.std) == self.image_channels:
            raise GreedyNASError(f"mean and std must have {self.image_channels} values")
        if self.image_size / self.crop_fraction > MAX_SIDE:
            raise GreedyNASError(f"crop_fraction {self.crop_fraction:g} is too small")
        return self

    @property
    def stored_size(self) -> int:
        """The size in pixels to which an image is scaled before its centre is cropped."""
        return round(self.image_size / self.crop_fraction)


def make_network(card: Card, generator: torch.Generator | None = None, dropout: float = 0.0) -> nn.Module:
    """Return a network of the card's architecture with fresh weights."""
    if card.space is not None:
        return build_network(card.path, card.space, dropout=dropout, generator=generator)
    import timm

    assert card.timm is not None  # the card has been validated
    if not timm.is_model(card.timm):
        raise GreedyNASError(f"this version of timm has no model {card.timm!r}; see timm.list_models()")
    settings: dict[str, Any] = {
        "num_classes": len(card.class_names),
        "in_chans": card.image_channels,
        "drop_rate": dropout,
    }
    try:
        if getattr(timm.models.get_pretrained_cfg(card.timm), "fixed_input_size", False):
            settings["img_size"] = card.image_size
        # timm draws initial weights from the global generator, which is seeded from ours here.
        with torch.random.fork_rng(devices=[]):
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            return timm.create_model(card.timm, pretrained=False, **settings)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GreedyNASError(
            f"timm cannot build {card.timm} for images of {card.image_size} px: {reason:.200}"
        ) from None


def save_network(file: Path, network: nn.Module, card: Card) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    # A single key, because safetensors writes several in random order, and equal networks are to give equal files.
    write_atomically(file, save(tensors, {KEY: card.model_dump_json(exclude_none=True)}))


def load_network(where: str | Path) -> tuple[nn.Module, Card]:
    """Load a trained network and its card.

    Args:
        where: A run directory (its chosen network), a folder `models/NAME`, or a `model.safetensors`.

    Returns:
        The network in evaluation mode, and its card: class names, preprocessing, architecture.

    Raises:
        GreedyNASError: If there is no trained network, or the file is damaged.

    Example:
        >>> import greedynas
        >>> network, card = greedynas.load_network("runs/photos")
        >>> card.class_names
        ('cat', 'dog', 'owl')
    """
    file = find_model(Path(where))
    with _opened(file) as handle:
        card = parse_card((handle.metadata() or {}).get(KEY), file)
        found = {name: list(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118 (no dict)
        network = _empty_network(card, found, file)
        network.load_state_dict({name: handle.get_tensor(name) for name in found})
    return network.eval(), card


def read_card(file: Path) -> Card:
    """Return the card of a `model.safetensors` without reading the weights."""
    with _opened(file) as handle:
        return parse_card((handle.metadata() or {}).get(KEY), file)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        with file.open("rb") as content:
            if content.read(2).startswith(PICKLES):
                raise GreedyNASError(
                    f"{file} is a pickle, which can execute code when it is loaded; greedynas reads only {WEIGHTS}"
                ) from None
        raise GreedyNASError(f"{file} is not a complete safetensors file: {error}") from None


def find_model(where: Path, names: Sequence[str] = (WEIGHTS,)) -> Path:
    """Return the file of a model: `where` itself, or the first of `names` in a folder or of a run's chosen network."""
    if not where.is_dir():
        if not where.is_file():
            raise GreedyNASError(f"no such model: {where}")
        return where
    folders = [where]
    if (where / "models").is_dir() and (where / "arch.json").is_file():
        from greedynas.rundir.arch_file import read_arch

        folders.insert(0, where / "models" / read_arch(where)["model"])
    for folder in folders:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise GreedyNASError(f"{folders[0]} has no trained network ({' or '.join(names)}); greedynas retrain makes one")


def parse_card(text: str | None, file: Path) -> Card:
    """Return the card that is stored as text in a file's metadata."""
    if text is None:
        raise GreedyNASError(f"{file} is not a greedynas model: its metadata has no card")
    if len(text) > MAX_CARD:
        raise GreedyNASError(f"the card of {file} is too long")
    try:
        return Card.model_validate(json.loads(text))
    except ValidationError as error:
        raise GreedyNASError(f"the card of {file} is invalid: {first_problem(error)}") from None
    except (ValueError, RecursionError) as error:
        raise GreedyNASError(f"the card of {file} cannot be read: {error}") from None


def _empty_network(card: Card, found: Shapes, file: Path) -> nn.Module:
    """Return the card's network with fresh weights, after a check that its weights have the shapes of the file.

    A forged card may describe a network that fits into no memory, so the shapes are checked before weights are
    allocated.
    """
    fresh = torch.Generator()
    if card.space is not None:
        held = sum(math.prod(shape) for shape in found.values())
        if card.space.costs([card.path]).params[0] > held:
            raise GreedyNASError(f"{file} has fewer weights than its network needs")
        network = make_network(card, fresh)
        _check_shapes(network, card, found, file)
        return network
    with torch.device("meta"):  # shapes without weights
        _check_shapes(make_network(card), card, found, file)
    return make_network(card, fresh)


def _check_shapes(network: nn.Module, card: Card, found: Shapes, file: Path) -> None:
    expected = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    different = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if not different:
        return
    here, there = found.get(different[0]), expected.get(different[0])
    classes = len(card.class_names)
    if len(different) <= 2 and here and there and there[0] == classes and here[1:] == there[1:]:
        raise GreedyNASError(f"the weights in {file} are for {here[0]} classes, but its card names {classes}")
    shapes = f"{here or 'nothing'} instead of {there or 'nothing'}"
    raise GreedyNASError(f"the weights in {file} do not fit its network, first at {different[0]}: {shapes}")
