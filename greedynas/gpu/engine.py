"""The GPU engine: blocks as single autograd functions over the fused kernels of `gpu/kernels/`.

The blocks use it internally: parameters, buffers and state dict are the same, and plain PyTorch runs wherever it does
not apply. By default it applies on a GPU under bf16 autocast, with channels_last activations. See
docs/research/engine.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from greedynas.runtime.engine_mode import mode as mode
from greedynas.runtime.engine_mode import use as use
from greedynas.runtime.engine_mode import using as using

ACTS: dict[type, str | None] = {nn.ReLU: "relu", nn.Hardswish: "hard_swish", type(None): None}
SHAPES = {(kernel, stride) for kernel in (3, 5, 7) for stride in (1, 2)}  # of the depthwise kernels
_ends: dict[str, Tensor] = {}  # the tensors that an MBConv block writes to while it is recorded in graphs


@contextmanager
def writing(**ends: Tensor) -> Iterator[None]:
    """Let an MBConv block inside this context write its `out` or its input's `gradient` to (images, H, W, C)."""
    _ends.update(ends)
    try:
        yield
    finally:
        _ends.clear()


def applies(x: Tensor, *norms: nn.BatchNorm2d) -> bool:
    """Return whether the engine can run this input and these BatchNorms in their current modes."""
    if mode() == "off" or (mode() == "auto" and not _fast_here(x)):
        return False
    if x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last) or torch.compiler.is_compiling():
        return False
    pixels = x.numel() // x.shape[1] if x.shape[1] else 0
    return pixels > 1 and all(
        type(norm) is nn.BatchNorm2d and norm.affine and norm.momentum is not None for norm in norms
    )


