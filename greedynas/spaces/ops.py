"""Candidate operations by name, and what each of them costs: plain integers, no torch.

An op is written as the paper writes it:

    ID             identity; where the shape changes, a 1x1 strided convolution + BatchNorm
    CONV_K3        convolution + BatchNorm + ReLU (stems and heads)
    MB6_K5_SE      MobileNetV2 inverted bottleneck: expansion 6, kernel 5, squeeze-and-excitation
    SHUFFLE_K3     ShuffleNetV2 unit with a 3x3 depthwise convolution
    XCEPTION_K3    ShuffleNetV2 unit with three depthwise convolutions (Single Path One-Shot)

`blocks.py` builds the modules; the tests hold both to the same numbers.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from greedynas.runtime.errors import GreedyNASError

SE_RATIO = 0.25
MAX_KERNEL = 15
MAX_EXPANSION = 16
GRAMMAR = "ID, CONV_K<k>, MB<e>_K<k>, MB<e>_K<k>_SE, SHUFFLE_K<k>, XCEPTION_K<k>"
_PATTERN = re.compile(
    r"(?P<family>ID|CONV|MB|SHUFFLE|XCEPTION)(?P<expansion>\d{1,3})?(_K(?P<kernel>\d{1,3}))?(?P<se>_SE)?"
)


@dataclass(frozen=True)
class Op:
    """A parsed op name."""

    family: str
    kernel: int = 1
    expansion: int = 1
    se: bool = False


class Cost(NamedTuple):
    """Multiply-adds of convolutions and linear layers, and trainable parameters."""

    macs: int
    params: int


@cache
def parse_op(name: str) -> Op:
    """`MB6_K5_SE` -> Op("MB", kernel=5, expansion=6, se=True)."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        raise GreedyNASError(f"unknown op {name!r}; ops are written {GRAMMAR}")
    family, expansion, kernel, se = match["family"], match["expansion"], match["kernel"], bool(match["se"])
    well_formed = (
        (kernel is None) == (family == "ID")
        and (expansion is not None) == (family == "MB")
        and (family == "MB" or not se)
    )
    if not well_formed:
        raise GreedyNASError(f"unknown op {name!r}; ops are written {GRAMMAR}")
    op = Op(family, int(kernel or 1), int(expansion or 1), se)
    if op.kernel % 2 == 0 or op.kernel > MAX_KERNEL:
        raise GreedyNASError(f"op {name!r}: the kernel must be odd and at most {MAX_KERNEL}")
    if not 1 <= op.expansion <= MAX_EXPANSION:
        raise GreedyNASError(f"op {name!r}: the expansion must be from 1 to {MAX_EXPANSION}")
    return op


def is_nothing(name: str, in_channels: int, out_channels: int, stride: int) -> bool:
    """Whether this op leaves its input as it is: an identity where the shape does not change."""
    return name == "ID" and in_channels == out_channels and stride == 1


def squeeze_channels(expanded: int) -> int:
    return int(SE_RATIO * expanded)


def check_shape(name: str, in_channels: int, out_channels: int, stride: int) -> None:
    """Raise where this op cannot be built between these channels."""
    op = parse_op(name)
    if op.se and squeeze_channels(op.expansion * in_channels) < 1:
        raise GreedyNASError(f"{name} cannot squeeze {op.expansion * in_channels} channels to a quarter")
    if op.family in ("SHUFFLE", "XCEPTION"):
        if stride == 1 and (in_channels != out_channels or in_channels % 2):
            raise GreedyNASError(
                f"{name} with stride 1 keeps an even number of channels, it cannot go from {in_channels} to {out_channels}"
            )
        if stride != 1 and out_channels <= in_channels:
            raise GreedyNASError(
                f"{name} with stride {stride} must add channels, it cannot go from {in_channels} to {out_channels}"
            )


def out_size(size: int, stride: int) -> int:
    """Height (= width) after a stride; the same for every odd kernel with padding kernel // 2."""
    return (size - 1) // stride + 1


def op_cost(name: str, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
    """Exact cost of one op on a `size` x `size` input. Each BatchNorm has two parameters a channel."""
    op = parse_op(name)
    before, after = size**2, out_size(size, stride) ** 2  # pixels
    if is_nothing(name, in_channels, out_channels, stride):
        return Cost(0, 0)
    if op.family in ("ID", "CONV"):
        return _conv(in_channels, out_channels, op.kernel, after)
    if op.family == "MB":
        hidden = op.expansion * in_channels
        return _sum(
            _conv(in_channels, hidden, 1, before) if op.expansion > 1 else Cost(0, 0),
            _depthwise(hidden, op.kernel, after),
            _squeeze_excite(hidden) if op.se else Cost(0, 0),
            _conv(hidden, out_channels, 1, after),
        )
    # ShuffleNetV2: half of the channels pass at stride 1, are projected at stride 2.
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
