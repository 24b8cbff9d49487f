"""The GPU engine: blocks as single autograd functions over the fused kernels of `pointwise`, `depthwise` and `kernels`.

It sits behind the block: the same parameters, buffers and state dict, and plain PyTorch wherever it does not apply. By
default that is everywhere but on a GPU under bf16 autocast, with channels_last activations. See docs/engine.md.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from greedynas.errors import GreedyNASError

Mode = Literal["auto", "on", "off"]
MODES: tuple[Mode, ...] = ("auto", "on", "off")
ACTS: dict[type, str | None] = {nn.ReLU: "relu", nn.Hardswish: "hard_swish", type(None): None}
SHAPES = {(kernel, stride) for kernel in (3, 5, 7) for stride in (1, 2)}  # of the depthwise kernels
_mode: Mode = "auto"


def use(mode: Mode) -> None:
    """`auto`: where it applies and is fast. `off`: never. `on`: wherever its kernels can run (for tests)."""
    global _mode
    if mode not in MODES:
        raise GreedyNASError(f"unknown engine mode {mode!r}; known: {', '.join(MODES)}")
    _mode = mode


def mode() -> Mode:
    return _mode


@contextmanager
def using(mode: Mode) -> Iterator[None]:
    before = _mode
    use(mode)
    try:
        yield
    finally:
        use(before)


def applies(x: Tensor, *norms: nn.BatchNorm2d) -> bool:
    """Whether the engine takes this input, and these BatchNorms as they are set up now."""
    if _mode == "off" or (_mode == "auto" and not _fast_here(x)):
        return False
    if x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last) or torch.compiler.is_compiling():
        return False
    pixels = x.numel() // x.shape[1] if x.shape[1] else 0
    return pixels > 1 and all(norm.affine and norm.momentum is not None for norm in norms)


def takes(block: Any, x: Tensor) -> bool:
    """Whether the engine runs this MBConv block as a whole."""
    parts, conv = (
        [part for part in (block.expand, block.depthwise, block.project) if part is not None],
        block.depthwise.conv,
    )
    if not applies(x, *[part.norm for part in parts]) or (conv.kernel_size[0], conv.stride[0]) not in SHAPES:
        return False
    if not all(part.conv.weight.is_contiguous() for part in parts):
        return False
    return x.shape[0] * -(-x.shape[2] // 2) * -(-x.shape[3] // 2) > 1  # one value a channel has no variance


def _fast_here(x: Tensor) -> bool:
    if not (x.is_cuda and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.bfloat16):
        return False
    return _has_triton() and torch.cuda.get_device_capability(x.device) >= (8, 0)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def norm_act(y: Tensor, norm: nn.BatchNorm2d, activation: nn.Module | None) -> Tensor:
    """BatchNorm and activation of a convolution's output."""
    with _device(y):
        return _NormAct.apply(y, norm, ACTS[type(activation)], norm.weight, norm.bias)  # type: ignore[no-any-return]


def mbconv(block: Any, x: Tensor) -> Tensor:
    """A whole MBConv block."""
    parts = [block.expand, block.depthwise, block.project]
    parameters = [p for part in parts if part is not None for p in (part.conv.weight, part.norm.weight, part.norm.bias)]
    if block.se is not None:
        parameters += [block.se.reduce.weight, block.se.reduce.bias, block.se.expand.weight, block.se.expand.bias]
    if x.is_cuda:
        x = x.to(torch.bfloat16)
    with _device(x):
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *parameters)):
            return _MBConv.apply(x, block, *parameters)  # type: ignore[no-any-return]
        return _nchw(_forward(block, _nhwc(x), None))


