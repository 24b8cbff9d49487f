"""Candidate operations by name, and their costs as plain integers, without torch for the built-in ones.

An op is written as in the paper:

    ID             identity; where the shape changes, a 1x1 strided convolution + BatchNorm
    CONV_K3        convolution + BatchNorm + ReLU (stems and heads)
    MB6_K5_SE      MobileNetV2 inverted bottleneck: expansion 6, kernel 5, squeeze-and-excitation
    SHUFFLE_K3     ShuffleNetV2 unit with a 3x3 depthwise convolution
    XCEPTION_K3    ShuffleNetV2 unit with three depthwise convolutions (Single Path One-Shot)
    PX96           images of 96 pixels: the choice of the first layer in a space of several image sizes

`models/blocks.py` builds the modules; the tests check that both agree. Other ops are registered by name (`register_op`)
with a function that builds their module; their costs are counted from the module if no formula is given.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.registry import Registry

SE_RATIO = 0.25
MAX_KERNEL = 15
MIN_EXPANSION, MAX_EXPANSION = 0.05, 16
GRAMMAR = "ID, CONV_K<k>, MB<e>_K<k>, MB<e>_K<k>_SE, SHUFFLE_K<k>, XCEPTION_K<k>"
_PATTERN = re.compile(
    r"(?P<family>ID|CONV|MB|SHUFFLE|XCEPTION)(?P<expansion>\d{1,3}(\.\d{1,4})?)?(_K(?P<kernel>\d{1,3}))?(?P<se>_SE)?"
)
_SIZE = re.compile(r"PX(?P<pixels>[1-9]\d{0,3})")


@dataclass(frozen=True)
class Op:
    """A parsed op name."""

    family: str
    kernel: int = 1
    expansion: float = 1
    se: bool = False
    pixels: int = 0  # of an image size

    def hidden(self, in_channels: int) -> int:
        """Return the channels of the depthwise convolution of an MB op."""
        return round(self.expansion * in_channels)


class Cost(NamedTuple):
    """Multiply-adds of convolutions and linear layers, and trainable parameters."""

    macs: int
    params: int


@dataclass(frozen=True)
class CustomOp:
    """An op that a plugin has registered.

    Attributes:
        build: Returns the module of the op between given (input channels, output channels, stride).
        cost: Returns the `Cost` of the op for (input channels, output channels, stride, input size). None: it is
        counted
            from the module.
    """

    build: Callable[[int, int, int], Any]
    cost: Callable[[int, int, int, int], Cost] | None = None


OPS: "Registry[CustomOp | Callable[[int, int, int], Any]]" = Registry("op", {})
CUSTOM = "CUSTOM"  # the family of registered ops
_CUSTOM_NAME = re.compile(r"[A-Z][A-Za-z0-9_]{0,39}")


def register_op(
    name: str,
    build: Callable[[int, int, int], Any] | None = None,
    *,
    cost: Callable[[int, int, int, int], Cost] | None = None,
) -> Any:
    """Register an op under a name, for spaces in YAML and in Python; use it as a function or as a decorator.

    Args:
        name: A capital letter, then letters, digits and underscores, such as "GHOST_K5".
        build: Takes input channels, output channels and stride and returns an nn.Module that maps (n, input channels, s, s) to
            (n, output channels, ceil(s / stride), ceil(s / stride)), such as a class with this constructor. The module
            initialises its own weights.
        cost: Takes input channels, output channels, stride and input size and returns (multiply-adds, parameters). By default
            both are counted from the module: by torch's FlopCounterMode and by the sizes of its parameters.

    Returns:
        The registered op, or a decorator.

    Raises:
        GreedyNASError: If the name is taken or is not written as above.

    Example:
        >>> import greedynas, torch
        >>> @greedynas.register_op("PLAIN_K3")
        ... class Plain(torch.nn.Sequential):
        ...     def __init__(self, in_channels, out_channels, stride):
        ...         super().__init__(torch.nn.Conv2d(in_channels, out_channels, 3, stride, 1), torch.nn.ReLU())
        >>> "PLAIN_K3" in greedynas.registered()["op"]
        True
    """
    if build is None:
        return lambda decorated: register_op(name, decorated, cost=cost)
    if not _CUSTOM_NAME.fullmatch(name) or _PATTERN.fullmatch(name):
        raise GreedyNASError(
            "an op's name is a capital letter and then letters, digits and underscores, "
            f"and not one of {GRAMMAR}; got {name!r:.80}"
        )
    OPS.register(name, CustomOp(build, cost))
    return build


def custom_op(name: str) -> CustomOp | None:
    """Return the registered op of this name, or None if there is none."""
    if not _CUSTOM_NAME.fullmatch(name) or _PATTERN.fullmatch(name) or name not in OPS:
        return None
    found = OPS[name]
    return found if isinstance(found, CustomOp) else CustomOp(found)


@cache
def parse_op(name: str) -> Op:
    """Return the op that a name stands for: `MB6_K5_SE` is Op("MB", kernel=5, expansion=6, se=True)."""
    if size := _SIZE.fullmatch(name):
        return Op("PX", pixels=int(size["pixels"]))
    match = _PATTERN.fullmatch(name)
    if match is None:
        if custom_op(name) is not None:
            return Op(CUSTOM)
        registered = "".join(f", {other}" for other in OPS.names())
        raise GreedyNASError(
            f"unknown op {name!r}; ops are written {GRAMMAR}{registered}, or come with --plugin MODULE"
        )
    family, expansion, kernel, se = match["family"], match["expansion"], match["kernel"], bool(match["se"])
    well_formed = (
        (kernel is None) == (family == "ID")
        and (expansion is not None) == (family == "MB")
        and (family == "MB" or not se)
    )
    if not well_formed:
        raise GreedyNASError(f"unknown op {name!r}; ops are written {GRAMMAR}")
    op = Op(family, int(kernel or 1), float(expansion or 1), se)
    if op.kernel % 2 == 0 or op.kernel > MAX_KERNEL:
        raise GreedyNASError(f"op {name!r}: the kernel must be odd and at most {MAX_KERNEL}")
    if not MIN_EXPANSION <= op.expansion <= MAX_EXPANSION:
        raise GreedyNASError(f"op {name!r}: the expansion must be from {MIN_EXPANSION} to {MAX_EXPANSION}")
    return op


def is_nothing(name: str, in_channels: int, out_channels: int, stride: int) -> bool:
    """Return whether this op leaves its input unchanged: an identity that does not change the shape."""
    return name == "ID" and in_channels == out_channels and stride == 1


def squeeze_channels(expanded: int) -> int:
    return int(SE_RATIO * expanded)


def check_shape(name: str, in_channels: int, out_channels: int, stride: int) -> None:
    """Raise if this op cannot be built between these channels."""
    op = parse_op(name)
    if op.hidden(in_channels) < 1:
        raise GreedyNASError(f"{name} leaves no channel of {in_channels}")
    if op.se and squeeze_channels(op.hidden(in_channels)) < 1:
        raise GreedyNASError(f"{name} cannot squeeze {op.hidden(in_channels)} channels to a quarter")
    if op.family in ("SHUFFLE", "XCEPTION"):
        if stride == 1 and (in_channels != out_channels or in_channels % 2):
            raise GreedyNASError(
                f"{name} with stride 1 keeps an even number of channels; "
                f"it cannot go from {in_channels} to {out_channels}"
            )
        if stride != 1 and out_channels <= in_channels:
            raise GreedyNASError(
                f"{name} with stride {stride} must add channels; it cannot go from {in_channels} to {out_channels}"
            )


def out_size(size: int, stride: int) -> int:
    """Return the height (= width) after a stride; it is the same for every odd kernel with padding kernel // 2."""
    return (size - 1) // stride + 1


