# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, it does not unpack them)
"""Depthwise convolutions on NHWC tensors in Triton, with the BatchNorm and activation before them folded in.

A thread owns one channel and a few neighbouring columns of an image and iterates over its rows. It keeps the filter and
the incomplete rows in registers: a ring of tiles, written as tuples of tensors that are unrolled when the kernel is
compiled. So each input is loaded about (columns + K - 1) / columns times instead of K * K times, and BatchNorm and
activation are computed equally often. The channel of a thread never changes, so statistics need no exchange between
threads.

Rows: output row o takes input row i with tap kh where i = S * o + kh - P. With i = S * g + j (j < S) and o = g + d that is
kh = j + P - S * d: a fixed pattern over groups g of S input rows, with d from D_MIN = -(P // S) on. Columns are alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from greedynas.gpu.kernels import depthwise_whole
from greedynas.gpu.kernels.filters import WARPS, load_filter, zeros
from greedynas.gpu.kernels.launching import alignment, cdiv, launch, partial_moments, processors
from greedynas.gpu.kernels.norms import activate, affine_row, store_moments


@dataclass(frozen=True)
class Plan:
    """The work of a thread: neighbouring columns (a multiple of the stride) and channels, by the filter's size."""

    columns: int = 4
    channels: int = 1
    registers: int | None = None
    programs: int = 16  # per multiprocessor
    ahead: int = 1  # rows that are loaded before they are needed (forward)

    @property
    def block(self) -> int:
        return 32 * WARPS * self.channels

    @cached_property
    def options(self) -> dict[str, int]:
        return {"num_warps": WARPS, "num_stages": 1} | ({"maxnreg": self.registers} if self.registers else {})


# Registers decide the speed: with fewer, more threads hide each other's latency; too few spill to slow memory. These
# were the fastest of a few plans on an H200. Seven columns divide the maps of 224 px, four those of 32 px; the one with
# the smallest remainder is used.
FORWARD = {  # (kernel, stride)
    (3, 1): (Plan(7, 2, 128, programs=32), Plan(4, 2, 96, programs=32)),
    (5, 1): (Plan(7, 2, 168, programs=32), Plan(4, 2, 128, programs=32)),
    (7, 1): (Plan(4, 2, 255, programs=32), Plan(7, 1, 168, programs=32)),
    (3, 2): (Plan(7, 2, 168, programs=32, ahead=2), Plan(4, 2, 128, programs=32, ahead=2)),
    (5, 2): (Plan(4, 2, 168, programs=32, ahead=2),),
    (7, 2): (Plan(4, 1, 168, programs=32, ahead=2),),
}


def least_overhang(width: int, columns: Sequence[int]) -> int:
    """Return the index of the number of columns that divides the width with the smallest overhang."""
    return min(range(len(columns)), key=lambda i: cdiv(width, columns[i]) * columns[i])


@triton.jit
def place(item, near, tiles):
    """Return the channel and the tile of columns of an item.

    Neighbouring threads have the same `near` channels of neighbouring tiles, whose inputs overlap: what one of them
    loads is in the cache for the other.
    """
    return item // (near * tiles) * near + item % near, item // near % tiles


@triton.jit
def within(column, width):
    """Return 0 <= column < width, computed as one comparison."""
    return column.to(tl.uint32, bitcast=True) < width.to(tl.uint32)


@triton.jit
def load_row(ptr, column, width, C, COUNT: tl.constexpr):
    """Return COUNT neighbouring pixels of a row as stored, zero outside of the image."""
    values = ()
    for i in tl.static_range(COUNT):
        values = values + (tl.load(ptr + i * C, mask=within(column + i, width), other=0.0),)
    return values


@triton.jit
def activations(row, column, width, scale, shift, COUNT: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr):
    """Return the convolution's input for such a row: act(BatchNorm), zero outside of the image."""
    values = ()
    for i in tl.static_range(COUNT):
        x = row[i].to(tl.float32)
        if NORM:
            x = tl.where(within(column + i, width), activate(x * scale + shift, ACT), 0.0)
        values = values + (x,)
    return values


@triton.jit
def width_of(row, H, W):
    """Return the number of columns of a row, which is 0 outside of the image."""
    return tl.where((row >= 0) & (row < H), W, 0)


