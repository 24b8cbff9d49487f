"""Quicker gradients of depthwise convolutions on a CPU, for all networks and without a compiled kernel.

Three things slow oneDNN down, and plain PyTorch has a way around each:

* The gradient of a kernel of 5x5 or 7x7 takes 10 to 100 times as long as the convolution. It is a depthwise convolution as
  well, in which the images take the place of channels and the gradients of the output that of the kernels.
* The gradient of the input at stride 1 is a convolution with the flipped kernel, which is as quick as the forward pass.
* The gradient of the input at stride 2 is 25 times slower in bf16 than in float32, to which the tensors are copied.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]
SPECIALISED = 3  # oneDNN has a gradient for depthwise kernels up to this width


class QuickDepthwise(TorchFunctionMode):
    """A context in which depthwise convolutions on a CPU have quicker gradients. Nothing else changes."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.conv2d:
            found = _depthwise(*args, **kwargs)
            if found is not None:
                return DepthwiseConvolution.apply(*found)
        return func(*args, **kwargs)


def _depthwise(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Pair, Pair] | None:
    """Return the arguments of `DepthwiseConvolution` if these of `F.conv2d` are a convolution that it can compute."""
    channelwise = 1 < groups == weight.shape[0] and input.dim() == 4 and input.shape[1] == groups
    if not channelwise or bias is not None or isinstance(padding, str) or _pair(dilation) != (1, 1):
        return None
    trained = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
    if not trained or input.device.type != "cpu" or weight.shape[-2:].numel() == 1:
        return None
    return input, weight, _pair(stride), _pair(padding)


def _pair(value: int | Sequence[int]) -> Pair:
    if isinstance(value, int):
        return value, value
    first, *rest = value
    return first, rest[0] if rest else first


class DepthwiseConvolution(torch.autograd.Function):
    """A depthwise convolution with the gradients of this module. Under autocast it computes in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.dtypes = x.dtype, weight.dtype
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            x, weight = x.to(half), weight.to(half)
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        with torch.autocast("cpu", enabled=False):
            return F.conv2d(x, weight, None, stride, padding, groups=len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_input, of_weight = ctx.needs_input_grad[:2]
        with torch.autocast("cpu", enabled=False):
            grad_x = input_gradient(gradient, x, weight, ctx.stride, ctx.padding) if of_input else None
            grad_weight = weight_gradient(gradient, x, weight, ctx.stride, ctx.padding) if of_weight else None
        grad_x = None if grad_x is None else grad_x.to(ctx.dtypes[0])
        return grad_x, None if grad_weight is None else grad_weight.to(ctx.dtypes[1]), None, None


def input_gradient(gradient: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Return the gradient of the input: a convolution with the flipped kernel where nothing is skipped or cropped."""
    rest = tuple(size - 1 - pad for size, pad in zip(weight.shape[-2:], padding, strict=True))
    if stride == (1, 1) and min(rest) >= 0:
        return F.conv2d(gradient, weight.flip(2, 3), None, 1, rest, groups=len(weight))
    dtype = torch.promote_types(x.dtype, torch.float32)
    found = _by_pytorch(gradient.to(dtype), x.to(dtype), weight.to(dtype), stride, padding, 0)
    return found.to(gradient.dtype)


def weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Return the gradient of the kernels."""
    images, channels, height, width = x.shape
    rows, columns = weight.shape[-2:]
    if max(rows, columns) <= SPECIALISED:
        return _by_pytorch(gradient, x, weight, stride, padding, 1)
    # For every image and channel, the output's gradient slides over the image. Its steps are the dilation of this
    # convolution, and its places are the entries of the kernel.
    planes = x.permute(2, 3, 0, 1).reshape(1, height, width, images * channels).permute(0, 3, 1, 2)
    kernels = gradient.reshape(images * channels, 1, *gradient.shape[-2:])
    found = F.conv2d(planes, kernels, None, 1, padding, stride, images * channels)[..., :rows, :columns]
    summed = found.reshape(images, channels, rows, columns).sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
    return summed.unsqueeze(1)


def _by_pytorch(gradient: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, which: int) -> Tensor:
    """Return the gradient of the input (0) or of the weight (1) as PyTorch computes it."""
    wanted = [which == 0, which == 1, False]
    found = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, (1, 1), False, (0, 0), len(weight), wanted
    )
    result: Tensor = found[which]
    return result