def takes(block: Any, x: Tensor) -> bool:
    """Return whether the engine can run this MBConv block as a whole."""
    parts, conv = (
        [part for part in (block.expand, block.depthwise, block.project) if part is not None],
        block.depthwise.conv,
    )
    if not applies(x, *[part.norm for part in parts]) or (conv.kernel_size[0], conv.stride[0]) not in SHAPES:
        return False
    if not all(part.conv.weight.is_contiguous() for part in parts):
        return False
    return x.shape[0] * -(-x.shape[2] // 2) * -(-x.shape[3] // 2) > 1  # one value per channel has no variance


def _fast_here(x: Tensor) -> bool:
    if not (x.is_cuda and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.bfloat16):
        return False
    return capable(x.device)


@cache
def capable(device: torch.device) -> bool:
    return has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def norm_act(y: Tensor, norm: nn.BatchNorm2d, activation: nn.Module | None) -> Tensor:
    """Return BatchNorm and activation of a convolution's output."""
    with _device(y):
        return _NormAct.apply(y, norm, ACTS[type(activation)], norm.weight, norm.bias)  # type: ignore[no-any-return]


def mbconv(block: Any, x: Tensor) -> Tensor:
    """Return the output of a whole MBConv block."""
    if x.is_cuda:
        x = x.to(torch.bfloat16)
    with _device(x):
        if torch.is_grad_enabled():
            parameters = _parameters(block)
            if any(t.requires_grad for t in (x, *parameters)):
                return _MBConv.apply(x, block, *parameters)  # type: ignore[no-any-return]
        return _nchw(_forward(block, _nhwc(x), None))


def _parameters(block: Any) -> list[Tensor]:
    """Return the parameters of a block in the order of the gradients that `_MBConv` returns."""
    parts = [block.expand, block.depthwise, block.project]
    parameters = [p for part in parts if part is not None for p in (part.conv.weight, part.norm.weight, part.norm.bias)]
    if block.se is not None:
        parameters += [block.se.reduce.weight, block.se.reduce.bias, block.se.expand.weight, block.se.expand.bias]
    return parameters


def _device(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else nullcontext()


def _nhwc(x: Tensor) -> Tensor:
    """Return a tensor as contiguous (images, H, W, C), without a copy if it is channels_last."""
    return x.permute(0, 2, 3, 1).contiguous()


def _nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _pixels(x: Tensor) -> int:
    """Return the number of pixels of all images."""
    return x.numel() // x.shape[-1]


def _from_batch(norm: nn.BatchNorm2d) -> bool:
    return norm.training or norm.running_mean is None


class _NormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, norm: nn.BatchNorm2d, act: str | None, *parameters: Tensor) -> Tensor:
        from greedynas.gpu.kernels import norms as kernels

        y = _nhwc(y)
        ctx.batch = _from_batch(norm)
        vectors = kernels.finish_norm(norm, kernels.statistics(y) if ctx.batch else None)
        ctx.act = act
        ctx.save_for_backward(y, vectors)
        return _nchw(kernels.normalise(y, vectors, act=act))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        from greedynas.gpu.kernels import norms as kernels

        y, vectors = ctx.saved_tensors
        g = _nhwc(grad)
        part = kernels.gradient_sums(g, y, vectors, ctx.act)
        coef, weight, bias = kernels.finish_gradient(vectors, part, _pixels(y), ctx.batch)
        return _nchw(kernels.gradient_apply(g, y, vectors, coef, ctx.act)), None, None, weight, bias


class _MBConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any, *parameters: Tensor) -> Tensor:
        saved: dict[str, Tensor] = {}
        out = _forward(block, _nhwc(x), saved)
        parts = (block.expand, block.depthwise, block.project)
        ctx.batch = tuple(part is not None and _from_batch(part.norm) for part in parts)
        ctx.residual, ctx.stride = block.residual, block.depthwise.conv.stride[0]
        ctx.act = ACTS[type(block.depthwise.activation)]
        ctx.names = tuple(saved)
        ctx.save_for_backward(*saved.values())
        return _nchw(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        from greedynas.gpu import excitation
        from greedynas.gpu.kernels import depthwise_backward, pointwise_backward
        from greedynas.gpu.kernels import norms as kernels

        saved: dict[str, Tensor] = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        x, b, d, norm_b, act = saved["x"], saved["b"], saved["d"], saved["norm_b"], ctx.act
        g = _nhwc(grad)
        # From the output through the last BatchNorm: the gradient of its input is computed where it is needed.
        part = kernels.gradient_sums(g, d, saved["norm_d"])
        coef, d_weight, d_bias = kernels.finish_gradient(saved["norm_d"], part, _pixels(d), ctx.batch[2])
        se: list[Tensor] = []
        if "gate" in saved:
            gb, part, project, *se = excitation.gated_gradients(g, coef, saved, act)
        else:
            gb, part, project = pointwise_backward.narrowing(
                g, d, coef, saved["w_project"], saved["project"], b, norm_b, act
            )
        coef, b_weight, b_bias = kernels.finish_gradient(norm_b, part, _pixels(b), ctx.batch[1])
        # Through the depthwise convolution to the BatchNorm before it, or to the block's input.
        a, norm_a = saved.get("a", x), saved.get("norm_a")
        ga, part, depth = depthwise_backward.backward(
            gb, b, coef, a, saved["w_depthwise"], ctx.stride, norm_a, None if norm_a is None else act
        )
        if norm_a is None:
            dx = ga + g if ctx.residual else ga
            return _nchw(dx), None, depth, b_weight, b_bias, project, d_weight, d_bias, *se
        coef, a_weight, a_bias = kernels.finish_gradient(norm_a, part, _pixels(a), ctx.batch[0])
        dx, expand = pointwise_backward.widening(
            ga, a, coef, saved["w_expand"], saved["expand"], x, g if ctx.residual else None, _ends.get("gradient")
        )
        return (
            _nchw(dx), None, expand, a_weight, a_bias, depth, b_weight, b_bias, project, d_weight, d_bias, *se,
        )  # fmt: skip


def _forward(block: Any, x: Tensor, saved: dict[str, Tensor] | None) -> Tensor:
    """Return the block's output for x, both (images, H, W, C), and put what the backward pass needs into `saved`."""
    from greedynas.gpu import excitation
    from greedynas.gpu.kernels import depthwise, gating, pointwise
    from greedynas.gpu.kernels import norms as kernels

    expand, middle, project = block.expand, block.depthwise, block.project
    act, stride = ACTS[type(middle.activation)], middle.conv.stride[0]
    keep: dict[str, Any] = {"x": x}
    a, norm_a = x, None
    if expand is None:
        w_project = _matrix(project.conv, x)
    else:
        w_expand, w_project = _matrices(expand.conv, project.conv, x)
        a, part = pointwise.forward(x, w_expand)
        norm_a = kernels.finish_norm(expand.norm, part)
        keep.update(a=a, norm_a=norm_a, w_expand=w_expand, expand=expand.conv.weight)
    w_depthwise = middle.conv.weight
    b, part = depthwise.forward(a, w_depthwise, stride, norm_a, None if norm_a is None else act)
    norm_b = kernels.finish_norm(middle.norm, part)
    keep.update(b=b, norm_b=norm_b, w_depthwise=w_depthwise)
    if saved is None:
        keep.clear()
    del a
    gate = None
    if block.se is not None:
        squeezed = gating.image_sums(b, norm_b, act, len(b)) / (b.shape[1] * b.shape[2])
        gate, hidden, logits = excitation.excite(block.se, squeezed)
        gate = gate.to(x.dtype)
        keep.update(gate=gate, squeezed=squeezed, hidden=hidden, logits=logits)
        keep.update(w_reduce=block.se.reduce.weight, w_excite=block.se.expand.weight)
    d, part = pointwise.forward(b, w_project, norm_b, act, gate)
    norm_d = kernels.finish_norm(project.norm, part)
    keep.update(d=d, norm_d=norm_d, w_project=w_project, project=project.conv.weight)
    if saved is not None:
        saved.update(keep)
    return kernels.normalise(d, norm_d, x if block.residual else None, into=_ends.get("out"))


def _matrices(first: nn.Conv2d, second: nn.Conv2d, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of two 1x1 convolutions as matrices in the type of x, cast by one kernel."""
    from greedynas.gpu.kernels import weights

    if "cast" in first.__dict__:
        return _matrix(first, x), _matrix(second, x)
    return weights.cast(first.weight.detach(), second.weight.detach(), x.dtype)


def _matrix(conv: nn.Conv2d, x: Tensor) -> Tensor:
    cast: Tensor | None = conv.__dict__.get("cast")  # a copy that is kept up to date while graphs are recorded
    return conv.weight.detach().flatten(1).to(x.dtype) if cast is None else cast
