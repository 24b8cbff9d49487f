"""The blocks of pretrained networks as plain torch modules: inverted bottlenecks and convolutions as a `BaseBlock` describes them.

Their tensors come in the order of timm's blocks, so the weights of one fit the other one by one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greedynas.spaces.base_block import BaseBlock
from greedynas.spaces.ops import parse_op
from greedynas.spaces.space import Layer

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "hard_swish": lambda: nn.Hardswish(inplace=True),
    "gelu": nn.GELU,
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "hard_sigmoid": F.hardsigmoid}


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, groups: int, same_padding: bool) -> Tensor:
    """Convolve with padding that keeps the size at stride 1; `same_padding` pads strided convolutions as TensorFlow does."""
    kernel = weight.shape[-1]
    if x.is_cuda and kernel == stride == groups == 1:
        return pointwise(x, weight, bias)
    if stride == 1 or not same_padding:
        return F.conv2d(x, weight, bias, stride, kernel // 2, groups=groups)
    height, width = (max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[-2:])
    x = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
    return F.conv2d(x, weight, bias, stride, groups=groups)


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve with a 1×1 kernel as a matrix product, which is a view of the same memory in channels_last.

    cuDNN plans every shape of a convolution when it first sees it. A space around a base has thousands of shapes, so that
    the first epoch of a supernet took a minute on an H200.
    """
    return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)


class PaddedConv(nn.Conv2d):
    """A convolution that keeps the size but for its stride."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, groups: int, bias: bool, same: bool
    ):
        super().__init__(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=bias)
        self.same = same

    def forward(self, input: Tensor) -> Tensor:
        return convolve(input, self.weight, self.bias, self.stride[0], self.groups, self.same)


class BaseConv(nn.Module):
    """A convolution with BatchNorm (or biases, or neither) and an activation."""

    def __init__(
        self, block: BaseBlock, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1, groups: int = 1,
        activation: str | None = None,
    ):  # fmt: skip
        super().__init__()
        with_bias = block.biased and not block.normalised
        self.conv = PaddedConv(in_channels, out_channels, kernel, stride, groups, with_bias, block.same_padding)
        self.norm = nn.BatchNorm2d(out_channels, block.eps) if block.normalised else nn.Identity()
        self.activation = ACTIVATIONS[block.activation if activation is None else activation]()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(x)))


class BaseSqueezeExcite(nn.Module):
    """Squeeze-and-excitation of a pretrained block."""

    def __init__(self, block: BaseBlock, channels: int):
        super().__init__()
        self.reduce = nn.Conv2d(channels, block.squeeze, 1)
        self.activation = ACTIVATIONS[block.squeeze_activation]()
        self.expand = nn.Conv2d(block.squeeze, channels, 1)
        self.gate = GATES[block.gate]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(self.activation(self.reduce(x.mean((2, 3), keepdim=True)))))


class Bottleneck(nn.Module):
    """An inverted bottleneck of a pretrained network, or a smaller version of it."""

    def __init__(
        self, block: BaseBlock, in_channels: int, out_channels: int, stride: int, hidden: int, kernel: int, se: bool
    ):
        super().__init__()
        self.expand = BaseConv(block, in_channels, hidden) if block.expands else None
        self.depthwise = BaseConv(block, hidden, hidden, kernel, stride, groups=hidden)
        self.se = BaseSqueezeExcite(block, hidden) if se else None
        self.project = BaseConv(block, hidden, out_channels, activation="none")
        self.residual = block.residual

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.expand is None else self.expand(x)
        out = self.depthwise(out)
        out = out if self.se is None else self.se(out)
        out = self.project(out)
        return x + out if self.residual else out


def make_base_block(op: str, layer: Layer) -> nn.Module:
    """Return the module of an op that is the block of a pretrained network or a smaller version of it."""
    kind, block = parse_op(op), layer.block
    assert block is not None  # only such layers come here
    if kind.family == "CONV":
        return BaseConv(block, layer.in_channels, layer.out_channels, kind.kernel, layer.stride)
    hidden = kind.hidden(layer.in_channels)
    return Bottleneck(block, layer.in_channels, layer.out_channels, layer.stride, hidden, kind.kernel, kind.se)


class Resize(nn.Module):
    """Images of one size from those of another one, smoothed: the first op of a path that chooses its image size."""

    def __init__(self, pixels: int):
        super().__init__()
        self.pixels = pixels

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == self.pixels:
            return x
        return F.interpolate(x, self.pixels, mode="bilinear", antialias=True, align_corners=False)

    def extra_repr(self) -> str:
        return f"{self.pixels} px"
