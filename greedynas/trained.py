"""A trained network on disk: `model.safetensors`, whose metadata holds a card that says all that is needed to rebuild and
feed it. Loading one executes nothing: neither the weights nor the card can hold code."""

import json
import math
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from greedynas.errors import GreedyNASError
from greedynas.files import write_atomically
from greedynas.network import build_network
from greedynas.paths import parse_path
from greedynas.space import Space, first_problem

KEY = "greedynas"  # of the card, in the metadata of safetensors and of ONNX files
MAX_CARD = 16 * 2**20  # characters; a million class names fit


class Card(BaseModel):
    """What a network is, what its outputs mean, and how images become its input."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=200)]  # in its run
    space: Space | None = None  # with the network's own number of classes and image size
    path: tuple[int, ...] | None = None
    timm: Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_.\-]+$")] | None = None  # instead: a timm model
    class_names: Annotated[tuple[str, ...], Field(min_length=1, max_length=1_000_000)]
    image_size: Annotated[int, Field(ge=1, le=4096)]
    image_channels: Literal[1, 3]
    crop_fraction: Annotated[float, Field(gt=0, le=1)]  # the centre of the largest square that the network sees
    mean: tuple[float, ...]  # of pixels in [0, 1]
    std: tuple[float, ...]

    @model_validator(mode="after")
    def _one_architecture(self) -> Self:
        if (self.timm is None) == (self.space is None) or (self.space is None) != (self.path is None):
            raise GreedyNASError("a card names a space and a path, or a timm model")
        if self.space is not None:
            parse_path(self.path, self.space)
            if self.space.num_classes != len(self.class_names):
                raise GreedyNASError(
                    f"a network with {self.space.num_classes} outputs cannot have {len(self.class_names)} class names"
                )
        if not len(self.mean) == len(self.std) == self.image_channels:
            raise GreedyNASError(f"mean and std need {self.image_channels} values")
        return self


def make_network(card: Card, generator: torch.Generator | None = None, dropout: float = 0.0) -> nn.Module:
    """The card's architecture with fresh weights."""
    if card.space is not None:
        return build_network(card.path, card.space, dropout=dropout, generator=generator)
    import timm

    if card.timm not in timm.list_models():
        raise GreedyNASError(f"this version of timm has no model {card.timm!r}; see timm.list_models()")
    # timm draws initial weights from the global generator: lend it ours.
    with torch.random.fork_rng(devices=[]):
        if generator is not None:
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        return timm.create_model(
            card.timm, num_classes=len(card.class_names), in_chans=card.image_channels, drop_rate=dropout
        )


def save_network(file: Path, network: nn.Module, card: Card) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_atomically(file, save(tensors, {KEY: card.model_dump_json(exclude_none=True), "format": "pt"}))


def load_network(file: Path) -> tuple[nn.Module, Card]:
    """The network of a `model.safetensors` in evaluation mode, and its card."""
    try:
        with safe_open(file, framework="pt") as handle:
            card = parse_card((handle.metadata() or {}).get(KEY), file)
            found = {name: list(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118 (no dict)
            # A forged card may describe more than any memory holds: count before building.
            held = sum(math.prod(shape) for shape in found.values())
            if card.space is not None and card.space.costs([card.path]).params[0] > held:
                raise GreedyNASError(f"{file} holds fewer weights than its network needs")
            network = make_network(card)
            expected = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
            if expected != found:
                different = next(name for name in {**expected, **found} if expected.get(name) != found.get(name))
                raise GreedyNASError(f"the weights in {file} do not fit its network, first at {different}")
            network.load_state_dict({name: handle.get_tensor(name) for name in found})
    except FileNotFoundError:
        raise GreedyNASError(f"no such model: {file}") from None
    except (SafetensorError, OSError) as error:
        raise GreedyNASError(f"{file} is not a safetensors file: {error}") from None
    return network.eval(), card


def parse_card(text: str | None, file: Path) -> Card:
    """The card in a file's metadata."""
    if text is None:
        raise GreedyNASError(f"{file} is not a model of greedynas: its metadata has no card")
    if len(text) > MAX_CARD:
        raise GreedyNASError(f"the card of {file} is too long")
    try:
        return Card.model_validate(json.loads(text))
    except ValidationError as error:
        raise GreedyNASError(f"the card of {file} is wrong: {first_problem(error)}") from None
    except (ValueError, RecursionError) as error:
        raise GreedyNASError(f"the card of {file} cannot be read: {error}") from None
