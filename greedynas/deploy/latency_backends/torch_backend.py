"""The timing of blocks in plain PyTorch, on the CPU or on a GPU."""

import time
from collections.abc import Sequence
from copy import deepcopy
from typing import ClassVar

import torch
from torch import Tensor, nn

from greedynas.deploy.latency_backends.backend import LatencyBackend, make_block_of, make_image
from greedynas.deploy.timing import Runner
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.space import Layer

DIFFERENCE = 1e-3  # of the weights of two copies of a part, relative


class TorchBackend(LatencyBackend):
    """The latency backend for plain PyTorch: eager execution, eval mode, channels last."""

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def __init__(self, device: str, threads: int):
        super().__init__(device, threads)
        if device == "cuda" and not torch.cuda.is_available():
            raise GreedyNASError("device is cuda, but PyTorch sees no GPU here; use cpu")
        self._device = torch.device(device)
        self.backend = f"torch {torch.__version__}"
        if device == "cuda":
            self.device, self.threads = torch.cuda.get_device_name(), None

    def parts(self, layer: Layer, ops: Sequence[str], activation: str) -> list[nn.Module]:
        blocks = [make_block_of(layer, op, activation) for op in ops]
        return [block.to(self._device, memory_format=torch.channels_last) for block in blocks]  # type: ignore[call-overload]

    def runner(self, parts: Sequence[nn.Module], layer: Layer, side_by_side: bool = False) -> Runner:
        net = compose(parts, side_by_side)
        x = make_image(layer).to(self._device, memory_format=torch.channels_last)

        @torch.inference_mode()
        def on_cpu() -> float:
            start = time.perf_counter_ns()
            net(x)
            return (time.perf_counter_ns() - start) / 1e6

        @torch.inference_mode()
        def on_cuda() -> float:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            net(x)
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop))

        return on_cuda if self._device.type == "cuda" else on_cpu


def compose(parts: Sequence[nn.Module], side_by_side: bool) -> nn.Module:
    """Return a network of copies of parts, whose weights are separate and differ a little.

    Shared weights would stay in the cache, and converters merge parallel branches whose weights are equal.
    """
    copies = [deepcopy(part) for part in parts]
    with torch.no_grad():
        for i, part in enumerate(parts):
            number = sum(earlier is part for earlier in parts[:i])
            for weight in copies[i].parameters():
                weight.mul_(1 + number * DIFFERENCE)
    return (SideBySide(copies) if side_by_side else nn.Sequential(*copies)).eval()


class SideBySide(nn.Module):
    """The sum of several blocks with the same input."""

    def __init__(self, blocks: Sequence[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (block(x) for block in self.blocks)
        for other in others:
            first = first + other
        return first
