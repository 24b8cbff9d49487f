# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""1x1 convolutions as matrix products in Triton, with BatchNorm and activation folded into their loads and stores.

They are bound by memory, so the number of times that a tensor is read matters: the forward pass computes the statistics
of its output while it is in registers, and the gradients are computed from the raw activations on load (see
`norms.py`).
"""

from dataclasses import dataclass
from functools import cache, cached_property

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from greedynas.gpu.kernels import products
from greedynas.gpu.kernels.launching import (
    alignment,
    cdiv,
    launch,
    partial_moments,
    partial_sums,
    power_of_two,
    processors,
)
from greedynas.gpu.kernels.norms import activate, affine_row, backward_through, size, store_moments, store_sums
from greedynas.gpu.kernels.weights import sum_parts


@triton.jit
def fold_rows(x, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """Sum the rows that one thread holds in the tensor cores' layout: (BM, BN) -> (8 * WARPS, BN), without shuffles."""
    x = tl.reshape(x, (BM // (16 * WARPS), WARPS, 2, 8, BN))
    return tl.reshape(tl.sum(tl.sum(x, 2), 0), (8 * WARPS, BN))


@triton.jit
def fold_loaded(x, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):
    """Sum in the same way for the layout of 16-byte loads, with which the program loads ROWS rows at a time."""
    return tl.sum(tl.reshape(x, (BM // ROWS, ROWS, BN)), 0)


@triton.jit
def load_tile(ptr, r, c, rows, C):
    return tl.load(ptr + r[:, None] * C + c[None, :], mask=(r[:, None] < rows) & (c[None, :] < C), other=0.0)


@triton.jit
def _normalised(x_ptr, norm_ptr, gate_ptr, first, r, c, rows, C, pixels, NORM: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """Return a tile of activations: as stored, or act(BatchNorm(x)), times the gate of its image and channel."""
    x = load_tile(x_ptr, r, c, rows, C)
    if NORM:
        scale = affine_row(norm_ptr, 2, C, c, c < C)
        shift = affine_row(norm_ptr, 3, C, c, c < C)
        z = activate(x.to(tl.float32) * scale[None, :] + shift[None, :], ACT)
        if GATE:
            image = (first + r) // pixels
            inside = (r[:, None] < rows) & (c[None, :] < C)
            z *= tl.load(gate_ptr + image[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        x = z.to(x.dtype)
    return x


@triton.jit
def gradient_tile(g_ptr, y_ptr, coef_ptr, r, c, rows, C):
    """Return a tile of the gradient of BatchNorm's input."""
    g = load_tile(g_ptr, r, c, rows, C)
    y = load_tile(y_ptr, r, c, rows, C)
    out = (
        y.to(tl.float32) * affine_row(coef_ptr, 1, C, c, c < C)[None, :] + affine_row(coef_ptr, 2, C, c, c < C)[None, :]
    )
    out = g.to(tl.float32) * affine_row(coef_ptr, 0, C, c, c < C)[None, :] + out
    return out.to(g.dtype)


@triton.jit(do_not_specialize=["M", "KA", "NA", "pixels"])
def _forward(
    x_ptr, norm_ptr, gate_ptr, w_ptr, y_ptr, part_ptr, M, KA, NA, pixels,
    ALIGN: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr, ONE_STEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    K = KA * ALIGN
    N = NA * ALIGN
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    r = tl.arange(0, BM)
    pivot = tl.zeros((BN,), tl.float32)
    count = 0.0
    total = tl.zeros((8 * WARPS, BN), tl.float32)
    square = tl.zeros((8 * WARPS, BN), tl.float32)
    if ONE_STEP:
        w = tl.load(w_ptr + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
    for tile in range(tl.program_id(1), tl.cdiv(M, BM), tl.num_programs(1)):
        first = tl.cast(tile, tl.int64) * BM
        rows = M - tile * BM
        if ONE_STEP:
            x = _normalised(x_ptr + first * K, norm_ptr, gate_ptr, tile * BM, r, k, rows, K, pixels, NORM, GATE, ACT)
            acc = tl.dot(x, w)
        else:
            acc = tl.zeros((BM, BN), tl.float32)
            for start in range(0, K, BK):
                c = start + k
                x = _normalised(
                    x_ptr + first * K, norm_ptr, gate_ptr, tile * BM, r, c, rows, K, pixels, NORM, GATE, ACT
                )
                w = tl.load(w_ptr + n[None, :] * K + c[:, None], mask=(n[None, :] < N) & (c[:, None] < K), other=0.0)
                acc = tl.dot(x, w, acc)
        inside = (r[:, None] < rows) & (n[None, :] < N)
        tl.store(y_ptr + first * N + (r[:, None] * N + n[None, :]), acc.to(y_ptr.dtype.element_ty), mask=inside)
        if tile == tl.program_id(1):
            pivot = tl.sum(tl.where(r[:, None] < rows, acc, 0.0), 0) / tl.minimum(rows, BM)
        count += tl.minimum(rows, BM)
        y = acc - pivot[None, :]
        if rows < BM:
            y = tl.where(r[:, None] < rows, y, 0.0)
        total += fold_rows(y, BM, BN, WARPS)
        square += fold_rows(y * y, BM, BN, WARPS)
    at = tl.program_id(1) * N + n
    store_moments(part_ptr, at, tl.num_programs(1) * N, N, count, pivot, tl.sum(total, 0), tl.sum(square, 0), n < N)


@triton.jit(do_not_specialize=["M", "KA", "NA"])
def _input_gradient(
    g_ptr, y_ptr, coef_ptr, w_ptr, x_ptr, norm_ptr, out_ptr, part_ptr, M, KA, NA,
    ALIGN: tl.constexpr, END: tl.constexpr, ACT: tl.constexpr, ONE_STEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute (M, K) @ (K, N), where K are the channels of the convolution's output.

    END: "norm" propagates it through the activation to the BatchNorm before and computes its sums, "add" adds x, "none"
    only stores it.
    """
    K = KA * ALIGN
    N = NA * ALIGN
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    r = tl.arange(0, BM)
    if END == "norm":
        mean = affine_row(norm_ptr, 0, N, n, n < N)[None, :]
        scale = affine_row(norm_ptr, 2, N, n, n < N)[None, :]
        shift = affine_row(norm_ptr, 3, N, n, n < N)[None, :]
        ROWS: tl.constexpr = 256 * WARPS // BN if 256 * WARPS // BN < BM else BM
        total = tl.zeros((ROWS, BN), tl.float32)
        product = tl.zeros((ROWS, BN), tl.float32)
    if ONE_STEP:
        w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
    for tile in range(tl.program_id(1), tl.cdiv(M, BM), tl.num_programs(1)):
        first = tl.cast(tile, tl.int64) * BM
        rows = M - tile * BM
        if ONE_STEP:
            acc = tl.dot(gradient_tile(g_ptr + first * K, y_ptr + first * K, coef_ptr, r, k, rows, K), w)
        else:
            acc = tl.zeros((BM, BN), tl.float32)
            for start in range(0, K, BK):
                c = start + k
                g = gradient_tile(g_ptr + first * K, y_ptr + first * K, coef_ptr, r, c, rows, K)
                w = tl.load(w_ptr + c[:, None] * N + n[None, :], mask=(n[None, :] < N) & (c[:, None] < K), other=0.0)
                acc = tl.dot(g, w, acc)
        inside = (r[:, None] < rows) & (n[None, :] < N)
        at = first * N + (r[:, None] * N + n[None, :])
        if END == "norm":
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
            acc = backward_through(acc, x * scale + shift, ACT)
            if rows < BM:
                acc = tl.where(r[:, None] < rows, acc, 0.0)
            total += fold_loaded(acc, BM, BN, ROWS)
            product += fold_loaded(acc * (x - mean), BM, BN, ROWS)
        elif END == "add":
            acc += tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    if END == "norm":
        store_sums(part_ptr, N, n, total, product)


@triton.jit(do_not_specialize=["M", "KA", "NA", "pixels", "tiles"])
def _weight_gradient(
    x_ptr, norm_ptr, gate_ptr, g_ptr, y_ptr, coef_ptr, part_ptr, M, KA, NA, pixels, tiles,
    ALIGN: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr, GROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute gradient (N, M) @ input (M, K). The wider of N and K is the left side: N if the layer GROWS."""
    K = KA * ALIGN
    N = NA * ALIGN
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    r = tl.arange(0, BM)
    acc = tl.zeros((BN, BK), tl.float32) if GROWS else tl.zeros((BK, BN), tl.float32)
    start = tl.program_id(2) * tiles
    for tile in range(start, tl.minimum(start + tiles, tl.cdiv(M, BM))):
        first = tl.cast(tile, tl.int64) * BM
        rows = M - tile * BM
        x = _normalised(x_ptr + first * K, norm_ptr, gate_ptr, tile * BM, r, k, rows, K, pixels, NORM, GATE, ACT)
        g = gradient_tile(g_ptr + first * N, y_ptr + first * N, coef_ptr, r, n, rows, N)
        if rows < BM:  # beyond the last row, both sides are constant, not zero
            g = tl.where(r[:, None] < rows, g, 0.0)
        acc = tl.dot(tl.trans(g), x, acc) if GROWS else tl.dot(tl.trans(x), g, acc)
    part = part_ptr + tl.program_id(2).to(tl.int64) * N * K
    if GROWS:
        tl.store(part + n[:, None] * K + k[None, :], acc, mask=(n[:, None] < N) & (k[None, :] < K))
    else:
        tl.store(part + n[None, :] * K + k[:, None], acc, mask=(n[None, :] < N) & (k[:, None] < K))


@dataclass(frozen=True)
class Tile:
    """The tiling of a product (M, K) @ (K, N), chosen by the widths, so that a space needs few compiled kernels."""

    rows: int
    columns: int
    depth: int
    one_step: bool
    warps: int = 4
    stages: int = 3
    registers: int | None = None

    @cached_property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | ({"maxnreg": self.registers} if self.registers else {})

    def programs(self, M: int, N: int, device: torch.device) -> tuple[int, int]:
        """Return the grid. Programs that share rows are neighbours, so that the second one finds them in the cache."""
        wide = cdiv(N, self.columns)
        return wide, max(1, min(cdiv(M, self.rows), cdiv(12 * processors(device), wide)))


@cache
def tile_of(job: str, K: int, N: int) -> Tile:
    """Return the tiling for a job: "forward", "forward norm", "gradient" or "gradient norm"."""
    if job == "gradient" and N > 64:
        return Tile(64, 128, 64, False, registers=255)
    if job == "forward norm" and N >= 64 and K >= 192:
        return Tile(128, 64, 64, False)
    norm = "norm" in job
    columns = power_of_two(N) if N <= 64 else 64
    # With one step, the weights stay in place, and the next rows are loaded while these are computed.
    deepest = 128 if K <= 128 and job in ("forward", "gradient norm") else 64
    depth = min(power_of_two(K), deepest)
    rows = 128 if job == "forward norm" and columns <= 32 else 64
    stages = 2 if depth == 128 and norm else 3
    return Tile(rows, columns, depth, depth >= K, stages=stages, registers=168 if norm or depth == 128 else 128)


@cache
def weight_tile(narrow: int, grows: bool) -> Tile:
    """Return the tiling of a weight gradient (wide, narrow); wide is read once if narrow fits into a tile."""
    columns = min(128, power_of_two(narrow))
    if columns == 128 and not grows:
        return Tile(128, 128, 64, False, warps=8)
    depth = {64: 64, 128: 32}.get(columns, 128)
    return Tile(64, columns, depth, False, registers=None if columns < 64 else 168)


def forward(
    x: Tensor, w: Tensor, before: Tensor | None = None, act: str | None = None, gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y = f(x) @ w.T and its moments, for the next BatchNorm; f: BatchNorm `before`, act, gate (images, K)."""
    if before is None and products.forward_fits(x, w):
        return products.forward(x, w)
    (M, K), N = size(x), w.shape[0]
    tile = tile_of("forward" if before is None else "forward norm", K, N)
    grid, align = tile.programs(M, N, x.device), alignment(K, N)
    y, part = x.new_empty((*x.shape[:-1], N)), partial_moments(x, grid[1], N)
    launch(
        _forward, grid, x, part if before is None else before, x if gate is None else gate, w, y, part,
        M, K // align, N // align, 1 if gate is None else M // gate.shape[0],
        align, before is not None, gate is not None, act, tile.one_step, tile.rows, tile.columns, tile.depth, tile.warps,
        **tile.options,
    )  # fmt: skip
    return y, part


def input_gradient(
    g: Tensor, y: Tensor, coef: Tensor, w: Tensor,
    *, x: Tensor | None = None, before: Tensor | None = None, act: str | None = None, add: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (coef of g and y) @ w; with `before`, propagated to the z of that BatchNorm, with its partial sums."""
    (M, K), N = size(g), w.shape[1]
    tile = tile_of("gradient" if before is None else "gradient norm", K, N)
    grid, align = tile.programs(M, N, g.device), alignment(K, N)
    out = g.new_empty((*g.shape[:-1], N)) if into is None else into
    part = partial_sums(g, grid[1], N) if before is not None else coef
    end = "norm" if before is not None else "none" if add is None else "add"
    other = x if before is not None else add
    launch(
        _input_gradient, grid,
        g, y, coef, w, g if other is None else other, coef if before is None else before, out, part,
        M, K // align, N // align,
        align, end, act, tile.one_step, tile.rows, tile.columns, tile.depth, tile.warps,
        **tile.options,
    )  # fmt: skip
    return out, part


def weight_gradient(
    g: Tensor, y: Tensor, coef: Tensor, x: Tensor,
    before: Tensor | None = None, act: str | None = None, gate: Tensor | None = None, like: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return (coef of g and y).T @ f(x) in float32, f as in `forward`: (N, K), or in shape and layout of `like`."""
    (M, N), K = size(g), x.shape[-1]
    grows, align = N >= K, alignment(K, N)
    tile = weight_tile(min(N, K), grows)
    block_m, wide, narrow = tile.depth, tile.rows, tile.columns
    block_n, block_k = (wide, narrow) if grows else (narrow, wide)
    across = (cdiv(N, block_n), cdiv(K, block_k))
    row_tiles = cdiv(M, block_m)
    # Every split writes a matrix that is read again. With few rows, that must not take longer than reading the rows.
    busy, programs = processors(g.device), across[0] * across[1]
    few = max(2 * busy // programs, M * (2 * N + K) // (16 * N * K))
    tiles = cdiv(row_tiles, max(1, min(row_tiles, 8 * busy // programs, few)))
    splits = cdiv(row_tiles, tiles)
    part = torch.empty((splits, N, K), dtype=torch.float32, device=g.device)
    launch(
        _weight_gradient, (*across, splits),
        x, coef if before is None else before, x if gate is None else gate, g, y, coef, part,
        M, K // align, N // align, 1 if gate is None else M // gate.shape[0], tiles,
        align, before is not None, gate is not None, act, grows, block_m, block_n, block_k,
        **tile.options,
    )  # fmt: skip
    return sum_parts(part, part[0] if like is None else like)