def _device(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _nhwc(x: Tensor) -> Tensor:
    """(images, H, W, C), contiguous; no copy of a channels_last tensor."""
    return x.permute(0, 2, 3, 1).contiguous()


def _nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _like(grad: Tensor, weight: Tensor) -> Tensor:
    """A weight's gradient in the very layout of the weight: then neither autograd nor the optimizer has to copy it."""
    return grad.as_strided(weight.shape, weight.stride())


def _from_batch(norm: nn.BatchNorm2d) -> bool:
    return norm.training or norm.running_mean is None


class _NormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, norm: nn.BatchNorm2d, act: str | None, *parameters: Tensor) -> Tensor:
        from greedynas import kernels

        y = _nhwc(y)
        rows = _rows(y)
        ctx.batch = _from_batch(norm)
        vectors = kernels.finish_norm(norm, kernels.statistics(rows) if ctx.batch else norm.weight[None])
        ctx.act = act
        ctx.save_for_backward(y, vectors)
        return _nchw(kernels.normalise(rows, vectors, act=act).view_as(y))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        from greedynas import kernels

        y, vectors = ctx.saved_tensors
        g, rows = _rows(_nhwc(grad)), _rows(y)
        part = kernels.gradient_sums(g, rows, vectors, ctx.act)
        coef, weight, bias = kernels.finish_gradient(vectors, part, len(rows), ctx.batch)
        out = kernels.gradient_apply(g, rows, vectors, coef, ctx.act)
        return _nchw(out.view_as(y)), None, None, weight, bias


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
        from greedynas import depthwise_backward, gating, kernels, pointwise

        saved: dict[str, Tensor] = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        x, b, d, gate = saved["x"], saved["b"], saved["d"], saved.get("gate")
        g, act = _rows(_nhwc(grad)), ctx.act
        # From the output through the last BatchNorm: its input's gradient is formed where it is needed.
        part = kernels.gradient_sums(g, d, saved["norm_d"])
        coef, d_weight, d_bias = kernels.finish_gradient(saved["norm_d"], part, len(d), ctx.batch[2])
        project = pointwise.weight_gradient(g, d, coef, _rows(b), saved["norm_b"], act, gate)
        project = _like(project, saved["project"])
        se: tuple[Tensor, ...] = ()
        if gate is None:
            gb, part = pointwise.input_gradient(
                g, d, coef, saved["w_project"], x=_rows(b), before=saved["norm_b"], act=act
            )
        else:
            gb, _ = pointwise.input_gradient(g, d, coef, saved["w_project"])
            gate_grad = gating.image_sums(_rows(b), saved["norm_b"], act, len(b), gb)
            squeeze_grad, *se_grads = _excite_gradient(gate_grad, saved)
            se = tuple(se_grads)
            squeeze_grad = squeeze_grad / (b.shape[1] * b.shape[2])
            part = gating.gate_gradient(gb, gate, squeeze_grad, _rows(b), saved["norm_b"], act)
        coef, b_weight, b_bias = kernels.finish_gradient(saved["norm_b"], part, len(gb), ctx.batch[1])
        # Through the depthwise convolution to the BatchNorm before it, or to the block's input.
        a: Tensor = saved.get("a", x)
        norm_a = saved.get("norm_a")
        ga, part, depth = depthwise_backward.backward(
            gb.view_as(b), b, coef, a, saved["w_depthwise"], ctx.stride, norm_a, None if norm_a is None else act
        )
        depth = _like(depth, saved["w_depthwise"])
        if norm_a is None:
            dx = ga + g.view_as(ga) if ctx.residual else ga
            return _nchw(dx), None, depth, b_weight, b_bias, project, d_weight, d_bias, *se
        coef, a_weight, a_bias = kernels.finish_gradient(norm_a, part, len(_rows(a)), ctx.batch[0])
        expand = _like(pointwise.weight_gradient(_rows(ga), _rows(a), coef, _rows(x)), saved["expand"])
        dx, _ = pointwise.input_gradient(
            _rows(ga), _rows(a), coef, saved["w_expand"], add=g if ctx.residual else None
        )  # fmt: skip
        return (
            _nchw(dx.view_as(x)), None, expand, a_weight, a_bias, depth, b_weight, b_bias,
            project, d_weight, d_bias, *se,
        )  # fmt: skip


