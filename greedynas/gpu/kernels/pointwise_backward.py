# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, it does not unpack them)
"""Both gradients of a 1x1 convolution in one kernel, so that its wide tensors are read once; see `pointwise.py`.

The gradient of the weights stays in registers while the kernel iterates over the rows. It has to fit there, so wide
convolutions, which work on small maps, use one kernel per gradient.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from greedynas.gpu.kernels import pointwise, products
from greedynas.gpu.kernels.launching import alignment, cdiv, launch, partial_sums, power_of_two, processors
from greedynas.gpu.kernels.norms import activate, affine_row, backward_through, size, store_sums
from greedynas.gpu.kernels.pointwise import fold_loaded, gradient_tile, load_tile
from greedynas.gpu.kernels.weights import sum_parts


@triton.jit(do_not_specialize=["M", "KA", "NA"])
def _narrowing(
    g_ptr, y_ptr, coef_ptr, w_ptr, x_ptr, norm_ptr, out_ptr, part_ptr, sums_ptr, M, KA, NA,
    ALIGN: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Propagate from K outputs, all in one step, to BN of N inputs: to the z of the BatchNorm before, with its sums."""
    K = KA * ALIGN
    N = NA * ALIGN
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    r = tl.arange(0, BM)
    mean = affine_row(norm_ptr, 0, N, n, n < N)[None, :]
    scale = affine_row(norm_ptr, 2, N, n, n < N)[None, :]
    shift = affine_row(norm_ptr, 3, N, n, n < N)[None, :]
    ROWS: tl.constexpr = 256 * WARPS // BN if 256 * WARPS // BN < BM else BM
    total = tl.zeros((ROWS, BN), tl.float32)
    product = tl.zeros((ROWS, BN), tl.float32)
    sums = tl.zeros((BN, BK), tl.float32)
    w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
    for tile in range(tl.program_id(1), tl.cdiv(M, BM), tl.num_programs(1)):
        first = tl.cast(tile, tl.int64) * BM
        rows = M - tile * BM
        g = gradient_tile(g_ptr + first * K, y_ptr + first * K, coef_ptr, r, k, rows, K)
        if rows < BM:  # beyond the last row, it is constant, not zero
            g = tl.where(r[:, None] < rows, g, 0.0)
        acc = tl.dot(g, w)
        at = first * N + (r[:, None] * N + n[None, :])
        inside = (r[:, None] < rows) & (n[None, :] < N)
        raw = tl.load(x_ptr + at, mask=inside, other=0.0)
        x = raw.to(tl.float32)
        z = x * scale + shift
        sums = tl.dot(tl.trans(activate(z, ACT).to(raw.dtype)), g, sums)
        acc = backward_through(acc, z, ACT)
        total += fold_loaded(acc, BM, BN, ROWS)
        product += fold_loaded(acc * (x - mean), BM, BN, ROWS)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    store_sums(part_ptr, N, n, total, product)
    part = sums_ptr + tl.program_id(1).to(tl.int64) * N * K
    tl.store(part + k[None, :] * N + n[:, None], sums, mask=(n[:, None] < N) & (k[None, :] < K))


