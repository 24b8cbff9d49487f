# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False
"""Depthwise convolutions on NHWC tensors in Triton, with the BatchNorm and activation before them folded in.

A thread owns one channel and a few neighbouring columns of an image and walks down its rows. It keeps the filter, and the
rows that are not complete yet, in registers: a ring of tiles, written as tuples of tensors that are unrolled when the
kernel is compiled. So each input is loaded about (columns + K - 1) / columns times instead of K * K times, and BatchNorm
and activation are computed as often. The channel of a thread never changes: statistics need no exchange between threads.

Rows: output row o takes input row i with tap kh where i = S * o + kh - P. With i = S * g + j (j < S) and o = g + d that is
kh = j + P - S * d: a fixed pattern over groups g of S input rows, with d from D_MIN = -(P // S) on. Columns are alike.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from greedynas.kernels import activate, affine_row, backward_through, store_moments
from greedynas.launching import alignment, cdiv, launch, partial_moments, partial_sums, processors

WARPS = 4


@dataclass(frozen=True)
class Plan:
    """What a thread owns: neighbouring columns (a multiple of the stride) and channels; a rule from the filter's size."""

    columns: int = 4
    channels: int = 1
    registers: int | None = None
    programs: int = 16  # for each multiprocessor

    @property
    def block(self) -> int:
        return 32 * WARPS * self.channels

    @cached_property
    def options(self) -> dict[str, int]:
        return {"num_warps": WARPS, "num_stages": 1} | ({"maxnreg": self.registers} if self.registers else {})


# Registers decide: fewer mean more threads that hide each other's waiting, too few end in slow memory. All of these are the
# best of a handful that were tried on an H200.
FORWARD = {  # (kernel, stride)
    (3, 1): Plan(channels=2, registers=96, programs=32),
    (5, 1): Plan(channels=2, registers=128, programs=32),
    (7, 1): Plan(registers=128, programs=32),
    (3, 2): Plan(registers=80, programs=32),
    (5, 2): Plan(registers=96, programs=32),
    (7, 2): Plan(registers=128, programs=32),
}
# One plan: both gradients at once, which reads less. Two: input, then weight, which takes fewer registers.
BACKWARD = {
    3: (Plan(channels=2, registers=168),),
    5: (Plan(registers=168),),
    7: (Plan(registers=168), Plan(registers=168)),
}


@triton.jit
def _place(item, near, tiles):
    """Channel and tile of columns. Neighbouring threads have the same `near` channels of neighbouring tiles, whose inputs
    overlap: what one of them loads is in the cache for the other."""
    return item // (near * tiles) * near + item % near, item // near % tiles


@triton.jit
def _zeros(count: tl.constexpr, BLOCK: tl.constexpr):
    values = ()
    for _ in tl.static_range(count):
        values = values + (tl.zeros((BLOCK,), tl.float32),)
    return values


@triton.jit
def _load_filter(w_ptr, c, inside, K: tl.constexpr):
    w = ()
    for i in tl.static_range(K * K):
        w = w + (tl.load(w_ptr + c * (K * K) + i, mask=inside, other=0.0).to(tl.float32),)
    return w


@triton.jit
def _within(column, width):
    """0 <= column < width, as one comparison."""
    return column.to(tl.uint32, bitcast=True) < width.to(tl.uint32)


@triton.jit
def _load_row(ptr, column, width, C, COUNT: tl.constexpr):
    """COUNT neighbouring pixels of a row, as they are stored; zero outside of the image."""
    values = ()
    for i in tl.static_range(COUNT):
        values = values + (tl.load(ptr + i * C, mask=_within(column + i, width), other=0.0),)
    return values


@triton.jit
def _activations(row, column, width, scale, shift, COUNT: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr):
    """What the convolution sees of such a row: act(BatchNorm), zero outside of the image."""
    values = ()
    for i in tl.static_range(COUNT):
        x = row[i].to(tl.float32)
        if NORM:
            x = tl.where(_within(column + i, width), activate(x * scale + shift, ACT), 0.0)
        values = values + (x,)
    return values


