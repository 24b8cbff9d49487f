"""Pretrained networks of timm as bases of a space: everything about their blocks is read from the built modules.

A base has a stem, inverted bottlenecks and depthwise-separable blocks, a head, and a classifier: the EfficientNets, MobileNets V2
and V3, MnasNet, FBNet-C, single-path NAS and their relatives.
"""

from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from greedynas.models.bases.elastic import Elastic, space_around
from greedynas.models.network import Network, build_network
from greedynas.runtime.errors import GreedyNASError, first_problem
from greedynas.spaces.base_block import BaseBlock, op_name
from greedynas.spaces.space import Fixed, Space, Stage

ACTIVATIONS = {
    "Identity": "none",
    "ReLU": "relu",
    "ReLU6": "relu6",
    "SiLU": "silu",
    "Swish": "silu",
    "SwishMe": "silu",
    "Hardswish": "hard_swish",
    "HardSwish": "hard_swish",
    "HardSwishMe": "hard_swish",
    "GELU": "gelu",
}
GATES = {"Sigmoid": "sigmoid", "Hardsigmoid": "hard_sigmoid", "HardSigmoid": "hard_sigmoid"}
FAMILIES = "tf_efficientnet_lite0, mobilenetv2_100, mobilenetv3_large_100, mnasnet_100, fbnetc_100, efficientnet_b0"


class _NotABase(Exception):
    """Says in what a network differs from those that can be a base."""


def load_base(
    name: str, *, sizes: tuple[int, ...] = (), elastic: Elastic | None = None, num_classes: int | None = None
) -> Space:
    """Return the space around a network of timm: its blocks, and smaller versions of each.

    Args:
        name: The name in timm, such as "tf_efficientnet_lite0".
        sizes: The image sizes that a path can choose from; none: the network's own size alone.
        elastic: How blocks may shrink.
        num_classes: The classes, where they are not those of the network.

    Returns:
        The space. The path with the highest index in every layer is the whole network.

    Raises:
        GreedyNASError: If timm has no such network, or it is made of other blocks.
    """
    space = space_around(base_space(name), elastic, sizes)
    return space.adapt(num_classes=num_classes)


