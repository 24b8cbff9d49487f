"""The lower bound on the time of a path on a machine: its activations, moved at the speed of a plain copy.

Every convolution reads its input once and writes its output once. BatchNorm, activation and residual are assumed to be
free, as if they were part of the convolutions. A training step moves three times as much: in the backward pass, a
convolution reads the gradient of its output, the output (for the gradient of BatchNorm) and its input, and writes the
gradient of the input, which adds 2 · (input + output) to the forward pass. Weights are not counted, because they are
small compared to a batch of activations.
"""

import statistics
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from greedynas.models.blocks import make_block
from greedynas.runtime.stopwatch import seconds
from greedynas.spaces.costs import CostTable
from greedynas.spaces.space import Layer, Space

TRAINING = 3  # traffic of a training step, in forward passes
COPIED = {"cuda": 2**31, "cpu": 2**27}  # bytes, far more than fit into any cache
REPEATS = 7


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second that a large copy reads and writes, as the median of a few copies."""
    source = torch.ones(COPIED.get(device.type, 2**27) // 4, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(REPEATS + 1):
        times.append(seconds(lambda: target.copy_(source), device))
    return 2 * source.nbytes / statistics.median(times[1:])


def traffic_table(space: Space) -> CostTable:
    """Return the number of activation values that a forward pass of one image reads and writes, by (layer, op)."""
    entries = np.zeros((len(space.layers), max(space.num_ops)), dtype=np.int64)
    for i, layer in enumerate(space.layers):
        for j, op in enumerate(layer.ops):
            entries[i, j] = _values_moved(layer, op, space.activation)
    return CostTable(entries, stem_traffic(space) + _fixed(space.head_layers, space), space.num_ops)


def stem_traffic(space: Space) -> int:
    return _fixed(space.stem_layers, space)


def _fixed(layers: tuple[Layer, ...], space: Space) -> int:
    return sum(_values_moved(layer, layer.ops[0], space.activation) for layer in layers)


def _values_moved(layer: Layer, op: str, activation: str) -> int:
    """Count the inputs and outputs of a block's convolutions (in squeeze-and-excitation, one value per channel)."""
    moved = 0

    def count(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal moved
        moved += inputs[0].numel() + output.numel()

    with torch.device("meta"), torch.no_grad():
        block = make_block(op, layer, activation).eval()
        for module in block.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(count)
        block(torch.empty(1, layer.in_channels, layer.in_size, layer.in_size))
    return moved
