"""Devices and precisions: what a run computes on, and in which number format."""

import os
import platform
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger


def full_precision(logits: Tensor) -> Tensor:
    """bf16 logits as float32; float64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def autocast(device: torch.device, precision: str) -> Any:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps_works() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise GreedyNASError("device is cuda, but PyTorch sees no GPU here; use device=cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise GreedyNASError("device is mps, but PyTorch sees none here; use device=cpu")
    if ranks.size() > 1 and name != "cpu":
        if name != "cuda" or ranks.local_size() > torch.cuda.device_count():
            raise GreedyNASError(
                f"{ranks.local_size()} ranks on this machine need as many GPUs ({torch.cuda.device_count()} are "
                f"seen) with device=auto or cuda, here it is {name}; start fewer ranks or use device=cpu"
            )
        return torch.device("cuda", ranks.local_rank())
    return torch.device(name)


@cache
def mps_works() -> bool:
    """Return whether a Mac's GPU is there and can train: not every PyTorch has all operations for it."""
    if not torch.backends.mps.is_available():
        return False
    try:
        block = nn.Sequential(nn.Conv2d(8, 8, 5, 2, 2, groups=8, bias=False), nn.BatchNorm2d(8), nn.Hardswish()).to(
            "mps"
        )
        block(torch.ones(2, 8, 8, 8, device="mps")).mean().backward()
        return True
    except (RuntimeError, NotImplementedError) as error:
        logger.info("the Mac's GPU is not used: %s", error)
        return False


def cpu_has_bf16() -> bool:
    """Native bf16 instructions; emulated ones are slower than fp32."""
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
