# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, it does not unpack them)
"""Gradients of depthwise convolutions, like `depthwise.py` by iterating over the rows of the output's gradient.

Row o reaches the groups g = o - d of input rows: `ring` holds their incomplete gradients, `kept` their activations. The
gradient of the output is computed on load by BatchNorm's backward formula. The gradient of the input is propagated
through the activation before the convolution, and the sums for the BatchNorm there are computed in the same kernel.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from greedynas.gpu.kernels import depthwise_whole
from greedynas.gpu.kernels.depthwise import (
    Plan,
    activations,
    least_overhang,
    load_row,
    near_channels,
    place,
    split,
    width_of,
    within,
)
from greedynas.gpu.kernels.filters import load_filter, zeros
from greedynas.gpu.kernels.launching import alignment, cdiv, launch, partial_sums, processors
from greedynas.gpu.kernels.norms import affine_row, backward_through
from greedynas.gpu.kernels.weights import sum_parts

# By (kernel, stride): plans to choose from by the width. A single plan computes both gradients at once, which reads
# less; a pair of plans computes the input's, then the weight's, which takes fewer registers.
BACKWARD: dict[tuple[int, int], tuple[tuple[Plan, ...], ...]] = {
    (3, 1): ((Plan(7, 2, 255),), (Plan(4, 2, 168),)),
    (5, 1): ((Plan(7, 1, 255),), (Plan(4, 1, 168),)),
    (7, 1): ((Plan(7, 1, 255), Plan(7, 1, 255)), (Plan(4, 1, 168), Plan(4, 1, 168))),
    (3, 2): ((Plan(4, 2, 168),),),
    (5, 2): ((Plan(4, 1, 168),),),
    (7, 2): ((Plan(4, 1, 255),),),
}


@triton.jit
def _gradients_of(g, y, column, width, a, b, c0, COUNT: tl.constexpr):
    """Return a row of the gradient of the convolution's output, zero outside of the image."""
    values = ()
    for i in tl.static_range(COUNT):
        value = a * g[i].to(tl.float32) + (b * y[i].to(tl.float32) + c0)
        values = values + (tl.where(within(column + i, width), value, 0.0),)
    return values


@triton.jit
def _gather_back(ring, g, w, K: tl.constexpr, S: tl.constexpr, T: tl.constexpr, RING: tl.constexpr):
    """Add the contribution of a row of gradients to each input gradient of the ring: row j of group q, column t."""
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

    Tap kh is multiplied with row kh of the kept ones, counted from the first one that the row of gradients reaches.
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
    """Return the S rows of a group of inputs, as stored."""
    values = ()
    for j in tl.static_range(S):
        values = values + load_row(x_image + (row + j) * (W * C) + at, column, width_of(row + j, H, W), C, T)
    return values


