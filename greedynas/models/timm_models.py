"""Our networks in timm, as classifiers and as backbones, after one call.

>>> greedynas.register_timm_models()
>>> timm.create_model("greedynas_a", num_classes=10)
>>> timm.create_model("greedynas", arch="runs/photos", pretrained=True, features_only=True)
>>> timm.create_model("greedynas", arch="22212202", space="macro", checkpoint_path="model.safetensors")

`arch` is a run directory, a folder `models/NAME`, a `model.safetensors`, an `arch.json`, a known network or a path of
`space`. Trained networks bring their classes and their preprocessing along, and `pretrained=True` loads their weights.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, is_model, register_model  # type: ignore[attr-defined]
from torch import Tensor, nn

from greedynas.data.transforms import crop_fraction, normalisation
from greedynas.models.model_file import Card, find_model, parse_card, read_card
from greedynas.models.network import Network, build_network, feature_info
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_bytes
from greedynas.spaces.ops import parse_op
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space, load_space, space_names
from greedynas.spaces.zoo import known_networks, resolve


def greedynas(pretrained: bool = False, arch: Any = None, space: str | Space | None = None, **kwargs: Any) -> nn.Module:
    """Any network: the one of a run, or a path of a space."""
    if arch is None:
        raise GreedyNASError("name the network with arch=: a run directory, a model file, a known network or a path")
    return _create("greedynas", *_find(arch, space), pretrained, **kwargs)


def greedynas_a(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """GreedyNAS-A of the paper."""
    return _create("greedynas_a", *resolve("greedynas-a"), {}, pretrained, **kwargs)


def greedynas_b(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """GreedyNAS-B of the paper."""
    return _create("greedynas_b", *resolve("greedynas-b"), {}, pretrained, **kwargs)


def greedynas_c(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """GreedyNAS-C of the paper."""
    return _create("greedynas_c", *resolve("greedynas-c"), {}, pretrained, **kwargs)


def proxyless_r(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Proxyless-R, mobile (Cai et al., ICLR 2019)."""
    return _create("proxyless_r", *resolve("proxyless-r"), {}, pretrained, **kwargs)


def register_timm_models() -> None:
    """Add our networks to timm's list of models: `greedynas`, `greedynas_a`, `greedynas_b`, `greedynas_c`, `proxyless_r`.

    timm has no entry points for models, so this has to be called. Calling it again does nothing.

    Example:
        >>> import greedynas, timm
        >>> greedynas.register_timm_models()
        >>> timm.create_model("greedynas_c", num_classes=4).num_classes
        4
    """
    if not is_model("greedynas"):
        for entry in (greedynas, greedynas_a, greedynas_b, greedynas_c, proxyless_r):
            register_model(entry)


def _create(name: str, space: Space, path: OpPath, about: dict[str, Any], pretrained: bool, **kwargs: Any) -> nn.Module:
    kwargs["pretrained_cfg"] = kwargs.get("pretrained_cfg") or {**_about(name, space), **about}
    strides = len(feature_info(space))
    return build_model_with_cfg(
        partial(_build, path, space),
        name,
        pretrained,
        feature_cfg={"out_indices": tuple(range(strides)), "flatten_sequential": True},
        pretrained_filter_fn=_to_colours,
        **kwargs,
    )


def _build(
    path: OpPath, space: Space, *, num_classes: int, in_chans: int, drop_rate: float = 0.0, global_pool: str = "avg"
) -> Network:
    space = space.adapt(num_classes=max(1, num_classes), image_channels=in_chans)
    network = build_network(path, space, dropout=drop_rate)
    if num_classes == 0 or global_pool != "avg":
        network.reset_classifier(num_classes, global_pool)
    return network


def _to_colours(weights: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """A first convolution for grey images in a network for coloured ones; the other way round timm knows itself."""
    first = "stem.0.conv.weight"
    if first in weights and weights[first].shape[1] == 1 < network.get_parameter(first).shape[1]:
        weights[first] = weights[first].repeat(1, 3, 1, 1) / 3
    return weights


def _about(name: str, space: Space) -> dict[str, Any]:
    """What timm wants to know of a network before it is built."""
    size, channels = space.image_size, space.image_channels
    mean, std = normalisation(channels if channels == 1 else 3)
    first = "stem.0.conv" if parse_op(space.stem[0].op).family in ("ID", "CONV") else None
    last = (space.head_layers or space.layers)[-1].out_size
    return {
        "architecture": name,
        "input_size": (channels, size, size),
        "pool_size": (last, last),
        "crop_pct": crop_fraction(size),
        "interpolation": "bilinear",
        "mean": mean,
        "std": std,
        "num_classes": space.num_classes,
        "first_conv": first,
        "classifier": "classifier",
    }


def _find(arch: Any, space: str | Space | None) -> tuple[Space, OpPath, dict[str, Any]]:
    """Space, path, and what a file adds to what timm wants to know."""
    home = None if space is None else load_space(space)
    if not _is_file(arch):
        return *resolve(arch, home), {}
    file = find_model(Path(arch))
    if file.suffix == ".safetensors":
        return _of_card(read_card(file), {"file": str(file)})
    if file.suffix != ".json":
        raise GreedyNASError(f"{file} is neither a model.safetensors nor an arch.json")
    try:
        found = json.loads(read_bytes(file).decode("utf-8"))
        if "class_names" in found:  # the card beside a model.safetensors
            return _of_card(parse_card(json.dumps(found), file), {})
        path = found.get("canonical_path", found.get("path"))  # networks are retrained by their canonical path
        name, classes, size = (found.get(key) for key in ("space", "num_classes", "image_size"))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise GreedyNASError(f"{file} cannot be read: {error}") from None
    if path is None or not isinstance(name, str):
        raise GreedyNASError(f"{file} does not describe a path of a space")
    if home is None and name not in space_names():
        raise GreedyNASError(f"the space {name!r} of {file} does not ship with greedynas: name it with space=")
    return *resolve(path, (home or load_space(name)).adapt(classes, size)), {}


def _is_file(arch: Any) -> bool:
    if not isinstance(arch, str):
        return isinstance(arch, Path)
    return arch not in known_networks() and (
        "/" in arch or arch.endswith((".safetensors", ".json")) or Path(arch).exists()
    )


def _of_card(card: Card, about: dict[str, Any]) -> tuple[Space, OpPath, dict[str, Any]]:
    if card.space is None or card.path is None:
        raise GreedyNASError(
            f"{card.name} is timm's own {card.timm}: timm.create_model({card.timm!r}, checkpoint_path=…)"
        )
    about |= {"mean": card.mean, "std": card.std, "crop_pct": card.crop_fraction, "label_names": card.class_names}
    return card.space, card.path, about
