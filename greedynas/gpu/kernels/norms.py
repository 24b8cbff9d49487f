# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton kernels for BatchNorm and activations on NHWC tensors, seen as matrices of (pixels of all images, channels).

Tensors are bf16 (any float type in Triton's interpreter), statistics and sums are float32. Reductions have two stages:
one by many programs, and one over their results in a fixed order, so results do not depend on timing. Variances are
pooled as by Chan, Golub and LeVeque, from counts, means and sums of squares around them, which is also exact if a mean
is far from zero.

A BatchNorm is four vectors, the rows of `norm`: mean, 1 / standard deviation, scale and shift, with z = y * scale + shift.
Its gradient is affine in the gradient g of z and in the input y: dy = a * g + b * y + c, the rows of `coef`. Both are the first
rows of the tensor that holds the parts they are computed from, which saves an allocation.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import BatchNorm2d

from greedynas.gpu.kernels.launching import (
    alignment,
    cdiv,
    launch,
    partial_moments,
    partial_sums,
    power_of_two,
    processors,
)

MEAN, INVERSE, SCALE, SHIFT = range(4)


@triton.jit
def activate(z, ACT: tl.constexpr):
    """Return the activation of z. NaN stays NaN, so that a diverged training is noticed."""
    if ACT == "relu":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "hard_swish":
        gate = tl.maximum(z * (1.0 / 6.0) + 0.5, 0.0, propagate_nan=tl.PropagateNan.ALL)
        z = z * tl.minimum(gate, 1.0, propagate_nan=tl.PropagateNan.ALL)
    return z


@triton.jit
def backward_through(g, z, ACT: tl.constexpr):
    """Return the gradient of z, from that of activate(z)."""
    if ACT == "relu":
        g = tl.where(z > 0.0, g, 0.0)
    elif ACT == "hard_swish":
        g = tl.where(z < -3.0, 0.0, tl.where(z > 3.0, g, g * (z * (1.0 / 3.0) + 0.5)))
    return g


@triton.jit
def affine_row(rows_ptr, row: tl.constexpr, C, c, inside):
    """Return one of the vectors of `norm` or `coef`."""
    return tl.load(rows_ptr + row * C + c, mask=inside, other=0.0)


@triton.jit
def tile_of_rows(tile, c, M, C, BLOCK_R: tl.constexpr):
    """Return the offsets of the elements of BLOCK_R rows in a matrix (M, C), and the mask of those that exist."""
    r = tl.arange(0, BLOCK_R)[:, None]
    inside = (r < M - tile * BLOCK_R) & (c < C)[None, :]
    return tl.cast(tile, tl.int64) * BLOCK_R * C + (r * C + c[None, :]), inside


@triton.jit
def store_sums(part_ptr, C, c, total, product):
    """Store both sums of a gradient by this program, whose part is its index on the second axis of the grid."""
    part = part_ptr + (3 + tl.program_id(1)) * C + c
    tl.store(part, tl.sum(total, 0), mask=c < C)
    tl.store(part + tl.num_programs(1) * C, tl.sum(product, 0), mask=c < C)


@triton.jit
def store_moments(part_ptr, at, size, C, count, pivot, total, square, mask):
    """Store count, mean and squared deviations, computed from sums around a pivot."""
    part_ptr += 4 * C
    away = total / count
    tl.store(part_ptr + at, count + tl.zeros_like(away), mask=mask)
    tl.store(part_ptr + size + at, pivot + away, mask=mask)
    tl.store(part_ptr + 2 * size + at, square - total * away, mask=mask)


@triton.jit
def _pooled(part_ptr, R, C, c, inside, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the overall count, mean and variance, from those of R parts."""
    part_ptr += 4 * C
    pivot = tl.load(part_ptr + R * C + c, mask=inside, other=0.0)
    counts = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    square = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, R, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)[:, None]
        here = (r < R) & inside[None, :]
        count = tl.load(part_ptr + r * C + c[None, :], mask=here, other=0.0)
        away = tl.load(part_ptr + (R + r) * C + c[None, :], mask=here, other=0.0) - pivot[None, :]
        counts += count
        total += count * away
        square += count * away * away + tl.load(part_ptr + (2 * R + r) * C + c[None, :], mask=here, other=0.0)
    count = tl.maximum(tl.sum(counts, 0), 1.0)
    away = tl.sum(total, 0) / count
    return count, pivot + away, tl.sum(square, 0) / count - away * away


@triton.jit
def _totals(part_ptr, R, C, c, inside, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return both sums of a gradient, over R rows of partial sums."""
    part_ptr += 3 * C
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, R, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)[:, None]
        here = (r < R) & inside[None, :]
        first += tl.load(part_ptr + r * C + c[None, :], mask=here, other=0.0)
        second += tl.load(part_ptr + (R + r) * C + c[None, :], mask=here, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit(do_not_specialize=["R", "C"])
def _finish_norm(
    norm_ptr, gamma_ptr, beta_ptr, mean_ptr, var_ptr, tracked_ptr, R, C, momentum, eps,
    BATCH: tl.constexpr, TRACK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < C
    if BATCH:
        count, mean, var = _pooled(norm_ptr, R, C, c, inside, BLOCK_R, BLOCK_C)
        var = tl.maximum(var, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        mean = tl.load(mean_ptr + c, mask=inside, other=0.0)
        var = tl.load(var_ptr + c, mask=inside, other=1.0)
    if TRACK:
        old_mean = tl.load(mean_ptr + c, mask=inside, other=0.0)
        old_var = tl.load(var_ptr + c, mask=inside, other=0.0)
        unbiased = var * (count / tl.maximum(count - 1.0, 1.0))
        tl.store(mean_ptr + c, old_mean + momentum * (mean - old_mean), mask=inside)
        tl.store(var_ptr + c, old_var + momentum * (unbiased - old_var), mask=inside)
        if tl.program_id(0) == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)
    inverse = 1.0 / tl.sqrt_rn(var + eps)
    scale = tl.load(gamma_ptr + c, mask=inside, other=0.0) * inverse
    shift = tl.load(beta_ptr + c, mask=inside, other=0.0) - mean * scale
    tl.store(norm_ptr + c, mean, mask=inside)
    tl.store(norm_ptr + C + c, inverse, mask=inside)
    tl.store(norm_ptr + 2 * C + c, scale, mask=inside)
    tl.store(norm_ptr + 3 * C + c, shift, mask=inside)


@triton.jit(do_not_specialize=["R", "C", "count"])
def _finish_gradient(
    coef_ptr, norm_ptr, gamma_grad_ptr, beta_grad_ptr, R, C, count,
    BATCH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < C
    mean = tl.load(norm_ptr + c, mask=inside, other=0.0)
    inverse = tl.load(norm_ptr + C + c, mask=inside, other=0.0)
    scale = tl.load(norm_ptr + 2 * C + c, mask=inside, other=0.0)
    total, product = _totals(coef_ptr, R, C, c, inside, BLOCK_R, BLOCK_C)
    product *= inverse
    b = -scale * inverse * product / count if BATCH else tl.zeros_like(scale)
    c0 = -scale * total / count - b * mean if BATCH else tl.zeros_like(scale)
    tl.store(gamma_grad_ptr + c, product, mask=inside)
    tl.store(beta_grad_ptr + c, total, mask=inside)
    tl.store(coef_ptr + c, scale, mask=inside)
    tl.store(coef_ptr + C + c, b, mask=inside)
    tl.store(coef_ptr + 2 * C + c, c0, mask=inside)


@triton.jit(do_not_specialize=["M", "CA"])
def _statistics(y_ptr, part_ptr, M, CA, ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    C = CA * ALIGN
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1).to(tl.int64) * BLOCK_R
    pivot = tl.load(y_ptr + first * C + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    square = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    count = 0.0
    for tile in range(tl.program_id(1), tl.cdiv(M, BLOCK_R), tl.num_programs(1)):
        at, inside = tile_of_rows(tile, c, M, C, BLOCK_R)
        y = tl.load(y_ptr + at, mask=inside, other=0.0)
        y = tl.where(inside, y.to(tl.float32) - pivot[None, :], 0.0)
        total += y
        square += y * y
        count += tl.minimum(M - tile * BLOCK_R, BLOCK_R)
    at = tl.program_id(1) * C + c
    store_moments(part_ptr, at, tl.num_programs(1) * C, C, count, pivot, tl.sum(total, 0), tl.sum(square, 0), c < C)


@triton.jit(do_not_specialize=["M", "CA"])
def _normalise(
    y_ptr, norm_ptr, residual_ptr, out_ptr, M, CA,
    ALIGN: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = CA * ALIGN
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    at, inside = tile_of_rows(tl.program_id(0), c, M, C, BLOCK_R)
    z = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    z = z * affine_row(norm_ptr, 2, C, c, c < C)[None, :] + affine_row(norm_ptr, 3, C, c, c < C)[None, :]
    if RESIDUAL:
        z += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, activate(z, ACT).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "CA"])
def _gradient_sums(
    g_ptr, y_ptr, norm_ptr, part_ptr, M, CA,
    ALIGN: tl.constexpr, ACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
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
        g = backward_through(g, y * scale + shift, ACT)
        total += g
        product += g * (y - mean)
    store_sums(part_ptr, C, c, total, product)


@triton.jit(do_not_specialize=["M", "CA"])
def _gradient_apply(
    g_ptr, y_ptr, norm_ptr, coef_ptr, out_ptr, M, CA,
    ALIGN: tl.constexpr, ACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = CA * ALIGN
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    at, inside = tile_of_rows(tl.program_id(0), c, M, C, BLOCK_R)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    z = y * affine_row(norm_ptr, 2, C, c, c < C)[None, :] + affine_row(norm_ptr, 3, C, c, c < C)[None, :]
    out = affine_row(coef_ptr, 0, C, c, c < C)[None, :] * backward_through(g, z, ACT)
    out += affine_row(coef_ptr, 1, C, c, c < C)[None, :] * y + affine_row(coef_ptr, 2, C, c, c < C)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


# Launchers. Tensors are (..., C), seen as matrices (M, C); for a tensor that a kernel does not read, any pointer is
# passed.


def size(y: Tensor) -> tuple[int, int]:
    """Return M and C."""
    C = y.shape[-1]
    return y.numel() // C, C


def columns(channels: int) -> int:
    """Return the number of channels of one program: all of them up to 128, else pieces of 64."""
    return power_of_two(channels) if channels <= 128 else 64


def row_programs(y: Tensor, block_r: int, block_c: int) -> int:
    M, C = size(y)
    return max(1, min(cdiv(M, block_r), 8 * processors(y.device) // cdiv(C, block_c)))


def statistics(y: Tensor) -> Tensor:
    """Return the moments of parts of y, for `finish_norm`."""
    M, C = size(y)
    block_c, align = columns(C), alignment(C)
    block_r = 2048 // block_c
    programs = row_programs(y, block_r, block_c)
    part = partial_moments(y, programs, C)
    launch(_statistics, (cdiv(C, block_c), programs), y, part, M, C // align, align, block_r, block_c)
    return part


def finish_norm(norm: BatchNorm2d, part: Tensor | None) -> Tensor:
    """Return mean, 1/std, scale and shift, from the moments of parts or (without parts) from the running statistics.

    The mode of `norm` decides which of them; running statistics are updated exactly as by BatchNorm2d.
    """
    weight, mean, var = norm.weight, norm.running_mean, norm.running_var
    batch = norm.training or mean is None
    track = norm.training and norm.track_running_stats and mean is not None
    C = norm.num_features
    out = weight.new_empty((4, C), dtype=torch.float32) if part is None else part
    launch(
        _finish_norm, (cdiv(C, 8),), out, weight, norm.bias, weight if mean is None else mean,
        weight if var is None else var, norm.num_batches_tracked if track else weight,
        (out.shape[0] - 4) // 3, C, float(norm.momentum or 0.0), norm.eps, batch, track, 512, 8, num_warps=8,
    )  # fmt: skip
    return out


def finish_gradient(norm: Tensor, part: Tensor, count: int, batch: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coefficients of the input's gradient, and the gradients of BatchNorm's weight and bias."""
    rows, C = part.shape
    gamma, beta = part.new_empty(C), part.new_empty(C)
    launch(
        _finish_gradient, (cdiv(C, 8),), part, norm, gamma, beta,
        (rows - 3) // 2, C, float(count), batch, 512, 8, num_warps=8,
    )  # fmt: skip
    return part, gamma, beta


def normalise(
    y: Tensor, norm: Tensor, residual: Tensor | None = None, act: str | None = None, into: Tensor | None = None
) -> Tensor:
    """Return act(y * scale + shift + residual)."""
    M, C = size(y)
    block_c, align = columns(C), alignment(C)
    block_r, out = 4096 // block_c, torch.empty_like(y) if into is None else into
    launch(
        _normalise, (cdiv(M, block_r), cdiv(C, block_c)), y, norm, y if residual is None else residual, out,
        M, C // align, align, residual is not None, act, block_r, block_c,
    )  # fmt: skip
    return out


def gradient_sums(g: Tensor, y: Tensor, norm: Tensor, act: str | None = None) -> Tensor:
    """Return partial sums of the gradient of z and of its product with y - mean, from the gradient of act(z)."""
    M, C = size(y)
    block_c, align = columns(C), alignment(C)
    block_r = 2048 // block_c
    programs = row_programs(y, block_r, block_c)
    part, grid = partial_sums(y, programs, C), (cdiv(C, block_c), programs)
    launch(_gradient_sums, grid, g, y, norm, part, M, C // align, align, act, block_r, block_c)
    return part


def gradient_apply(g: Tensor, y: Tensor, norm: Tensor, coef: Tensor, act: str | None = None) -> Tensor:
    """Return the gradient of y, from that of act(z)."""
    M, C = size(y)
    block_c, align = columns(C), alignment(C)
    block_r, out = 4096 // block_c, torch.empty_like(y)
    grid = (cdiv(M, block_r), cdiv(C, block_c))
    launch(_gradient_apply, grid, g, y, norm, coef, out, M, C // align, align, act, block_r, block_c)
    return out
