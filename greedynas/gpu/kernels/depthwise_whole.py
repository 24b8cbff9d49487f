# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, it does not unpack them)
"""Depthwise convolutions with stride 1 of maps that are small enough for one thread to hold a whole one: taps that fall
outside are omitted when the kernel is compiled. Otherwise like `depthwise.py` and `depthwise_backward.py`."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from greedynas.gpu.kernels.filters import WARPS, load_filter, zeros
from greedynas.gpu.kernels.launching import alignment, cdiv, launch, partial_moments, partial_sums, processors
from greedynas.gpu.kernels.norms import activate, affine_row, backward_through, store_moments
from greedynas.gpu.kernels.weights import sum_parts

LARGEST = 16  # pixels of a map
PROGRAMS = 8  # per multiprocessor


def fits(x: Tensor, stride: int) -> bool:
    return stride == 1 and x.shape[1] * x.shape[2] <= LARGEST


@triton.jit
def _load_map(ptr, C, inside, PIXELS: tl.constexpr):
    values = ()
    for i in tl.static_range(PIXELS):
        values = values + (tl.load(ptr + i * C, mask=inside, other=0.0).to(tl.float32),)
    return values


@triton.jit
def _activated(x, scale, shift, PIXELS: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr):
    if NORM:
        values = ()
        for i in tl.static_range(PIXELS):
            values = values + (activate(x[i] * scale + shift, ACT),)
    else:
        values = x
    return values


@triton.jit(do_not_specialize=["N", "CA", "images"])
def _forward(
    x_ptr, norm_ptr, w_ptr, y_ptr, part_ptr, N, CA, images,
    ALIGN: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    C = CA * ALIGN
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    w = load_filter(w_ptr, c, inside, K)
    scale = affine_row(norm_ptr, 2, C, c, inside) if NORM else 1.0
    shift = affine_row(norm_ptr, 3, C, c, inside) if NORM else 0.0
    pivot = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(1) * images
    for n in range(first, tl.minimum(first + images, N)):
        at = tl.cast(n, tl.int64) * (H * W * C) + c
        x = _activated(_load_map(x_ptr + at, C, inside, H * W), scale, shift, H * W, NORM, ACT)
        for oy in tl.static_range(H):
            for ox in tl.static_range(W):
                y = tl.zeros((BLOCK,), tl.float32)
                for i in tl.static_range(H * W):
                    if (
                        i // W - oy <= K // 2
                        and oy - i // W <= K // 2
                        and i % W - ox <= K // 2
                        and ox - i % W <= K // 2
                    ):
                        y += x[i] * w[(i // W - oy + K // 2) * K + i % W - ox + K // 2]
                tl.store(y_ptr + at + (oy * W + ox) * C, y.to(y_ptr.dtype.element_ty), mask=inside)
                if oy == 0 and ox == 0:
                    pivot = tl.where(n == first, y, pivot)
                y -= pivot
                total += y
                square += y * y
    count = (tl.minimum(first + images, N) - first) * (H * W)
    at = tl.program_id(1) * C + c
    store_moments(part_ptr, at, tl.num_programs(1) * C, C, count.to(tl.float32), pivot, total, square, inside)


@triton.jit(do_not_specialize=["N", "CA", "images"])
def _backward(
    g_ptr, y_ptr, coef_ptr, x_ptr, norm_ptr, w_ptr, out_ptr, part_ptr, sums_ptr, N, CA, images,
    ALIGN: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    C = CA * ALIGN
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    a = affine_row(coef_ptr, 0, C, c, inside)
    b = affine_row(coef_ptr, 1, C, c, inside)
    c0 = affine_row(coef_ptr, 2, C, c, inside)
    mean = affine_row(norm_ptr, 0, C, c, inside) if NORM else 0.0
    scale = affine_row(norm_ptr, 2, C, c, inside) if NORM else 1.0
    shift = affine_row(norm_ptr, 3, C, c, inside) if NORM else 0.0
    w = load_filter(w_ptr, c, inside, K)
    sums = zeros(K * K, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(1) * images
    for n in range(first, tl.minimum(first + images, N)):
        at = tl.cast(n, tl.int64) * (H * W * C) + c
        raw = _load_map(x_ptr + at, C, inside, H * W)
        g = ()
        for o in tl.static_range(H * W):
            value = a * tl.load(g_ptr + at + o * C, mask=inside, other=0.0).to(tl.float32)
            g = g + (value + (b * tl.load(y_ptr + at + o * C, mask=inside, other=0.0).to(tl.float32) + c0),)
        for i in tl.static_range(H * W):
            z = raw[i] * scale + shift
            x = activate(z, ACT) if NORM else raw[i]
            dx = tl.zeros((BLOCK,), tl.float32)
            added = ()
            for k in tl.static_range(K * K):
                tap = sums[k]
                # Output (i // W - k // K + P, i % W - k % K + P) reads this input by tap k.
                if i // W - k // K + K // 2 >= 0 and i // W - k // K + K // 2 < H and i % W - k % K + K // 2 >= 0 and i % W - k % K + K // 2 < W:  # fmt: skip
                    dx += g[(i // W - k // K + K // 2) * W + i % W - k % K + K // 2] * w[k]
                    tap += g[(i // W - k // K + K // 2) * W + i % W - k % K + K // 2] * x
                added = added + (tap,)
            sums = added
            if NORM:
                dx = backward_through(dx, z, ACT)
                total += dx
                product += dx * (raw[i] - mean)
            tl.store(out_ptr + at + i * C, dx.to(out_ptr.dtype.element_ty), mask=inside)
    if NORM:
        part = part_ptr + (3 + tl.program_id(1)) * C + c
        tl.store(part, total, mask=inside)
        tl.store(part + tl.num_programs(1) * C, product, mask=inside)
    for k in tl.static_range(K * K):
        tl.store(sums_ptr + (tl.program_id(1) * (K * K) + k) * C + c, sums[k], mask=inside)


def _split(x: Tensor, block: int, programs: int) -> tuple[int, int]:
    """Return the images per program, and the parts of the batch."""
    wanted = programs * processors(x.device) // cdiv(x.shape[3], block)
    each = cdiv(len(x), max(1, min(len(x), wanted)))
    return each, cdiv(len(x), each)


def forward(x: Tensor, w: Tensor, before: Tensor | None, act: str | None) -> tuple[Tensor, Tensor]:
    N, H, W, C = x.shape
    block, align = 64 * WARPS, alignment(C)
    each, parts = _split(x, block, PROGRAMS)
    y, part = torch.empty_like(x), partial_moments(x, parts, C)
    launch(
        _forward, (cdiv(C, block), parts), x, part if before is None else before, w, y, part, N, C // align, each,
        align, before is not None, act, w.shape[-1], H, W, block, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return y, part


def backward(
    g: Tensor, y: Tensor, coef: Tensor, x: Tensor, w: Tensor, before: Tensor | None, act: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    (N, H, W, C), K = x.shape, w.shape[-1]
    block, align = 32 * WARPS, alignment(C)
    each, parts = _split(x, block, 4)
    out = torch.empty_like(x)
    part = partial_sums(x, parts, C) if before is not None else coef
    sums = torch.empty((parts, K * K, C), dtype=torch.float32, device=x.device)
    launch(
        _backward, (cdiv(C, block), parts), g, y, coef, x, coef if before is None else before, w, out, part, sums,
        N, C // align, each, align, before is not None, act, K, H, W, block, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return out, part, sum_parts(sums, w, K * K, 1)
