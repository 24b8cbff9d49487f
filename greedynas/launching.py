"""How Triton's kernels are started: the sizes of grids, and a short way to kernels that are compiled already."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


class Dry:
    """While `on`, kernels are compiled, not run."""

    on = False


_compiled: dict[Any, Any] = {}
_first_constants: dict[int, int] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel: tensors (the first one tells the device), numbers, constants. Products and sums may fuse.

    For every call Triton inspects all arguments to find the compiled kernel, which takes longer than many a kernel runs. Ours
    depend on types, constants and alignment alone, so that they are found by these.
    """
    if Dry.on:
        kernel.warmup(*args, grid=grid, enable_fp_fusion=True, **options)
        return
    if not args[0].is_cuda:  # Triton's interpreter
        kernel[grid](*args, enable_fp_fusion=True, **options)
        return
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    constants = args[_first_constant(kernel) :]
    key = (id(kernel), args[0].get_device(), *[tensor.dtype for tensor in tensors], *constants, *options.values())
    known = _compiled.get(key)
    if known is None or any(tensor.data_ptr() % 16 for tensor in tensors):
        made = kernel[grid](*args, enable_fp_fusion=True, **options)
        if all(tensor.data_ptr() % 16 == 0 for tensor in tensors):
            _compiled[key] = made
    else:
        known[(*grid, 1, 1)[:3]](*args)


def _first_constant(kernel: Any) -> int:
    place = _first_constants.get(id(kernel))
    if place is None:
        place = _first_constants[id(kernel)] = [parameter.is_constexpr for parameter in kernel.params].index(True)
    return place


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@cache
def power_of_two(size: int) -> int:
    """The next one, and at least 16: the smallest side of a matrix product."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def alignment(*channels: int) -> int:
    """The largest power of two up to 8 that divides every width: Triton then knows that 16-byte accesses are aligned."""
    return next(size for size in (8, 4, 2, 1) if all(width % size == 0 for width in channels))


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors, the unit in which grids are sized."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def partial_moments(y: Tensor, rows: int, width: int) -> Tensor:
    """Room for count, mean and squared deviations of every channel by every program."""
    return torch.empty((3, rows, width), dtype=torch.float32, device=y.device)


def partial_sums(y: Tensor, rows: int, width: int) -> Tensor:
    """Room for two sums of every channel by every program."""
    return torch.empty((2, rows, width), dtype=torch.float32, device=y.device)