@triton.jit
def _width(row, H, W):
    """Columns of a row: none outside of the image."""
    return tl.where((row >= 0) & (row < H), W, 0)


@triton.jit
def _gather(ring, x, w, J: tl.constexpr, K: tl.constexpr, S: tl.constexpr, T: tl.constexpr, RING: tl.constexpr):
    """Add what row J of a group of input rows gives to each output of the ring."""
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
    K: tl.constexpr, S: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = K // 2
    D_MIN: tl.constexpr = -(P // S)
    RING: tl.constexpr = (S - 1 + P) // S - D_MIN + 1
    COUNT: tl.constexpr = S * (T - 1) + K
    C = CA * ALIGN
    c, tile = _place(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), near * ALIGN, tiles)
    inside = c < C
    column = tl.where(inside, tile * (T * S) - P, -(1 << 20))  # far outside: nothing is loaded
    out_column = tl.where(inside, tile * T, 1 << 20)
    x_at = column * C + c
    y_at = tile * (T * C) + c
    w = _load_filter(w_ptr, c, inside, K)
    scale = affine_row(norm_ptr, 2, C, c, inside) if NORM else 1.0
    shift = affine_row(norm_ptr, 3, C, c, inside) if NORM else 0.0
    pivot = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(1) * images
    for n in range(first, tl.minimum(first + images, N)):
        x_image = x_ptr + tl.cast(n, tl.int64) * (H * W * C)
        y_image = y_ptr + tl.cast(n, tl.int64) * (OH * OW * C)
        ring = _zeros(RING * T, BLOCK)
        row = _load_row(x_image + x_at, column, W, C, COUNT)
        for g in range(OH):
            for j in tl.static_range(S):
                x = _activations(row, column, _width(g * S + j, H, W), scale, shift, COUNT, NORM, ACT)
                after = g * S + j + 1  # it is loaded while this row is computed
                row = _load_row(x_image + after * (W * C) + x_at, column, _width(after, H, W), C, COUNT)
                ring = _gather(ring, x, w, j, K, S, T, RING)
            if g >= -D_MIN:
                pivot = tl.where((n == first) & (g == -D_MIN), ring[0], pivot)
                y_row = y_image + (g + D_MIN) * (OW * C) + y_at
                total, square = _emit(ring, y_row, out_column, OW, C, pivot, total, square, T)
            ring = ring[T:] + _zeros(T, BLOCK)
        for d in tl.static_range(-D_MIN):
            if d >= -D_MIN - OH:  # an image may have fewer rows than the ring
                pivot = tl.where((n == first) & (OH + D_MIN + d == 0), ring[d * T], pivot)
                y_row = y_image + (OH + D_MIN + d) * (OW * C) + y_at
                total, square = _emit(ring[d * T :], y_row, out_column, OW, C, pivot, total, square, T)
    count = (tl.minimum(first + images, N) - first) * OH * tl.maximum(tl.minimum(OW - tile * T, T), 1)
    size = tiles * C
    at = tl.program_id(1) * size + tile * C + c
    store_moments(part_ptr, at, tl.num_programs(1) * size, count.to(tl.float32), pivot, total, square, inside)


@triton.jit
def _gradients_of(g, y, column, width, a, b, c0, COUNT: tl.constexpr):
    """A row of the gradient of the convolution's output, zero outside of the image."""
    values = ()
    for i in tl.static_range(COUNT):
        value = a * g[i].to(tl.float32) + (b * y[i].to(tl.float32) + c0)
        values = values + (tl.where(_within(column + i, width), value, 0.0),)
    return values


