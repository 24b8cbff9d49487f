"""The blocks of a pretrained network as data: what the name of an op does not say, and what a smaller version of a block costs."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.ops import Cost, out_size, parse_op

Width = Annotated[int, Field(ge=1, le=65536)]
Activation = Literal["none", "relu", "relu6", "silu", "hard_swish", "gelu"]
Gate = Literal["sigmoid", "hard_sigmoid"]


class BaseBlock(BaseModel):
    """A block of a pretrained network: an inverted bottleneck, a depthwise-separable block or a plain convolution.

    Attributes:
        kernel: The kernel of its depthwise (or plain) convolution.
        hidden: The channels of its depthwise convolution; None for a plain convolution.
        expands: Whether a 1×1 convolution stands before the depthwise one.
        squeeze: The channels between the two convolutions of squeeze-and-excitation; 0 where there is none.
        residual: Whether the input is added to the output.
        activation: The activation after each normalisation but the last one.
        squeeze_activation: The activation between the two convolutions of squeeze-and-excitation.
        gate: What makes factors of the output of squeeze-and-excitation.
        same_padding: Whether a strided convolution pads as TensorFlow does, more on the right and at the bottom.
        eps: The constant of BatchNorm.
        normalised: Whether BatchNorm follows a plain convolution.
        biased: Whether a plain convolution without BatchNorm has biases.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    kernel: Annotated[int, Field(ge=1, le=15)]
    hidden: Width | None = None
    expands: bool = True
    squeeze: Annotated[int, Field(ge=0, le=65536)] = 0
    residual: bool = False
    activation: Activation = "relu"
    squeeze_activation: Activation = "relu"
    gate: Gate = "sigmoid"
    same_padding: bool = False
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    normalised: bool = True
    biased: bool = True

    def check(self, name: str, in_channels: int) -> None:
        """Raise a GreedyNASError if an op is not this block or a smaller version of it."""
        op = parse_op(name)
        if op.family == "ID":
            if not self.residual:
                raise GreedyNASError(f"{name} cannot replace a block without a residual")
            return
        family = "CONV" if self.hidden is None else "MB"
        if op.family != family or op.kernel > self.kernel:
            raise GreedyNASError(f"{name} is no smaller version of a {family} block with kernel {self.kernel}")
        if self.hidden is not None and op.hidden(in_channels) > self.hidden:
            raise GreedyNASError(f"{name} is wider than the block of {self.hidden} channels that it is cut from")
        if self.hidden is not None and not self.expands and op.hidden(in_channels) != in_channels:
            raise GreedyNASError(f"{name} would need an expansion, which its block does not have")
        if op.se and not self.squeeze:
            raise GreedyNASError(f"{name} has SE, which its block does not have")

    def cost(self, name: str, in_channels: int, out_channels: int, stride: int, size: int) -> Cost:
        """Return the exact cost of an op that is this block or a smaller version of it."""
        op = parse_op(name)
        before, after = size**2, out_size(size, stride) ** 2
        if self.hidden is None:
            weights = in_channels * out_channels * op.kernel**2
            return Cost(weights * after, weights + (2 if self.normalised else int(self.biased)) * out_channels)
        hidden = op.hidden(in_channels)
        macs = hidden * (op.kernel**2 * after + out_channels * after)
        params = hidden * (op.kernel**2 + out_channels) + 2 * (hidden + out_channels)
        if self.expands:
            macs += in_channels * hidden * before
            params += in_channels * hidden + 2 * hidden
        if op.se:
            macs += 2 * hidden * self.squeeze
            params += 2 * hidden * self.squeeze + hidden + self.squeeze
        return Cost(macs, params)

    def shared_params(self, names: Sequence[str], in_channels: int, out_channels: int) -> int:
        """Return the parameters of a supernet's layer, whose ops are slices of this block.

        The ops share all weights but the normalisations and the last convolution, of which each op has its own.
        """
        hidden = self.hidden or 0
        total = hidden * (self.kernel**2 + (in_channels if self.expands else 0))
        total += 2 * hidden * self.squeeze + hidden + self.squeeze if self.squeeze else 0
        whole = False
        for op in map(parse_op, names):
            if op.family != "ID":
                width = op.hidden(in_channels)
                total += width * out_channels + 2 * (width * (2 if self.expands else 1) + out_channels)
                whole |= (width, op.kernel, op.se) == (hidden, self.kernel, self.squeeze > 0)
        return total + (0 if whole else hidden * out_channels)


def expansion_name(hidden: int, in_channels: int) -> str:
    """Return the shortest expansion that gives this many hidden channels: "6", "2.5"."""
    for digits in range(5):
        text = f"{hidden / in_channels:.{digits}f}"
        if round(float(text) * in_channels) == hidden:
            return text
    raise GreedyNASError(f"{hidden} channels are no expansion of {in_channels}")


def op_name(hidden: int, in_channels: int, kernel: int, se: bool) -> str:
    """Return the name of an MB op with this many hidden channels."""
    return f"MB{expansion_name(hidden, in_channels)}_K{kernel}{'_SE' if se else ''}"
