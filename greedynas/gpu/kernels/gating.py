# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton kernels for squeeze-and-excitation: sums over the pixels of each image, and the gradient through the gate."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

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


@triton.jit(do_not_specialize=["pixels", "CA"])
def _image_sums(
    x_ptr, g_ptr, norm_ptr, out_ptr, pixels, CA,
    ALIGN: tl.constexpr, GRADIENT: tl.constexpr, ACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = CA * ALIGN
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    scale = affine_row(norm_ptr, 2, C, c, c < C)[None, :]
    shift = affine_row(norm_ptr, 3, C, c, c < C)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    image = tl.program_id(1).to(tl.int64) * pixels * C
    for tile in range(0, tl.cdiv(pixels, BLOCK_R)):
        at, inside = tile_of_rows(tile, c, pixels, C, BLOCK_R)
        at += image
        z = activate(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale + shift, ACT)
        if GRADIENT:
            z *= tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(inside, z, 0.0)
    tl.store(out_ptr + tl.program_id(1) * C + c, tl.sum(total, 0), mask=c < C)


@triton.jit(do_not_specialize=["M", "CA", "pixels"])
def _gate_gradient(
    g_ptr, gate_ptr, squeeze_ptr, y_ptr, norm_ptr, part_ptr, M, CA, pixels,
    ALIGN: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Replace the gradient of act(z) * gate by that of z, with that of the squeezed act(z); sum for BatchNorm."""
    C = CA * ALIGN
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean = affine_row(norm_ptr, 0, C, c, c < C)[None, :]
    scale = affine_row(norm_ptr, 2, C, c, c < C)[None, :]
    shift = affine_row(norm_ptr, 3, C, c, c < C)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(M, BLOCK_R), tl.num_programs(1)):
        at, inside = tile_of_rows(tile, c, M, C, BLOCK_R)
        image = (tile * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]) // pixels * C + c[None, :]
        g = tl.load(squeeze_ptr + image, mask=inside, other=0.0)
        if GATE:
            gate = tl.load(gate_ptr + image, mask=inside, other=0.0).to(tl.float32)
            g += gate * tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = backward_through(g, y * scale + shift, ACT)
        total += g
        product += g * (y - mean)
        tl.store(g_ptr + at, g.to(g_ptr.dtype.element_ty), mask=inside)
    store_sums(part_ptr, C, c, total, product)


def image_sums(x: Tensor, norm: Tensor, act: str | None, images: int, g: Tensor | None = None) -> Tensor:
    """Return the sum of act(z), or of act(z) * g, over the pixels of each image: float32 (images, C)."""
    M, C = size(x)
    block_c, align = columns(C), alignment(C)
    out = torch.empty((images, C), dtype=torch.float32, device=x.device)
    launch(
        _image_sums, (cdiv(C, block_c), images), x, x if g is None else g, norm, out, M // images, C // align,
        align, g is not None, act, 2048 // block_c, block_c,
    )  # fmt: skip
    return out


def gate_gradient(g: Tensor, gate: Tensor | None, squeeze: Tensor, y: Tensor, norm: Tensor, act: str | None) -> Tensor:
    """Replace the gradient g of act(z) * gate by that of z, in place, and return BatchNorm's partial sums.

    `squeeze` is the gradient of act(z) by the mean over pixels, (images, C) like the gate. Without a gate, it is the
    only gradient, and the values of g are ignored.
    """
    M, C = size(y)
    block_c = columns(C)
    block_r = 2048 // block_c
    programs = row_programs(y, block_r, block_c)
    part, align = partial_sums(y, programs, C), alignment(C)
    launch(
        _gate_gradient, (cdiv(C, block_c), programs), g, squeeze if gate is None else gate, squeeze, y, norm, part,
        M, C // align, M // len(squeeze), align, gate is not None, act, block_r, block_c,
    )  # fmt: skip
    return part
