"""Clocks for work that may run on a GPU, where it continues after the call that started it has returned."""

import time
from collections.abc import Callable

import torch


def wait(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def clock(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the wall-clock seconds and the CPU seconds of this process that one call takes."""
    wait(device)
    start, cpu = time.perf_counter(), time.process_time()
    work()
    wait(device)
    return time.perf_counter() - start, time.process_time() - cpu


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds that one call takes."""
    return clock(work, device)[0]