def _forward(block: Any, x: Tensor, saved: dict[str, Tensor] | None) -> Tensor:
    """The block's output, x and it (images, H, W, C); what the backward pass needs goes into `saved`."""
    from greedynas import depthwise, gating, kernels, pointwise

    act, stride = ACTS[type(block.depthwise.activation)], block.depthwise.conv.stride[0]
    keep: dict[str, Any] = {"x": x}
    a, norm_a = x, None
    if block.expand is not None:
        w_expand = _matrix(block.expand.conv, x)
        rows, part = pointwise.forward(_rows(x), w_expand)
        norm_a = kernels.finish_norm(block.expand.norm, part)
        a = rows.view(*x.shape[:3], -1)
        keep.update(a=a, norm_a=norm_a, w_expand=w_expand, expand=block.expand.conv.weight)
        del rows
    w_depthwise = block.depthwise.conv.weight
    b, part = depthwise.forward(a, w_depthwise, stride, norm_a, None if norm_a is None else act)
    norm_b = kernels.finish_norm(block.depthwise.norm, part)
    keep.update(b=b, norm_b=norm_b, w_depthwise=w_depthwise)
    if saved is None:
        keep.clear()
    del a
    gate = None
    if block.se is not None:
        squeezed = gating.image_sums(_rows(b), norm_b, act, len(b)) / (b.shape[1] * b.shape[2])
        gate, hidden, logits = _excite(block.se, squeezed)
        gate = gate.to(x.dtype)
        keep.update(gate=gate, squeezed=squeezed, hidden=hidden, logits=logits)
        keep.update(w_reduce=block.se.reduce.weight, w_excite=block.se.expand.weight)
    w_project = _matrix(block.project.conv, x)
    d, part = pointwise.forward(_rows(b), w_project, norm_b, act, gate)
    norm_d = kernels.finish_norm(block.project.norm, part)
    keep.update(d=d, norm_d=norm_d, w_project=w_project, project=block.project.conv.weight)
    out = kernels.normalise(d, norm_d, _rows(x) if block.residual else None)
    if saved is not None:
        saved.update(keep)
    return out.view(*b.shape[:3], -1)


def _matrix(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return conv.weight.detach().flatten(1).to(x.dtype)


def _excite(se: Any, squeezed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gate (images, C) in float32, and what its gradient needs."""
    with torch.autocast(squeezed.device.type, enabled=False):
        hidden = nn.functional.linear(squeezed, se.reduce.weight.flatten(1), se.reduce.bias)
        logits = nn.functional.linear(nn.functional.hardswish(hidden), se.expand.weight.flatten(1), se.expand.bias)
        return nn.functional.hardsigmoid(logits), hidden, logits


def _excite_gradient(grad: Tensor, saved: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Gradients of the squeezed activations and of the four parameters of SqueezeExcite."""
    w_reduce, w_excite, hidden = saved["w_reduce"], saved["w_excite"], saved["hidden"]
    with torch.autocast(grad.device.type, enabled=False):
        logits = torch.ops.aten.hardsigmoid_backward(grad, saved["logits"])
        inner = torch.ops.aten.hardswish_backward(logits @ w_excite.flatten(1), hidden)
        return (
            inner @ w_reduce.flatten(1),
            _like(inner.t() @ saved["squeezed"], w_reduce),
            inner.sum(0),
            _like(logits.t() @ nn.functional.hardswish(hidden), w_excite),
            logits.sum(0),
        )


def warm_up(space: Any, batch: int, device: torch.device | str = "cuda", training: bool = True) -> None:
    """Compile and load every kernel that a space needs for such batches, so that no path has to wait for one.

    Kernels are compiled in threads and stay in Triton's cache on disk; the second start takes seconds.
    """
    from greedynas.blocks import initialise, make_block

    blocks = []
    for layer in {*space.stem_layers, *space.layers, *space.head_layers}:
        for op in layer.ops:
            if not layer.is_nothing(op):
                blocks.append((make_block(op, layer, space.activation), layer))
    device = torch.device(device)
    for dry in (True, False):
        with _compiling() if dry else nullcontext():
            for block, layer in blocks:
                if not dry:
                    initialise(block)
                block.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
                _try_out(block, layer, batch, device, training)
                if not dry:
                    block.to("meta")
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _try_out(block: nn.Module, layer: Any, batch: int, device: torch.device, training: bool) -> None:
    shape = (batch, layer.in_channels, layer.in_size, layer.in_size)
    x = torch.zeros(shape, device=device, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    with torch.autocast(device.type, torch.bfloat16), torch.set_grad_enabled(training):
        out = block(x.requires_grad_(training))
    if training:
        out.backward(torch.zeros_like(out))
        block.zero_grad()


@contextmanager
def _compiling() -> Iterator[None]:
    """Kernels are compiled in the background instead of being run; at the end all are ready."""
    import triton  # type: ignore[import-untyped]

    from greedynas.launching import Dry

    Dry.on = True
    try:
        # The mode belongs to this thread, so the backward pass has to stay in it.
        with (
            torch.autograd.set_multithreading_enabled(False),
            ThreadPoolExecutor() as pool,
            triton.AsyncCompileMode(pool),
        ):
            yield
    finally:
        Dry.on = False
