"""The interface to the GPU engine: the kernels of a space are compiled before the first path needs them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from greedynas.gpu import ends
from greedynas.gpu.engine import capable, mode
from greedynas.gpu.recording import SMALL
from greedynas.models.blocks import initialise, make_block


def prepare(net: Any, batch: int) -> None:
    """Compile the kernels for a bf16 training of a supernet where the engine will run: on a GPU, with large images.

    Small images need none: their steps are recorded as CUDA graphs.
    """
    device = next(net.parameters()).device
    if (
        net.recordable
        and device.type == "cuda"
        and mode() != "off"
        and capable(device)
        and net.space.image_size > SMALL
    ):
        warm_up(net.space, batch, device)


def warm_up(space: Any, batch: int, device: torch.device | str = "cuda", training: bool = True) -> None:
    """Compile and load every kernel that a space needs at this batch size, so that no path has to wait for one.

    Kernels are compiled in threads and stay in Triton's cache on disk, so a second start takes seconds.
    """
    blocks = []
    for layer in {*space.stem_layers, *space.layers, *space.head_layers}:
        for op in layer.ops:
            if not layer.is_nothing(op):
                blocks.append((make_block(op, layer, space.activation), layer))
    device = torch.device(device)
    for dry in (True, False):
        with _compiling() if dry else nullcontext():
            for block, layer in blocks:
                if not dry:
                    initialise(block)
                block.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
                _try_out(
                    block, layer, batch, device, training, layer == space.stem_layers[0], (layer,) == space.head_layers
                )
                if not dry:
                    block.to("meta")
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _try_out(
    block: nn.Module, layer: Any, batch: int, device: torch.device, training: bool, first: bool, last: bool
) -> None:
    shape = (batch, layer.in_channels, layer.in_size, layer.in_size)
    x = torch.zeros(shape, device=device, dtype=torch.float32 if first else torch.bfloat16)
    x = x.to(memory_format=torch.channels_last).requires_grad_(training and not first)  # images need no gradient
    with torch.autocast(device.type, torch.bfloat16), torch.set_grad_enabled(training):
        out = ends.pooled(block, x) if last and ends.pools(block, x) else block(x)
    if training:
        out.backward(torch.zeros_like(out))
        block.zero_grad()


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile kernels in the background instead of running them; when the context ends, all are compiled."""
    import triton  # type: ignore[import-untyped]

    from greedynas.gpu.kernels.launching import Dry

    Dry.on = True
    try:
        # The mode belongs to this thread, so the backward pass has to stay in it.
        with (
            torch.autograd.set_multithreading_enabled(False),
            ThreadPoolExecutor() as pool,
            triton.AsyncCompileMode(pool),
        ):
            yield
    finally:
        Dry.on = False