@triton.jit
def _gather(ring, x, w, J: tl.constexpr, K: tl.constexpr, S: tl.constexpr, T: tl.constexpr, RING: tl.constexpr):
    """Add the contribution of row J of a group of input rows to each output of the ring."""
    out = ()
    for d in tl.static_range(RING):
        for o in tl.static_range(T):
            y = ring[d * T + o]
            if J + K // 2 - S * (d - K // 2 // S) >= 0 and J + K // 2 - S * (d - K // 2 // S) < K:
                for kw in tl.static_range(K):
                    y += x[S * o + kw] * w[(J + K // 2 - S * (d - K // 2 // S)) * K + kw]
            out = out + (y,)
    return out


@triton.jit
def _emit(ring, ptr, column, width, C, pivot, total, square, T: tl.constexpr):
    """Store a finished output row and add it to the statistics."""
    for o in tl.static_range(T):
        inside = column + o < width
        tl.store(ptr + o * C, ring[o].to(ptr.dtype.element_ty), mask=inside)
        y = tl.where(inside, ring[o] - pivot, 0.0)
        total += y
        square += y * y
    return total, square


@triton.jit(do_not_specialize=["N", "H", "W", "OH", "OW", "CA", "tiles", "near", "images"])
def _forward(
    x_ptr, norm_ptr, w_ptr, y_ptr, part_ptr, N, H, W, OH, OW, CA, tiles, near, images,
    ALIGN: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = K // 2
    D_MIN: tl.constexpr = -(P // S)
    RING: tl.constexpr = (S - 1 + P) // S - D_MIN + 1
    COUNT: tl.constexpr = S * (T - 1) + K
    C = CA * ALIGN
    c, tile = place(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), near * ALIGN, tiles)
    inside = c < C
    column = tl.where(inside, tile * (T * S) - P, -(1 << 20))  # far outside, so that nothing is loaded
    out_column = tl.where(inside, tile * T, 1 << 20)
    x_at = column * C + c
    y_at = tile * (T * C) + c
    w = load_filter(w_ptr, c, inside, K)
    scale = affine_row(norm_ptr, 2, C, c, inside) if NORM else 1.0
    shift = affine_row(norm_ptr, 3, C, c, inside) if NORM else 0.0
    pivot = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(1) * images
    for n in range(first, tl.minimum(first + images, N)):
        x_image = x_ptr + tl.cast(n, tl.int64) * (H * W * C)
        y_image = y_ptr + tl.cast(n, tl.int64) * (OH * OW * C)
        ring = zeros(RING * T, BLOCK)
        rows = ()  # rows that are being loaded
        for i in tl.static_range(AHEAD):
            rows = rows + load_row(x_image + i * (W * C) + x_at, column, width_of(i, H, W), C, COUNT)
        for g in range(OH):
            for j in tl.static_range(S):
                x = activations(rows[:COUNT], column, width_of(g * S + j, H, W), scale, shift, COUNT, NORM, ACT)
                after = g * S + j + AHEAD  # it is loaded while this row is computed
                rows = rows[COUNT:] + load_row(
                    x_image + after * (W * C) + x_at, column, width_of(after, H, W), C, COUNT
                )
                ring = _gather(ring, x, w, j, K, S, T, RING)
            if g >= -D_MIN:
                pivot = tl.where((n == first) & (g == -D_MIN), ring[0], pivot)
                y_row = y_image + (g + D_MIN) * (OW * C) + y_at
                total, square = _emit(ring, y_row, out_column, OW, C, pivot, total, square, T)
            ring = ring[T:] + zeros(T, BLOCK)
        for d in tl.static_range(-D_MIN):
            if d >= -D_MIN - OH:  # an image may have fewer rows than the ring
                pivot = tl.where((n == first) & (OH + D_MIN + d == 0), ring[d * T], pivot)
                y_row = y_image + (OH + D_MIN + d) * (OW * C) + y_at
                total, square = _emit(ring[d * T :], y_row, out_column, OW, C, pivot, total, square, T)
    count = (tl.minimum(first + images, N) - first) * OH * tl.maximum(tl.minimum(OW - tile * T, T), 1)
    size = tiles * C
    at = tl.program_id(1) * size + tile * C + c
    store_moments(part_ptr, at, tl.num_programs(1) * size, C, count.to(tl.float32), pivot, total, square, inside)


@cache
def near_channels(channels: int, align: int) -> int:
    """Return the largest size up to 64 into which the channels can be divided evenly."""
    part = max((size for size in range(align, 65, align) if channels % size == 0), default=0)
    return part if part >= 16 else channels


def split(images: int, items: int, plan: Plan, device: torch.device) -> tuple[int, int]:
    """Return the images per program and the parts of the batch, for about the planned number of programs."""
    wanted = plan.programs * processors(device) // cdiv(items, plan.block)
    each = cdiv(images, max(1, min(images, wanted)))
    return each, cdiv(images, each)


def forward(
    x: Tensor, w: Tensor, stride: int, before: Tensor | None = None, act: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the depthwise convolution of act(BatchNorm `before`(x)) for x (images, H, W, C), and its moments."""
    if depthwise_whole.fits(x, stride):
        return depthwise_whole.forward(x, w, before, act)
    N, H, W, C = x.shape
    K, OH, OW = w.shape[-1], -(-H // stride), -(-W // stride)
    plans = FORWARD[K, stride]
    plan = plans[least_overhang(OW, [plan.columns for plan in plans])]
    tiles, align = cdiv(OW, plan.columns), alignment(C)
    each, parts = split(N, tiles * C, plan, x.device)
    y, part = x.new_empty((N, OH, OW, C)), partial_moments(x, parts * tiles, C)
    launch(
        _forward, (cdiv(tiles * C, plan.block), parts),
        x, part if before is None else before, w, y, part,
        N, H, W, OH, OW, C // align, tiles, near_channels(C, align) // align, each,
        align, before is not None, act, K, stride, plan.columns, plan.block, plan.ahead, **plan.options,
    )  # fmt: skip
    return y, part
