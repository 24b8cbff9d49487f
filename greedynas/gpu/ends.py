"""Both ends of a network in the engine: the first convolution, which gathers its patches itself, and the last 1x1 convolution
with the mean over pixels, so that its wide output is written once and read once."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from greedynas.gpu import engine


def gathers(block: Any, x: Tensor) -> bool:
    """Return whether the engine can run this ConvNorm on images, which need no gradient."""
    if x.requires_grad or x.shape[1] > 4 or not engine.applies(x, block.norm):
        return False
    from greedynas.gpu.kernels import stem

    return stem.fits(block.conv)


def gathered(block: Any, x: Tensor) -> Tensor:
    """Return the output of a ConvNorm on images."""
    with engine._device(x):
        return _Gathered.apply(x, block, block.conv.weight, block.norm.weight, block.norm.bias)  # type: ignore[no-any-return]


def pools(block: nn.Module, x: Tensor) -> bool:
    """Return whether the engine can compute the mean over pixels of this ConvNorm without storing its output."""
    conv = getattr(block, "conv", None)
    if conv is None or conv.kernel_size[0] > 1 or conv.stride[0] > 1 or conv.groups > 1:
        return False
    return conv.weight.is_contiguous() and engine.applies(x, block.norm)  # type: ignore[arg-type]


def pooled(block: Any, x: Tensor) -> Tensor:
    """Return the mean over pixels of a ConvNorm's output: float32 (images, channels)."""
    x = x.to(torch.bfloat16) if x.is_cuda else x
    with engine._device(x):
        return _Pooled.apply(x, block, block.conv.weight, block.norm.weight, block.norm.bias)  # type: ignore[no-any-return]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any, weight: Tensor, *norm: Tensor) -> Tensor:
        from greedynas.gpu.kernels import norms, stem

        x, ctx.stride, ctx.act = engine._nhwc(x), block.conv.stride[0], engine.ACTS[type(block.activation)]
        y, part = stem.forward(x, weight, ctx.stride, torch.bfloat16 if x.is_cuda else x.dtype)
        vectors = norms.finish_norm(block.norm, part)
        ctx.batch = engine._from_batch(block.norm)
        ctx.save_for_backward(x, y, vectors, weight)
        return engine._nchw(norms.normalise(y, vectors, act=ctx.act))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        from greedynas.gpu.kernels import norms, stem

        x, y, vectors, weight = ctx.saved_tensors
        g = engine._nhwc(grad)
        part = norms.gradient_sums(g, y, vectors, ctx.act)
        coef, gamma, beta = norms.finish_gradient(vectors, part, engine._pixels(y), ctx.batch)
        return None, None, stem.weight_gradient(x, g, y, vectors, coef, ctx.act, weight, ctx.stride), gamma, beta


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any, weight: Tensor, *norm: Tensor) -> Tensor:
        from greedynas.gpu.kernels import norms, pointwise, small

        act, x = engine.ACTS[type(block.activation)], engine._nhwc(x)
        matrix = engine._matrix(block.conv, x)
        y, part = pointwise.forward(x, matrix)
        vectors = norms.finish_norm(block.norm, part)
        ctx.act, ctx.batch = act, engine._from_batch(block.norm)
        ctx.save_for_backward(x, matrix, y, vectors, weight)
        return small.image_means(y, vectors, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        from greedynas.gpu.kernels import gating, norms, pointwise_backward

        x, matrix, y, vectors, weight = ctx.saved_tensors
        g, grad = torch.empty_like(y), grad.float() / (y.shape[1] * y.shape[2])
        part = gating.gate_gradient(g, None, grad.contiguous(), y, vectors, ctx.act)
        coef, gamma, beta = norms.finish_gradient(vectors, part, engine._pixels(y), ctx.batch)
        dx, w = pointwise_backward.widening(g, y, coef, matrix, weight, x)
        return engine._nchw(dx), None, w, gamma, beta