def op_cost(name: str, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    """Return the exact cost of one op on a `size` x `size` input. Each BatchNorm has two parameters per channel."""
    op = parse_op(name)
    if op.family == CUSTOM:
        return _custom_cost(name, in_channels, out_channels, stride, size)
    before, after = size**2, out_size(size, stride) ** 2  # pixels
    if op.family == "PX" or is_nothing(name, in_channels, out_channels, stride):
        return Cost(0, 0)
    if op.family in ("ID", "CONV"):
        return _conv(in_channels, out_channels, op.kernel, after)
    if op.family == "MB":
        hidden = op.hidden(in_channels)
        return _sum(
            _conv(in_channels, hidden, 1, before) if op.expansion != 1 else Cost(0, 0),
            _depthwise(hidden, op.kernel, after),
            _squeeze_excite(hidden) if op.se else Cost(0, 0),
            _conv(hidden, out_channels, 1, after),
        )
    # ShuffleNetV2: half of the channels pass unchanged at stride 1 and are projected at stride 2.
    source = in_channels // 2 if stride == 1 else in_channels
    middle, grown = out_channels // 2, out_channels - source
    shortcut = [] if stride == 1 else [_depthwise(source, op.kernel, after), _conv(source, source, 1, after)]
    if op.family == "SHUFFLE":
        main = [_conv(source, middle, 1, before), _depthwise(middle, op.kernel, after), _conv(middle, grown, 1, after)]
    else:
        main = [
            _depthwise(source, op.kernel, after),
            _conv(source, middle, 1, after),
            _depthwise(middle, op.kernel, after),
            _conv(middle, middle, 1, after),
            _depthwise(middle, op.kernel, after),
            _conv(middle, grown, 1, after),
        ]
    return _sum(*shortcut, *main)


@cache
def _custom_cost(name: str, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    """Return the cost of a registered op, by its formula or counted from its module, without running it on data."""
    op = custom_op(name)
    assert op is not None  # its name has been parsed
    if op.cost is not None:
        return Cost(*map(int, op.cost(in_channels, out_channels, stride, size)))
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    where = f"op {name} from {in_channels} to {out_channels} channels with stride {stride} on {size} px"
    try:
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            module = op.build(in_channels, out_channels, stride).eval()
            shape = tuple(module(torch.empty(1, in_channels, size, size)).shape)
    except Exception as error:  # a plugin may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GreedyNASError(f"{where} cannot be built and run: {reason:.300}") from error
    after = out_size(size, stride)
    if shape != (1, out_channels, after, after):
        raise GreedyNASError(
            f"{where} must return a tensor of shape {(1, out_channels, after, after)}, but returns {shape}"
        )
    params = sum(parameter.numel() for parameter in module.parameters())
    return Cost(int(counter.get_total_flops()) // 2, params)


def linear_cost(in_features: int, out_features: int) -> Cost:
    return Cost(in_features * out_features, (in_features + 1) * out_features)


def _conv(in_channels: int, out_channels: int, kernel: int, pixels: int) -> Cost:
    weights = in_channels * out_channels * kernel**2
    return Cost(weights * pixels, weights + 2 * out_channels)


def _depthwise(channels: int, kernel: int, pixels: int) -> Cost:
    weights = channels * kernel**2
    return Cost(weights * pixels, weights + 2 * channels)


def _squeeze_excite(channels: int) -> Cost:
    squeezed = squeeze_channels(channels)
    weights = 2 * channels * squeezed
    return Cost(weights, weights + channels + squeezed)


def _sum(*costs: Cost) -> Cost:
    return Cost(sum(cost.macs for cost in costs), sum(cost.params for cost in costs))
