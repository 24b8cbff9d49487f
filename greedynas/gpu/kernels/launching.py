"""Launching of Triton's kernels: the sizes of grids, and a fast path to kernels that are already compiled."""

from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Dry:
    """A switch: while it is `on`, kernels are compiled but not run."""

    on = False


class Layout(NamedTuple):
    """The positions of a kernel's first number and first constant among its arguments; the tensors come first."""

    numbers: int
    constants: int


_compiled: dict[Any, Any] = {}
_layouts: dict[int, Layout] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel with these arguments: tensors (the first one sets the device), numbers, constants.

    Products and sums may be fused. Triton itself inspects all arguments of every call to find the compiled kernel,
    which takes longer than many kernels run. Ours depend only on types, constants and alignment, so they are looked up
    by these.
    """
    if Dry.on:
        kernel.warmup(*args, grid=grid, enable_fp_fusion=True, **options)
        return
    device = args[0].get_device()
    if device < 0:  # Triton's interpreter
        kernel[grid](*args, enable_fp_fusion=True, **options)
        return
    layout = _layouts.get(id(kernel)) or _layout(kernel)
    tensors = args[: layout.numbers]
    pointers = [tensor.data_ptr() for tensor in tensors]
    types = [tensor.dtype for tensor in tensors]
    key = (id(kernel), device, *types, *args[layout.constants :], *options.values())
    known = _compiled.get(key)
    aligned = reduce(or_, pointers) & 15 == 0
    if known is None or not aligned:
        made = kernel[grid](*args, enable_fp_fusion=True, **options)
        if aligned:
            _compiled[key] = made.run, made.function, made.packed_metadata
        return
    run, function, metadata = known
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *pointers, *args[layout.numbers :])


def _layout(kernel: Any) -> Layout:
    constant = [parameter.is_constexpr for parameter in kernel.params].index(True)
    pointer = [parameter.name.endswith("_ptr") for parameter in kernel.params]
    layout = _layouts[id(kernel)] = Layout(pointer.index(False), constant)
    return layout


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@cache
def power_of_two(size: int) -> int:
    """Return the next power of two, and at least 16, the smallest side of a matrix product."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def alignment(*channels: int) -> int:
    """Return the largest power of two up to 8 that divides every width; by it, Triton sees aligned 16-byte accesses."""
    return next(size for size in (8, 4, 2, 1) if all(width % size == 0 for width in channels))


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, by which grids are sized."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def partial_moments(y: Tensor, rows: int, width: int) -> Tensor:
    """Return memory for count, mean and squared deviations of every channel in every part, and for their `norm`."""
    return y.new_empty((4 + 3 * rows, width), dtype=torch.float32)


def partial_sums(y: Tensor, rows: int, width: int) -> Tensor:
    """Return memory for two sums of every channel in every part, and for their `coef`."""
    return y.new_empty((3 + 2 * rows, width), dtype=torch.float32)