@triton.jit(do_not_specialize=["M", "KA", "NA"])
def _widening(
    g_ptr, y_ptr, coef_ptr, w_ptr, x_ptr, add_ptr, out_ptr, sums_ptr, M, KA, NA,
    ALIGN: tl.constexpr, ADD: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Propagate from K outputs, in CHUNKS of BK, to N inputs."""
    K = KA * ALIGN
    N = NA * ALIGN
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    r = tl.arange(0, BM)
    sums = ()
    for _ in tl.static_range(CHUNKS):
        sums = sums + (tl.zeros((BK, BN), tl.float32),)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * BM
        rows = M - tile * BM
        x = load_tile(x_ptr + first * N, r, n, rows, N)
        acc = tl.zeros((BM, BN), tl.float32)
        added = ()
        for i in tl.static_range(CHUNKS):
            c = i * BK + k
            g = gradient_tile(g_ptr + first * K, y_ptr + first * K, coef_ptr, r, c, rows, K)
            w = tl.load(w_ptr + c[:, None] * N + n[None, :], mask=(n[None, :] < N) & (c[:, None] < K), other=0.0)
            acc = tl.dot(g, w, acc)
            added = added + (tl.dot(tl.trans(g), x, sums[i]),)
        sums = added
        at = first * N + (r[:, None] * N + n[None, :])
        inside = (r[:, None] < rows) & (n[None, :] < N)
        if ADD:
            acc += tl.load(add_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    part = sums_ptr + tl.program_id(0).to(tl.int64) * N * K
    for i in tl.static_range(CHUNKS):
        c = i * BK + k
        tl.store(part + c[:, None] * N + n[None, :], sums[i], mask=(c[:, None] < K) & (n[None, :] < N))


@dataclass(frozen=True)
class Cut:
    """The rows that are loaded at a time, and the programs per multiprocessor."""

    rows: int
    programs: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None

    @cached_property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | ({"maxnreg": self.registers} if self.registers else {})


# By the narrow width: the fastest of a few on an H200. Widths that are missing here are faster with one kernel per
# gradient.
NARROWING = {32: Cut(64, 6, stages=3), 64: Cut(64, 6, stages=3), 128: Cut(64, 4)}
WIDENING = {16: Cut(64, 4, stages=3, registers=128), 32: Cut(64, 6, registers=168), 64: Cut(64, 4)}
WIDEST = {16: 256, 32: 256, 64: 128}  # outputs


def narrowing(
    g: Tensor, y: Tensor, coef: Tensor, w: Tensor, weight: Tensor, x: Tensor, before: Tensor, act: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for y = act(BatchNorm `before`(x)) @ w.T, the gradient of z, BatchNorm's partial sums, and `weight`'s."""
    if products.backward_fits(g, x):
        return products.narrowing(g, y, coef, w, weight, x, before, act)
    (M, K), N = size(g), x.shape[-1]
    cut = NARROWING.get(power_of_two(K))
    if cut is None:
        w_grad = pointwise.weight_gradient(g, y, coef, x, before, act, like=weight)
        return *pointwise.input_gradient(g, y, coef, w, x=x, before=before, act=act), w_grad
    wide, align = cdiv(N, 64), alignment(K, N)
    programs = max(1, min(cdiv(M, cut.rows), cdiv(cut.programs * processors(g.device), wide)))
    out, part = torch.empty_like(x), partial_sums(g, programs, N)
    sums = part.new_empty((programs, K, N))
    launch(
        _narrowing, (wide, programs), g, y, coef, w, x, before, out, part, sums, M, K // align, N // align,
        align, act, cut.rows, 64, power_of_two(K), cut.warps, **cut.options,
    )  # fmt: skip
    return out, part, sum_parts(sums, weight)


def widening(
    g: Tensor, y: Tensor, coef: Tensor, w: Tensor, weight: Tensor, x: Tensor,
    add: Tensor | None = None, into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of y = x @ w.T: of x, plus `add`, and of `weight`."""
    if products.backward_fits(g, x):
        return products.widening(g, y, coef, w, weight, x, add, into)
    (M, K), N = size(g), x.shape[-1]
    cut = WIDENING.get(power_of_two(N))
    if cut is None or WIDEST[power_of_two(N)] < K:
        w_grad = pointwise.weight_gradient(g, y, coef, x, like=weight)
        return pointwise.input_gradient(g, y, coef, w, add=add, into=into)[0], w_grad
    align = alignment(K, N)
    programs = min(cdiv(M, cut.rows), cut.programs * processors(g.device))
    out = torch.empty_like(x) if into is None else into
    sums = torch.empty((programs, K, N), dtype=torch.float32, device=g.device)
    launch(
        _widening, (programs,), g, y, coef, w, x, x if add is None else add, out, sums, M, K // align, N // align,
        align, add is not None, cdiv(K, 64), cut.rows, power_of_two(N), 64, **cut.options,
    )  # fmt: skip
    return out, sum_parts(sums, weight)
