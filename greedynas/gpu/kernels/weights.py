# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton kernels for the weights of every convolution: a cast, and the sum over the parts of their gradient."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from greedynas.gpu.kernels.launching import cdiv, launch


@triton.jit(do_not_specialize=["R", "A", "B", "C"])
def _sum_parts(part_ptr, out_ptr, R, A, B, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sum (R, A, B, C) over R and B into (C, A)."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    a = tl.program_id(1)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, R * B, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)[:, None]
        at = ((r // B).to(tl.int64) * A + a) * B + r % B
        total += tl.load(part_ptr + at * C + c[None, :], mask=(r < R * B) & (c < C)[None, :], other=0.0)
    tl.store(out_ptr + c * A + a, tl.sum(total, 0), mask=c < C)


@triton.jit(do_not_specialize=["first", "second"])
def _cast(a_ptr, b_ptr, a_out_ptr, b_out_ptr, first, second, BLOCK: tl.constexpr):
    blocks = tl.cdiv(first, BLOCK)
    if tl.program_id(0) < blocks:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(a_out_ptr + i, tl.load(a_ptr + i, mask=i < first).to(a_out_ptr.dtype.element_ty), mask=i < first)
    else:
        i = (tl.program_id(0) - blocks) * BLOCK + tl.arange(0, BLOCK)
        tl.store(b_out_ptr + i, tl.load(b_ptr + i, mask=i < second).to(b_out_ptr.dtype.element_ty), mask=i < second)


def sum_parts(part: Tensor, like: Tensor, taps: int = 1, tiles: int = 1) -> Tensor:
    """Return the sum of the parts of a weight's gradient, (parts, taps, tiles, channels), in the layout of `like`.

    In that layout, neither autograd nor the optimizer has to copy it.
    """
    out = torch.empty_like(like, dtype=torch.float32)
    channels = like.numel() // taps
    parts = part.numel() // (tiles * like.numel())
    block_r, block_c = (512, 8) if parts * tiles > 128 else (64, 64)
    grid = (cdiv(channels, block_c), taps)
    launch(_sum_parts, grid, part, out, parts, taps, tiles, channels, block_r, block_c, num_warps=8)
    return out


def cast(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two weights in another type, cast by one kernel."""
    if a.dtype is dtype:
        return a, b
    a_out, b_out = torch.empty_like(a, dtype=dtype), torch.empty_like(b, dtype=dtype)
    first, second = a.numel(), b.numel()
    launch(_cast, (cdiv(first, 2048) + cdiv(second, 2048),), a, b, a_out, b_out, first, second, 2048)
    return a_out, b_out
