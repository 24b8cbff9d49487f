"""Devices and precisions: the hardware that a run computes on, and its number format."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from greedynas.runtime import engine_mode
from greedynas.runtime.cpu.allocator import keep_freed_memory
from greedynas.runtime.cpu.depthwise import QuickDepthwise
from greedynas.runtime.cpu.threads import adapt_threads
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger


def full_precision(logits: Tensor) -> Tensor:
    """Return logits as float32 if they are bf16 or float16; float64 stays float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextmanager
def autocast(device: torch.device, precision: str) -> Iterator[None]:
    """Set up a forward pass: bf16 autocast for the precision "bf16"; on a CPU quicker gradients, which need no set-up later."""
    with ExitStack() as stack:
        if device.type == "cpu" and torch.is_grad_enabled() and engine_mode.mode() != "off":
            stack.enter_context(QuickDepthwise())
        if precision == "bf16":
            stack.enter_context(torch.autocast(device.type, torch.bfloat16))
        yield


def prepare(device: torch.device) -> None:
    """Set this process up for training or evaluation on a CPU, and look at the load. Call it at every step: it is cheap."""
    if device.type == "cpu" and engine_mode.mode() != "off":
        keep_freed_memory()
        adapt_threads()


def choose_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is the best device of this machine. Every rank gets a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps_works() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise GreedyNASError("device is cuda, but PyTorch sees no GPU here; use device=cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise GreedyNASError("device is mps, but PyTorch sees no Apple GPU here; use device=cpu")
    if ranks.size() > 1 and name != "cpu":
        if name != "cuda" or ranks.local_size() > torch.cuda.device_count():
            raise GreedyNASError(
                f"{ranks.local_size()} ranks on this machine need one GPU each and device=auto or cuda; PyTorch sees "
                f"{torch.cuda.device_count()} GPUs and device is {name}; start fewer ranks or use device=cpu"
            )
        return torch.device("cuda", ranks.local_rank())
    return torch.device(name)


@cache
def mps_works() -> bool:
    """Return whether an Apple GPU is available and can train; not every PyTorch has all operations for it."""
    if not torch.backends.mps.is_available():
        return False
    try:
        block = nn.Sequential(nn.Conv2d(8, 8, 5, 2, 2, groups=8, bias=False), nn.BatchNorm2d(8), nn.Hardswish()).to(
            "mps"
        )
        block(torch.ones(2, 8, 8, 8, device="mps")).mean().backward()
        return True
    except (RuntimeError, NotImplementedError) as error:
        logger.info("the Apple GPU is not used: %s", error)
        return False


def cpu_has_bf16() -> bool:
    """Return whether the CPU has native bf16 instructions; emulated bf16 is slower than fp32."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(check() for name in checks if callable(check := getattr(torch.cpu, name, None)))


def cpu_name() -> str:
    """Return the name of the processor, as far as the system knows it, and the number of its CPUs."""
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        match = None
    name = match[1].strip() if match else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} CPUs"
