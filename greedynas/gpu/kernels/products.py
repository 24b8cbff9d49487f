# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""1x1 convolutions whose tensors fit into the GPU's cache: the library's matrix products, and separate passes over the
tensors. `pointwise.py` saves these passes by its own products, which are slower; that is faster where memory is the
bottleneck.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from greedynas.gpu.kernels import norms
from greedynas.gpu.kernels.launching import alignment, cdiv, launch, partial_sums
from greedynas.gpu.kernels.norms import (
    activate,
    affine_row,
    backward_through,
    columns,
    row_programs,
    size,
    store_sums,
    tile_of_rows,
)

# Bytes of the wide tensor up to which this was faster on an H200 (60 MB of cache).
FORWARD = 64e6
BACKWARD = 32e6
NARROWEST = 128  # channels of the other tensor: with fewer, `pointwise` is not slower


def forward_fits(x: Tensor, w: Tensor) -> bool:
    (M, K), N = size(x), len(w)
    return min(K, N) >= NARROWEST and 2 * M * max(K, N) <= FORWARD


def backward_fits(g: Tensor, x: Tensor) -> bool:
    (M, K), N = size(g), x.shape[-1]
    return min(K, N) >= NARROWEST and 2 * M * max(K, N) <= BACKWARD


@triton.jit(do_not_specialize=["M", "CA"])
def _through(
    g_ptr, y_ptr, norm_ptr, act_ptr, part_ptr, M, CA,
    ALIGN: tl.constexpr, ACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Replace the gradient of act(z) by that of z, with BatchNorm's sums, and compute act(z)."""
    C = CA * ALIGN
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean = affine_row(norm_ptr, 0, C, c, c < C)[None, :]
    scale = affine_row(norm_ptr, 2, C, c, c < C)[None, :]
    shift = affine_row(norm_ptr, 3, C, c, c < C)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(M, BLOCK_R), tl.num_programs(1)):
        at, inside = tile_of_rows(tile, c, M, C, BLOCK_R)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        z = y * scale + shift
        g = backward_through(g, z, ACT)
        total += g
        product += g * (y - mean)
        tl.store(g_ptr + at, g.to(g_ptr.dtype.element_ty), mask=inside)
        tl.store(act_ptr + at, activate(z, ACT).to(act_ptr.dtype.element_ty), mask=inside)
    store_sums(part_ptr, C, c, total, product)


def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return x @ w.T and its moments."""
    y = torch.mm(_rows(x), w.flatten(1).t()).view(*x.shape[:-1], len(w))
    return y, norms.statistics(y)


def narrowing(
    g: Tensor, y: Tensor, coef: Tensor, w: Tensor, weight: Tensor, x: Tensor, before: Tensor, act: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `pointwise_backward.narrowing`."""
    M, C = size(x)
    dy = _rows(norms.gradient_apply(g, y, before, coef))  # without an activation, `before` is not used
    out, activated = torch.mm(dy, w.flatten(1)).view(x.shape), torch.empty_like(x)
    block_c, align = columns(C), alignment(C)
    block_r = 2048 // block_c
    programs = row_programs(x, block_r, block_c)
    part = partial_sums(x, programs, C)
    launch(
        _through, (cdiv(C, block_c), programs), out, x, before, activated, part, M, C // align,
        align, act, block_r, block_c,
    )  # fmt: skip
    return out, part, _weight_gradient(dy, activated, weight)


def widening(
    g: Tensor, y: Tensor, coef: Tensor, w: Tensor, weight: Tensor, x: Tensor, add: Tensor | None, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the same as `pointwise_backward.widening`."""
    dy = _rows(
        norms.gradient_apply(g, y, coef, coef)
    )  # `norm` is not used without an activation, but its rows are read
    out = torch.empty_like(x) if into is None else into
    if add is None:
        torch.mm(dy, w.flatten(1), out=_rows(out))
    else:
        torch.addmm(_rows(add), dy, w.flatten(1), out=_rows(out))
    return out, _weight_gradient(dy, x, weight)


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight in float32 and in the memory layout of the weight."""
    dy, x = dy.t(), _rows(x)
    grad = torch.mm(dy, x, out_dtype=torch.float32) if dy.dtype == torch.bfloat16 else torch.mm(dy, x)
    return grad.as_strided(weight.shape, weight.stride())


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])
