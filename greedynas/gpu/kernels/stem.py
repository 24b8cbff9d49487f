# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The first convolution on large images in Triton. cuDNN has no good kernel for three channels; this one gathers
patches of the float32 images and multiplies them in bf16, with BatchNorm's statistics and gradient in the same
kernels."""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from greedynas.gpu.kernels.launching import alignment, cdiv, launch, partial_moments, power_of_two, processors
from greedynas.gpu.kernels.norms import affine_row, backward_through, store_moments
from greedynas.gpu.kernels.pointwise import fold_rows, load_tile
from greedynas.gpu.kernels.weights import sum_parts

ROWS = 128  # outputs of a tile


@triton.jit
def _patches(x_ptr, tile, k, M, H, W, OH, OW, C: tl.constexpr, S: tl.constexpr, K: tl.constexpr, BM: tl.constexpr):
    """Return the patches of images (n, H, W, C) for BM outputs: (BM, taps), ordered by row, column and channel."""
    p = tile * BM + tl.arange(0, BM)[:, None]
    y = p // OW % OH * S + k // (C * K) - K // 2
    x = p % OW * S + k // C % K - K // 2
    inside = (p < M) & (k < K * K * C) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    at = (p // (OH * OW)).to(tl.int64) * (H * W * C) + (y * W + x) * C + k % C
    return tl.load(x_ptr + at, mask=inside, other=0.0)


@triton.jit
def _weight_at(n, k, by_n, by_c, by_y, by_x, C: tl.constexpr, K: tl.constexpr):
    """Return the offset of tap k of output n in the weights, for any memory layout."""
    return n * by_n + k % C * by_c + k // (C * K) * by_y + k // C % K * by_x


@triton.jit(do_not_specialize=["M", "H", "W", "OH", "OW", "NA", "by_n", "by_c", "by_y", "by_x"])
def _forward(
    x_ptr, w_ptr, y_ptr, part_ptr, M, H, W, OH, OW, NA, by_n, by_c, by_y, by_x,
    ALIGN: tl.constexpr, C: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    N = NA * ALIGN
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    r = tl.arange(0, BM)
    at = _weight_at(n[None, :], k[:, None], by_n, by_c, by_y, by_x, C, K)
    w = tl.load(w_ptr + at, mask=(n[None, :] < N) & (k[:, None] < K * K * C), other=0.0).to(y_ptr.dtype.element_ty)
    pivot = tl.zeros((BN,), tl.float32)
    count = 0.0
    total = tl.zeros((8 * WARPS, BN), tl.float32)
    square = tl.zeros((8 * WARPS, BN), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0)):
        rows = M - tile * BM
        x = _patches(x_ptr, tile, k[None, :], M, H, W, OH, OW, C, S, K, BM).to(y_ptr.dtype.element_ty)
        acc = tl.dot(x, w)
        out = tl.cast(tile, tl.int64) * BM * N + (r[:, None] * N + n[None, :])
        tl.store(y_ptr + out, acc.to(y_ptr.dtype.element_ty), mask=(r[:, None] < rows) & (n[None, :] < N))
        if tile == tl.program_id(0):
            pivot = tl.sum(acc, 0) / tl.minimum(rows, BM)  # everything beyond the last row is zero
        count += tl.minimum(rows, BM)
        y = acc - pivot[None, :]
        if rows < BM:
            y = tl.where(r[:, None] < rows, y, 0.0)
        total += fold_rows(y, BM, BN, WARPS)
        square += fold_rows(y * y, BM, BN, WARPS)
    size = tl.num_programs(0) * N
    at = tl.program_id(0) * N + n
    store_moments(part_ptr, at, size, N, count, pivot, tl.sum(total, 0), tl.sum(square, 0), n < N)


@triton.jit(do_not_specialize=["M", "H", "W", "OH", "OW", "NA", "by_n", "by_c", "by_y", "by_x"])
def _weight_gradient(
    x_ptr, g_ptr, y_ptr, norm_ptr, coef_ptr, part_ptr, M, H, W, OH, OW, NA, by_n, by_c, by_y, by_x,
    ALIGN: tl.constexpr, C: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    N = NA * ALIGN
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    r = tl.arange(0, BM)
    a = affine_row(coef_ptr, 0, N, n, n < N)[None, :]
    b = affine_row(coef_ptr, 1, N, n, n < N)[None, :]
    c0 = affine_row(coef_ptr, 2, N, n, n < N)[None, :]
    scale = affine_row(norm_ptr, 2, N, n, n < N)[None, :]
    shift = affine_row(norm_ptr, 3, N, n, n < N)[None, :]
    sums = tl.zeros((BK, BN), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * BM * N
        y = load_tile(y_ptr + first, r, n, M - tile * BM, N)
        g = load_tile(g_ptr + first, r, n, M - tile * BM, N).to(tl.float32)
        g = a * backward_through(g, y.to(tl.float32) * scale + shift, ACT) + (b * y.to(tl.float32) + c0)
        # Beyond the last row, the patches are zero.
        x = _patches(x_ptr, tile, k[None, :], M, H, W, OH, OW, C, S, K, BM).to(y.dtype)
        sums = tl.dot(tl.trans(x), g.to(y.dtype), sums)
    at = _weight_at(n[None, :], k[:, None], by_n, by_c, by_y, by_x, C, K)
    part = part_ptr + tl.program_id(0) * (N * K * K * C)
    tl.store(part + at, sums, mask=(n[None, :] < N) & (k[:, None] < K * K * C))


def _cut(x: Tensor, weight: Tensor, stride: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the number of programs, the sizes, and the constants of a tile."""
    n, height, width, channels = x.shape
    down, across, align = -(-height // stride), -(-width // stride), alignment(len(weight))
    sizes = (n * down * across, height, width, down, across, len(weight) // align, *weight.stride())
    tile = (ROWS, power_of_two(len(weight)), power_of_two(weight[0].numel()))
    programs = min(cdiv(sizes[0], ROWS), 8 * processors(x.device))
    return programs, sizes, (align, channels, stride, weight.shape[-1], *tile)


def forward(x: Tensor, weight: Tensor, stride: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the convolution of images (n, H, W, C), which is (n, OH, OW, N), and its moments."""
    programs, sizes, constants = _cut(x, weight, stride)
    y = torch.empty((len(x), *sizes[3:5], len(weight)), dtype=dtype, device=x.device)
    part = partial_moments(y, programs, len(weight))
    launch(_forward, (programs,), x, weight, y, part, *sizes, *constants, 4)
    return y, part


def weight_gradient(
    x: Tensor, g: Tensor, y: Tensor, norm: Tensor, coef: Tensor, act: str | None, weight: Tensor, stride: int
) -> Tensor:
    """Return the gradient of the weights, from that of act(BatchNorm(y))."""
    programs, sizes, constants = _cut(x, weight, stride)
    part = torch.empty((programs, weight.numel()), dtype=torch.float32, device=x.device)
    launch(_weight_gradient, (programs,), x, g, y, norm, coef, part, *sizes, *constants, act)
    return sum_parts(part, weight)


def fits(conv: Any) -> bool:
    """Return whether a patch is small enough for one step of a matrix product, and the outputs fit into one tile."""
    dense = conv.weight.is_contiguous() or conv.weight.is_contiguous(memory_format=torch.channels_last)
    shape = conv.groups == 1 and conv.padding[0] == conv.kernel_size[0] // 2 and conv.kernel_size[0] > 1
    return dense and shape and conv.weight[0].numel() <= 64 and conv.out_channels <= 64
