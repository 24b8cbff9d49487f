# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton has no unpacking)
"""Loading of filters, shared by the depthwise kernels."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

WARPS = 4


@triton.jit
def zeros(count: tl.constexpr, BLOCK: tl.constexpr):
    values = ()
    for _ in tl.static_range(count):
        values = values + (tl.zeros((BLOCK,), tl.float32),)
    return values


@triton.jit
def load_filter(w_ptr, c, inside, K: tl.constexpr):
    w = ()
    for i in tl.static_range(K * K):
        w = w + (tl.load(w_ptr + c * (K * K) + i, mask=inside, other=0.0).to(tl.float32),)
    return w