class _SpaceFile(BaseModel):
    """A space file that names a base."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Annotated[str, Field(min_length=1, max_length=200)]
    name: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = ()
    image_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    num_classes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    widths: tuple[float, ...] = Elastic().widths
    kernels: bool = True
    without_se: bool = True
    skip: bool = True


def read_space(source: str, data: dict[str, Any]) -> Space:
    """Return the space of a space file that names a base.

    Args:
        source: The file, for messages.
        data: Its content: `base`, and optionally `name`, `sizes` or `image_size`, `num_classes`, `widths`, `kernels`,
            `without_se` and `skip`.

    Returns:
        The space.

    Raises:
        GreedyNASError: If the file has other keys, or no space can lie around its base.
    """
    try:
        file = _SpaceFile.model_validate(data)
        if file.sizes and file.image_size is not None:
            raise GreedyNASError(f"{source}: give sizes or image_size, not both")
        elastic = Elastic(widths=file.widths, kernels=file.kernels, without_se=file.without_se, skip=file.skip)
        space = space_around(base_space(file.base), elastic, file.sizes, file.name)
    except ValidationError as error:
        raise GreedyNASError(f"{source}: {first_problem(error)}") from None
    return space.adapt(num_classes=file.num_classes, image_size=file.image_size)


def base_space(name: str) -> Space:
    """Return a network of timm as a space with one path."""
    import timm

    if not timm.is_model(name):
        raise GreedyNASError(f"timm has no model {name!r}, which a space could lie around; such as: {FAMILIES}")
    with torch.device("meta"):  # shapes without weights
        network = timm.create_model(name, pretrained=False)
    try:
        return _read(network, name)
    except ValidationError as error:
        raise GreedyNASError(f"timm's {name} cannot be a base: {first_problem(error).partition(', got')[0]}") from None
    except (_NotABase, AttributeError) as error:
        raise GreedyNASError(
            f"timm's {name} is not made of inverted bottlenecks and depthwise-separable blocks alone ({error}); a base can be: {FAMILIES}"
        ) from None


def network_of_base(network: nn.Module, space: Space) -> Network:
    """Return the whole network of a space around a base, with the weights of the network of timm.

    Both have their tensors in the same order; shapes are compared one by one.
    """
    whole = build_network([count - 1 for count in space.num_ops], space)
    values, places = list(network.state_dict().items()), whole.state_dict()
    if [value.shape for _, value in values] != [place.shape for place in places.values()]:
        raise GreedyNASError(f"the weights are not those of {space.base} with {space.num_classes} classes")
    whole.load_state_dict({place: value for place, (_, value) in zip(places, values, strict=True)})
    return whole


def _read(network: Any, name: str) -> Space:
    about: dict[str, Any] = getattr(network, "pretrained_cfg", {}) or {}
    stages, trailing = [], []
    for block in (block for stage in network.blocks for block in stage):
        if type(block).__name__ == "ConvBnAct":
            trailing.append(_convolution(block.conv, block.bn1))
            _refuse(block.has_skip, "a convolution with a residual")
            continue
        _refuse(bool(trailing), "a bottleneck behind a plain convolution")
        stages.append(_stage(block))
    head, neck = trailing, None
    pooled_first = not hasattr(network, "bn2")  # MobileNet V3 convolves after the pooling
    if pooled_first:
        normalised = not isinstance(network.norm_head, nn.Identity)
        neck = _convolution(network.conv_head, network.norm_head if normalised else None, network.act2)
    else:
        head = [*trailing, _convolution(network.conv_head, network.bn2)]
    stem = _convolution(network.conv_stem, network.bn1)
    _refuse(not isinstance(network.classifier, nn.Linear), "a classifier that is not linear")
    ops = tuple(dict.fromkeys(op for stage in stages for op in stage.ops or ()))
    return Space.model_validate(
        {
            "name": name,
            "base": name,
            "ops": ops,
            "stem": [stem.model_dump()],
            "stages": [stage.model_dump() for stage in stages],
            "head": [layer.model_dump() for layer in head],
            "neck": None if neck is None else neck.model_dump(),
            "image_size": int((about.get("input_size") or (3, 224, 224))[-1]),
            "num_classes": network.classifier.out_features,
            "mean": tuple(map(float, about["mean"])) if about.get("mean") else None,
            "std": tuple(map(float, about["std"])) if about.get("std") else None,
        }
    )


def _stage(block: Any) -> Stage:
    kind = type(block).__name__
    _refuse(kind not in ("InvertedResidual", "DepthwiseSeparableConv"), f"it has a {kind}")
    _refuse(getattr(block, "conv_s2d", None) is not None, "a space-to-depth convolution")
    _refuse(not isinstance(block.aa, nn.Identity), "anti-aliasing")
    expands = kind == "InvertedResidual"
    depthwise, project = block.conv_dw, block.conv_pwl if expands else block.conv_pw
    norms = (block.bn1, block.bn2, block.bn3) if expands else (block.bn1, block.bn2)
    kinds = {type(norm).__name__ for norm in norms if not isinstance(norm, nn.BatchNorm2d)}
    _refuse(bool(kinds), f"a normalisation of the kind {', '.join(sorted(kinds))}")
    _refuse(_activation(norms[-1].act) != "none", "an activation at the end of a block")
    hidden, in_channels = depthwise.out_channels, block.conv_pw.in_channels if expands else depthwise.in_channels
    _refuse(
        depthwise.groups != hidden or depthwise.in_channels != hidden, "a convolution in the place of a depthwise one"
    )
    pointwise = [project, block.conv_pw] if expands else [project]
    _refuse(
        any(conv.kernel_size != (1, 1) or conv.groups != 1 for conv in pointwise),
        "pointwise convolutions of another kind",
    )
    shared = {_activation(norm.act) for norm in norms[:-1]}
    _refuse(len(shared) > 1 or len({norm.eps for norm in norms}) > 1, "normalisations of different kinds in a block")
    squeeze = {}
    if not isinstance(block.se, nn.Identity):
        _refuse(type(block.se).__name__ != "SqueezeExcite", f"it has a {type(block.se).__name__}")
        gate = type(block.se.gate).__name__
        _refuse(gate not in GATES, f"a gate of the kind {gate}")
        squeeze = {
            "squeeze": block.se.conv_reduce.out_channels,
            "squeeze_activation": _activation(block.se.act1),
            "gate": GATES[gate],
        }
    shape = BaseBlock.model_validate(
        {
            "kernel": _kernel(depthwise),
            "hidden": hidden,
            "expands": expands,
            "residual": bool(block.has_skip),
            "activation": shared.pop(),
            "same_padding": _pads_same(depthwise),
            "eps": norms[0].eps,
            **squeeze,
        }
    )
    op = op_name(hidden, in_channels, shape.kernel, bool(squeeze))
    return Stage(channels=project.out_channels, stride=depthwise.stride[0], ops=(op,), block=shape)


def _convolution(conv: Any, norm: Any, act: Any = None) -> Fixed:
    """Describe a convolution of stem, head or neck."""
    _refuse(conv.groups != 1, "grouped convolutions")
    _refuse(norm is not None and conv.bias is not None, "a convolution with both biases and normalisation")
    _refuse(
        norm is not None and not isinstance(norm, nn.BatchNorm2d), f"a normalisation of the kind {type(norm).__name__}"
    )
    block = BaseBlock.model_validate(
        {
            "kernel": _kernel(conv),
            "activation": _activation(norm.act if act is None or isinstance(act, nn.Identity) else act),
            "same_padding": _pads_same(conv),
            "eps": 1e-5 if norm is None else norm.eps,
            "normalised": norm is not None,
            "biased": conv.bias is not None or norm is not None,
        }
    )
    return Fixed(op=f"CONV_K{block.kernel}", channels=conv.out_channels, stride=conv.stride[0], block=block)


def _kernel(conv: Any) -> int:
    height, width = conv.kernel_size
    _refuse(height != width or height % 2 == 0 or conv.dilation != (1, 1), f"a kernel of {height}×{width}")
    return int(height)


def _pads_same(conv: Any) -> bool:
    if type(conv).__name__ == "Conv2dSame":
        return True
    _refuse(conv.padding != (conv.kernel_size[0] // 2,) * 2, f"a padding of {conv.padding}")
    return False


def _activation(module: Any) -> str:
    kind = type(module).__name__
    _refuse(kind not in ACTIVATIONS, f"an activation of the kind {kind}")
    return ACTIVATIONS[kind]


def _refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise _NotABase(what)