@triton.jit
def _activated(group, row, H, W, column, scale, shift, S: tl.constexpr, T: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    values = ()
    for j in tl.static_range(S):
        width = width_of(row + j, H, W)
        values = values + activations(group[j * T : (j + 1) * T], column, width, scale, shift, T, NORM, ACT)
    return values


@triton.jit
def _emit_back(ring, x, out_image, row, at, H, W, C, column, scale, shift, mean, total, product, S: tl.constexpr, T: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """Store the S finished rows of a group, propagated through the activation, if any, and update BatchNorm's sums."""
    for j in tl.static_range(S):
        for t in tl.static_range(T):
            inside = within(column + t, width_of(row + j, H, W))
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
    """Compute the INPUT gradient, the WEIGHT gradient, or both at once.

    `ring` holds the incomplete rows of the input gradient, `kept` the activations of the same rows.
    """
    P: tl.constexpr = K // 2
    D_MIN: tl.constexpr = -(P // S)
    D_MAX: tl.constexpr = (S - 1 + P) // S
    RING: tl.constexpr = D_MAX - D_MIN + 1
    COUNT: tl.constexpr = (T - 1 + P) // S - D_MIN + 1
    C = CA * ALIGN
    c, tile = place(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), near * ALIGN, tiles)
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
        w = load_filter(w_ptr, c, inside, K)
    if WEIGHT:
        sums = zeros(K * K, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(1) * images
    for n in range(first, tl.minimum(first + images, N)):
        x_image = x_ptr + tl.cast(n, tl.int64) * (H * W * C)
        out_image = out_ptr + tl.cast(n, tl.int64) * (H * W * C)
        g_image = g_ptr + tl.cast(n, tl.int64) * (OH * OW * C)
        y_image = y_ptr + tl.cast(n, tl.int64) * (OH * OW * C)
        if INPUT:
            ring = zeros(RING * S * T, BLOCK)
        if WEIGHT:
            kept = zeros((RING + D_MIN) * S * T, BLOCK)
            for i in tl.static_range(-D_MIN):
                group = _load_group(x_image, i * S, at, H, W, C, column, S, T)
                kept = kept + _activated(group, i * S, H, W, column, scale, shift, S, T, NORM, ACT)
            group = _load_group(x_image, -D_MIN * S, at, H, W, C, column, S, T)
        # kept: groups -D_MAX - 1 to -D_MIN - 1; the first of them is dropped when the next one is added.
        if INPUT:
            x_group = _load_group(x_image, -D_MAX * S, at, H, W, C, column, S, T)
        g_row = load_row(g_image + g_at, g_column, OW, C, COUNT)
        y_row = load_row(y_image + g_at, g_column, OW, C, COUNT)
        for o in range(OH):
            g = _gradients_of(g_row, y_row, g_column, OW, a, b, c0, COUNT)
            # Load the data of the next step while this one is computed.
            width = width_of(o + 1, OH, OW)
            g_row = load_row(g_image + (o + 1) * (OW * C) + g_at, g_column, width, C, COUNT)
            y_row = load_row(y_image + (o + 1) * (OW * C) + g_at, g_column, width, C, COUNT)
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
                ring = ring[S * T :] + zeros(S * T, BLOCK)
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
        part = part_ptr + tl.program_id(1) * size + (3 + tile) * C + c
        tl.store(part, total, mask=inside)
        tl.store(part + tl.num_programs(1) * size, product, mask=inside)
    if WEIGHT:
        for i in tl.static_range(K * K):
            tap = sums_ptr + (tl.program_id(1) * (K * K) + i).to(tl.int64) * size
            tl.store(tap + tile * C + c, sums[i], mask=inside)


def backward(
    g: Tensor, y: Tensor, coef: Tensor, x: Tensor, w: Tensor, stride: int,
    before: Tensor | None = None, act: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of z of BatchNorm `before` (else of x) and of the weights, and BatchNorm's partial sums."""
    if depthwise_whole.fits(x, stride):
        return depthwise_whole.backward(g, y, coef, x, w, before, act)
    choice = BACKWARD[w.shape[-1], stride]
    plans = choice[least_overhang(x.shape[2], [plans[0].columns for plans in choice])]
    if len(plans) == 1:
        out, part, sums = _gradients(plans[0], True, True, g, y, coef, x, w, stride, before, act)
    else:
        out, part, _ = _gradients(plans[0], True, False, g, y, coef, x, w, stride, before, act)
        _, _, sums = _gradients(plans[1], False, True, g, y, coef, x, w, stride, before, act)
    return out, part, sum_parts(sums, w, taps=w.shape[-1] ** 2, tiles=sums.shape[2])


def _gradients(
    plan: Plan, of_input: bool, of_weight: bool,
    g: Tensor, y: Tensor, coef: Tensor, x: Tensor, w: Tensor, stride: int, before: Tensor | None, act: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    N, H, W, C = x.shape
    K, (_, OH, OW, _) = w.shape[-1], g.shape
    tiles, align = cdiv(W, plan.columns), alignment(C)
    each, parts = split(N, tiles * C, plan, x.device)
    if of_weight:  # partial sums are written and read again, so use fewer parts on small images
        few = max(3 * processors(x.device) // cdiv(tiles * C, plan.block), N * H * W // (4 * K * K * tiles), 1)
        each = cdiv(N, min(parts, few))
        parts = cdiv(N, each)
    out = torch.empty_like(x) if of_input else x
    part = partial_sums(x, parts * tiles, C) if of_input and before is not None else coef
    sums = torch.empty((parts, K * K, tiles, C), dtype=torch.float32, device=x.device) if of_weight else coef
    launch(
        _backward, (cdiv(tiles * C, plan.block), parts),
        g, y, coef, x, coef if before is None else before, w, out, part, sums,
        N, H, W, OH, OW, C // align, tiles, near_channels(C, align) // align, each,
        align, of_input, of_weight, before is not None, act, K, stride, plan.columns, plan.block, **plan.options,
    )  # fmt: skip
    return out, part, sums
