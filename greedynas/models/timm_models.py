"""The networks of greedynas as timm models, both as classifiers and as backbones.

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

from pydantic import ValidationError
from timm.models import build_model_with_cfg, create_model, is_model, register_model  # type: ignore[attr-defined]
from torch import Tensor, nn

from greedynas.data.transforms import crop_fraction, normalisation
from greedynas.models.model_file import Card, find_model, make_network, parse_card, read_card
from greedynas.models.network import Network, build_network, feature_info
from greedynas.runtime.errors import GreedyNASError, first_problem
from greedynas.runtime.files import read_bytes
from greedynas.spaces.ops import parse_op
from greedynas.spaces.paths import OpPath, parse_path
from greedynas.spaces.space import Space, load_space, space_names
from greedynas.spaces.zoo import known_networks, resolve


def greedynas(pretrained: bool = False, arch: Any = None, space: str | Space | None = None, **kwargs: Any) -> nn.Module:
    """Return any network for timm: that of a run or a file, a known network, or a path of a space."""
    if arch is None:
        raise GreedyNASError("name the network with arch=: a run directory, a model file, a known network or a path")
    found, path, about = _find(arch, space)
    network = _create("greedynas", found, path, about, pretrained, **kwargs)
    if isinstance(network, Network):  # not with features_only
        network.described_as = describe_arch(found, path)
    return network


def greedynas_a(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Return GreedyNAS-A of the paper."""
    return _create("greedynas_a", *resolve("greedynas-a"), {}, pretrained, **kwargs)


def greedynas_b(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Return GreedyNAS-B of the paper."""
    return _create("greedynas_b", *resolve("greedynas-b"), {}, pretrained, **kwargs)


def greedynas_c(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Return GreedyNAS-C of the paper."""
    return _create("greedynas_c", *resolve("greedynas-c"), {}, pretrained, **kwargs)


def proxyless_r(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Return Proxyless-R for mobile devices (Cai et al., ICLR 2019)."""
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
    """Adapt a first convolution for grey images to coloured ones. timm itself does the opposite."""
    first = "stem.0.conv.weight"
    if first in weights and weights[first].shape[1] == 1 < network.get_parameter(first).shape[1]:
        weights[first] = weights[first].repeat(1, 3, 1, 1) / 3
    return weights


def _about(name: str, space: Space) -> dict[str, Any]:
    """Return the configuration that timm needs of a network before it is built."""
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
    """Return the space and the path of a network, and what its file adds to timm's configuration."""
    home = None if space is None else load_space(space)
    if isinstance(arch, dict):
        return _of_description(arch)
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
        path = found.get("canonical_path", found.get("path"))  # retraining builds the canonical path
        name, classes, size = (found.get(key) for key in ("space", "num_classes", "image_size"))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise GreedyNASError(f"{file} cannot be read: {error}") from None
    if path is None or not isinstance(name, str):
        raise GreedyNASError(f"{file} does not describe a path of a space")
    if home is None and name not in space_names():
        raise GreedyNASError(f"the space {name!r} of {file} does not ship with greedynas: name it with space=")
    return *resolve(path, (home or load_space(name)).adapt(classes, size)), {}


def describe_arch(space: Space, path: OpPath) -> dict[str, Any]:
    """Return a network as plain data, which `arch` accepts on any machine: a `config.json` holds it."""
    return {"space": space.model_dump(mode="json", exclude_none=True), "path": list(path)}


def _of_description(arch: dict[str, Any]) -> tuple[Space, OpPath, dict[str, Any]]:
    """Return the network of `describe_arch`, after a check, because it may come from another person."""
    try:
        if not isinstance(arch["space"], dict):
            raise TypeError("its space is not described")
        space = Space.model_validate(arch["space"])
        return space, parse_path(arch["path"], space), {}
    except ValidationError as error:
        raise GreedyNASError(f"arch does not describe a network: {first_problem(error, 'space')}") from None
    except (KeyError, TypeError) as error:
        raise GreedyNASError(f"arch does not describe a network: {type(error).__name__} {error}") from None


def save_timm_config(card: Card, file: Path) -> None:
    """Write the `config.json` with which timm builds a trained network from the hub or a folder.

    It holds the whole architecture, so no other file and no run directory is needed.
    """
    from timm.models._hub import save_config_for_hf

    about = {"mean": card.mean, "std": card.std, "crop_pct": card.crop_fraction}
    config: dict[str, Any] = {"label_names": list(card.class_names), "pretrained_cfg": about}
    if card.space is not None and card.path is not None:
        register_timm_models()
        args: dict[str, Any] = {"arch": describe_arch(card.space, card.path)}
        network = create_model("greedynas", **args)
    else:
        args = {}
        network = make_network(card)
    args |= {"num_classes": len(card.class_names), "in_chans": card.image_channels}
    save_config_for_hf(network, str(file), model_config=config, model_args=args)


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