@triton.jit
def _gather_back(ring, g, w, K: tl.constexpr, S: tl.constexpr, T: tl.constexpr, RING: tl.constexpr):
    """Add what a row of gradients gives to each input gradient of the ring: row j of group q, column t."""
    out = ()
    for q in tl.static_range(RING):
        for j in tl.static_range(S):
            for t in tl.static_range(T):
                x = ring[(q * S + j) * T + t]
                if (
                    j + K // 2 - S * ((S - 1 + K // 2) // S - q) >= 0
                    and j + K // 2 - S * ((S - 1 + K // 2) // S - q) < K
                ):
                    for kw in tl.static_range(K):
                        if (t + K // 2 - kw) % S == 0:
                            tap = w[(j + K // 2 - S * ((S - 1 + K // 2) // S - q)) * K + kw]
                            x += g[(t + K // 2 - kw) // S + K // 2 // S] * tap
                out = out + (x,)
    return out


@triton.jit
def _gather_weights(sums, g, kept, K: tl.constexpr, S: tl.constexpr, T: tl.constexpr):
    """Add the products of a row of gradients and the kept activations to the gradient of each tap.

    Tap kh meets row kh of the kept ones, counted from the first that the row of gradients reaches.
    """
    out = ()
    for kh in tl.static_range(K):
        for kw in tl.static_range(K):
            total = sums[kh * K + kw]
            for t in tl.static_range(T):
                if (t + K // 2 - kw) % S == 0:
                    row = kept[(kh + S * ((S - 1 + K // 2) // S) - K // 2) * T + t]
                    total += g[(t + K // 2 - kw) // S + K // 2 // S] * row
            out = out + (total,)
    return out


@triton.jit
def _load_group(x_image, row, at, H, W, C, column, S: tl.constexpr, T: tl.constexpr):
    """The S rows of a group of inputs, as they are stored."""
    values = ()
    for j in tl.static_range(S):
        values = values + _load_row(x_image + (row + j) * (W * C) + at, column, _width(row + j, H, W), C, T)
    return values


@triton.jit
def _activated(group, row, H, W, column, scale, shift, S: tl.constexpr, T: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    values = ()
    for j in tl.static_range(S):
        width = _width(row + j, H, W)
        values = values + _activations(group[j * T : (j + 1) * T], column, width, scale, shift, T, NORM, ACT)
    return values


@triton.jit
def _emit_back(ring, x, out_image, row, at, H, W, C, column, scale, shift, mean, total, product, S: tl.constexpr, T: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """Store the S finished rows of a group, on through the activation where there is one, and its BatchNorm's sums."""
    for j in tl.static_range(S):
        for t in tl.static_range(T):
            inside = _within(column + t, _width(row + j, H, W))
            g = ring[j * T + t]
            if NORM:
                value = x[j * T + t].to(tl.float32)
                g = tl.where(inside, backward_through(g, value * scale + shift, ACT), 0.0)
                total += g
                product += g * (value - mean)
            tl.store(out_image + ((row + j) * W + t) * C + at, g.to(out_image.dtype.element_ty), mask=inside)
    return total, product


@triton.jit(do_not_specialize=["N", "H", "W", "OH", "OW", "CA", "tiles", "near", "images"])
def _backward(
    g_ptr, y_ptr, coef_ptr, x_ptr, norm_ptr, w_ptr, out_ptr, part_ptr, sums_ptr, N, H, W, OH, OW, CA, tiles, near, images,
    ALIGN: tl.constexpr, INPUT: tl.constexpr, WEIGHT: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """INPUT gradient, WEIGHT gradient, or both at once. `ring`: rows of the input gradient that are not complete yet,
    `kept`: the activations of the same rows."""
    P: tl.constexpr = K // 2
    D_MIN: tl.constexpr = -(P // S)
    D_MAX: tl.constexpr = (S - 1 + P) // S
    RING: tl.constexpr = D_MAX - D_MIN + 1
    COUNT: tl.constexpr = (T - 1 + P) // S - D_MIN + 1
    C = CA * ALIGN
    c, tile = _place(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), near * ALIGN, tiles)
    inside = c < C
    column = tl.where(inside, tile * T, -(1 << 20))
    g_column = tl.where(inside, tile * (T // S) + D_MIN, -(1 << 20))
    at = tile * (T * C) + c
    g_at = g_column * C + c
    a = affine_row(coef_ptr, 0, C, c, inside)
    b = affine_row(coef_ptr, 1, C, c, inside)
    c0 = affine_row(coef_ptr, 2, C, c, inside)
    mean = affine_row(norm_ptr, 0, C, c, inside) if NORM else 0.0
    scale = affine_row(norm_ptr, 2, C, c, inside) if NORM else 1.0
    shift = affine_row(norm_ptr, 3, C, c, inside) if NORM else 0.0
    if INPUT:
        w = _load_filter(w_ptr, c, inside, K)
    if WEIGHT:
        sums = _zeros(K * K, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(1) * images
    for n in range(first, tl.minimum(first + images, N)):
        x_image = x_ptr + tl.cast(n, tl.int64) * (H * W * C)
        out_image = out_ptr + tl.cast(n, tl.int64) * (H * W * C)
        g_image = g_ptr + tl.cast(n, tl.int64) * (OH * OW * C)
        y_image = y_ptr + tl.cast(n, tl.int64) * (OH * OW * C)
        if INPUT:
            ring = _zeros(RING * S * T, BLOCK)
        if WEIGHT:
            kept = _zeros((RING + D_MIN) * S * T, BLOCK)
            for i in tl.static_range(-D_MIN):
                group = _load_group(x_image, i * S, at, H, W, C, column, S, T)
                kept = kept + _activated(group, i * S, H, W, column, scale, shift, S, T, NORM, ACT)
            group = _load_group(x_image, -D_MIN * S, at, H, W, C, column, S, T)
        # kept: groups -D_MAX - 1 to -D_MIN - 1; the first of them leaves as the next one enters.
        if INPUT:
            x_group = _load_group(x_image, -D_MAX * S, at, H, W, C, column, S, T)
        g_row = _load_row(g_image + g_at, g_column, OW, C, COUNT)
        y_row = _load_row(y_image + g_at, g_column, OW, C, COUNT)
        for o in range(OH):
            g = _gradients_of(g_row, y_row, g_column, OW, a, b, c0, COUNT)
            # What the next step needs is loaded while this one is computed.
            width = _width(o + 1, OH, OW)
            g_row = _load_row(g_image + (o + 1) * (OW * C) + g_at, g_column, width, C, COUNT)
            y_row = _load_row(y_image + (o + 1) * (OW * C) + g_at, g_column, width, C, COUNT)
            if WEIGHT:
                entering = (o - D_MIN) * S
                kept = kept[S * T :] + _activated(group, entering, H, W, column, scale, shift, S, T, NORM, ACT)
                group = _load_group(x_image, entering + S, at, H, W, C, column, S, T)
                sums = _gather_weights(sums, g, kept, K, S, T)
            if INPUT:
                x, leaving = x_group, (o - D_MAX) * S
                if NORM:
                    x_group = _load_group(x_image, leaving + S, at, H, W, C, column, S, T)
                ring = _gather_back(ring, g, w, K, S, T, RING)
                total, product = _emit_back(
                    ring, x, out_image, leaving, at, H, W, C,
                    column, scale, shift, mean, total, product, S, T, NORM, ACT,
                )  # fmt: skip
                ring = ring[S * T :] + _zeros(S * T, BLOCK)
        if INPUT:
            for q in tl.static_range(D_MAX):
                leaving = (OH - D_MAX + q) * S
                x_group = _load_group(x_image, leaving, at, H, W, C, column, S, T)
                total, product = _emit_back(
                    ring[q * S * T :], x_group, out_image, leaving, at, H, W, C,
                    column, scale, shift, mean, total, product, S, T, NORM, ACT,
                )  # fmt: skip
    size = tiles * C
    if INPUT and NORM:
        part = part_ptr + tl.program_id(1) * size + tile * C + c
        tl.store(part, total, mask=inside)
        tl.store(part + tl.num_programs(1) * size, product, mask=inside)
    if WEIGHT:
        for i in tl.static_range(K * K):
            tap = sums_ptr + (tl.program_id(1) * (K * K) + i).to(tl.int64) * size
            tl.store(tap + tile * C + c, sums[i], mask=inside)


@cache
def _near(channels: int, align: int) -> int:
    """The largest part, up to 64, into which the channels can be cut evenly."""
    part = max((size for size in range(align, 65, align) if channels % size == 0), default=0)
    return part if part >= 16 else channels


def _split(images: int, items: int, plan: Plan, device: torch.device) -> tuple[int, int]:
    """Images of one program and parts of the batch, for about as many programs as planned."""
    wanted = plan.programs * processors(device) // cdiv(items, plan.block)
    each = cdiv(images, max(1, min(images, wanted)))
    return each, cdiv(images, each)


def forward(
    x: Tensor, w: Tensor, stride: int, before: Tensor | None = None, act: str | None = None
) -> tuple[Tensor, Tensor]:
    """The depthwise convolution of act(BatchNorm `before`(x)), x (images, H, W, C), and its moments."""
    N, H, W, C = x.shape
    K, OH, OW = w.shape[-1], -(-H // stride), -(-W // stride)
    plan = FORWARD[K, stride]
    tiles, align = cdiv(OW, plan.columns), alignment(C)
    each, parts = _split(N, tiles * C, plan, x.device)
    y, part = x.new_empty((N, OH, OW, C)), partial_moments(x, parts * tiles, C)
    launch(
        _forward, (cdiv(tiles * C, plan.block), parts),
        x, part if before is None else before, w, y, part,
        N, H, W, OH, OW, C // align, tiles, _near(C, align) // align, each,
        align, before is not None, act, K, stride, plan.columns, plan.block, **plan.options,
    )  # fmt: skip
    return y, part


def backward(
    g: Tensor, y: Tensor, coef: Tensor, x: Tensor, w: Tensor, stride: int,
    before: Tensor | None = None, act: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of z of BatchNorm `before` (of x itself without one), its partial sums, and of the weights, float32."""
    plans = BACKWARD[w.shape[-1]]
    if len(plans) == 1:
        out, part, sums = _gradients(plans[0], True, True, g, y, coef, x, w, stride, before, act)
    else:
        out, part, _ = _gradients(plans[0], True, False, g, y, coef, x, w, stride, before, act)
        _, _, sums = _gradients(plans[1], False, True, g, y, coef, x, w, stride, before, act)
    return out, part, sums.sum((0, 2)).t().contiguous().view(w.shape)


def _gradients(
    plan: Plan, of_input: bool, of_weight: bool,
    g: Tensor, y: Tensor, coef: Tensor, x: Tensor, w: Tensor, stride: int, before: Tensor | None, act: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    N, H, W, C = x.shape
    K, (_, OH, OW, _) = w.shape[-1], g.shape
    tiles, align = cdiv(W, plan.columns), alignment(C)
    each, parts = _split(N, tiles * C, plan, x.device)
    out = torch.empty_like(x) if of_input else x
    part = partial_sums(x, parts * tiles, C) if of_input and before is not None else coef
    sums = torch.empty((parts, K * K, tiles, C), dtype=torch.float32, device=x.device) if of_weight else coef
    launch(
        _backward, (cdiv(tiles * C, plan.block), parts),
        g, y, coef, x, coef if before is None else before, w, out, part, sums,
        N, H, W, OH, OW, C // align, tiles, _near(C, align) // align, each,
        align, of_input, of_weight, before is not None, act, K, stride, plan.columns, plan.block, **plan.options,
    )  # fmt: skip
    return out, part, sums
