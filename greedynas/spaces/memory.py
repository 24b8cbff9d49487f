"""Memory of networks on microcontrollers in int8: the peak of the activations (`ram`) and the parameters (`flash`).

A microcontroller computes a network op by op and keeps only the tensors that are still needed. A tensor has one byte a
value. Convolutions include BatchNorm and the activation behind them; all other ops write a new tensor. A strided
convolution of an image with an even side first writes a padded copy, as in LiteRT, whose own padding is one-sided there
and would give another result. At each op, its inputs, its output and the tensors that a later op needs (the input of a residual block, the other branch of a
ShuffleNet unit) are in memory. Between two layers of a path, there is a single tensor, the output of the first one,
and its size does not depend on the path. So each op of each layer has a peak of its own, and the peak of a path is the
largest of those of its layers: a limit on it forbids single ops (`costs.PeakTable`), which keeps the sampling of
feasible paths exact.

Flash has one byte for each weight, and four for the bias and four for the scale of each output channel. The structure
of a file format, the code of the runtime and its bookkeeping come on top of both numbers.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.costs import CostTable, PeakTable, SizedCostTable
from greedynas.spaces.ops import CUSTOM, Op, is_nothing, op_cost, out_size, parse_op, squeeze_channels

PER_CHANNEL = 8  # bytes of an output channel: its bias (int32) and its scale (float32)
MEMORY_COSTS = ("ram", "flash")


def cost_tables_for(space: Any, costs: Iterable[str]) -> Mapping[str, CostTable]:
    """Return the cost tables of a space, with those of memory if one of the named costs needs them."""
    return {**space.cost_tables, **(memory_tables(space) if set(costs) & set(MEMORY_COSTS) else {})}


def memory_tables(space: Any) -> dict[str, CostTable]:
    """Return the tables `ram` (a PeakTable) and `flash` of a space, in bytes.

    Raises:
        GreedyNASError: The space has ops whose memory is not known: registered ones, or blocks of a pretrained network.
    """
    if space.sizes:
        at_sizes = [memory_tables(space.adapt(image_size=size)) for size in space.sizes]
        return {cost: SizedCostTable.of([tables[cost] for tables in at_sizes]) for cost in MEMORY_COSTS}
    entries = np.zeros((2, len(space.layers), max(space.num_ops)), dtype=np.int64)
    for i, layer in enumerate(space.layers):
        for j, op in enumerate(layer.ops):
            entries[:, i, j] = layer_memory(layer, op)
    fixed = [
        layer_memory(layer, layer.ops[0]) for layer in (*space.stem_layers, *space.head_layers, *space.neck_layers)
    ]
    fixed.append(classifier_memory(space))
    return {
        "ram": PeakTable(entries[0], max(ram for ram, _ in fixed), space.num_ops),
        "flash": CostTable(entries[1], sum(flash for _, flash in fixed), space.num_ops),
    }


def layer_memory(layer: Any, op: str) -> tuple[int, int]:
    """Return the peak of activations and the flash of an op in a layer, in bytes."""
    if layer.block is not None:
        raise GreedyNASError("limits on memory are not available for spaces around a pretrained network")
    if parse_op(op).family == CUSTOM:
        raise GreedyNASError(f"the memory of the registered op {op} is not known, so ram and flash cannot be limited")
    shape = layer.in_channels, layer.out_channels, layer.stride
    return op_peak(op, *shape, layer.in_size), op_flash(op, *shape, layer.in_size)


def classifier_memory(space: Any) -> tuple[int, int]:
    """Return the peak of activations and the flash of pooling and classifier, in bytes."""
    last = (space.head_layers or space.layers)[-1]
    pooling = last.out_channels * last.out_size**2 + last.out_channels
    classifier = space.features + space.num_classes
    return max(pooling, classifier), space.features * space.num_classes + PER_CHANNEL * space.num_classes


def op_peak(name: str, in_channels: int, out_channels: int, stride: int, size: int) -> int:
    """Return the largest number of bytes that are in memory while an op is computed on a `size` x `size` input."""
    op = parse_op(name)
    whole, result = in_channels * size**2, out_channels * out_size(size, stride) ** 2
    if is_nothing(name, in_channels, out_channels, stride):
        return whole
    if op.family == "MB":
        return _mb_peak(op, in_channels, out_channels, stride, size)
    if op.family in ("SHUFFLE", "XCEPTION"):
        return _shuffle_peak(op, in_channels, out_channels, stride, size)
    kernel = 1 if op.family == "ID" else op.kernel
    return _convolution(0, whole, _padded(in_channels, size, kernel, stride), result)


def _padded(channels: int, size: int, kernel: int, stride: int) -> int:
    """Return the bytes of the padded copy that a convolution needs, or 0."""
    return channels * (size + kernel - 1) ** 2 if stride > 1 and kernel > 1 and size % 2 == 0 else 0


def _convolution(beside: int, given: int, padded: int, result: int, needed: int = 0) -> int:
    """Return the peak of a convolution beside other tensors; `needed` is its input if a later op needs that, too."""
    if not padded:
        return beside + given + result
    return beside + padded + max(given, needed + result)


def _mb_peak(op: Op, in_channels: int, out_channels: int, stride: int, size: int) -> int:
    before, after = size**2, out_size(size, stride) ** 2  # pixels
    hidden, residual = op.hidden(in_channels), in_channels == out_channels and stride == 1
    whole, kept = in_channels * before, in_channels * before if residual else 0
    peaks, wide, other = [], whole, 0  # `wide` is the input of the next convolution, `other` a tensor beside it
    if op.expansion != 1:
        peaks.append(whole + hidden * before)
        wide, other = hidden * before, kept
    narrow = hidden * after
    peaks.append(_convolution(other, wide, _padded(hidden, size, op.kernel, stride), narrow))
    if op.se:
        squeezed = squeeze_channels(hidden)
        peaks += [kept + narrow + hidden, kept + narrow + hidden + squeezed, kept + 2 * narrow + hidden]
    peaks.append(kept + narrow + out_channels * after)
    peaks += [3 * out_channels * after] if residual else []
    return max(peaks)


def _shuffle_peak(op: Op, in_channels: int, out_channels: int, stride: int, size: int) -> int:
    before, after = size**2, out_size(size, stride) ** 2  # pixels
    source = in_channels // 2 if stride == 1 else in_channels
    middle, grown = out_channels // 2, out_channels - source
    start, narrow, last = source * before, middle * after, grown * after
    if stride == 1:
        peaks, kept = [2 * in_channels * before], start
    else:  # the shortcut comes first, beside the input, which the other branch needs
        kept = source * after
        peaks = [_convolution(0, start, _padded(source, size, op.kernel, stride), kept, needed=start), start + 2 * kept]
    if op.family == "SHUFFLE":
        wide = middle * before
        peaks += [kept + start + wide, _convolution(kept, wide, _padded(middle, size, op.kernel, stride), narrow)]
        tensors = [narrow, last]
    else:
        shrunk = source * after
        peaks.append(_convolution(kept, start, _padded(source, size, op.kernel, stride), shrunk))
        tensors = [shrunk, narrow, narrow, narrow, narrow, last]
    peaks += [kept + first + second for first, second in pairwise(tensors)]
    peaks.append(kept + last + out_channels * after)
    return max(peaks)


def op_flash(name: str, in_channels: int, out_channels: int, stride: int, size: int) -> int:
    """Return the bytes of the parameters of an op, with BatchNorm folded into the convolutions."""
    op, params = parse_op(name), op_cost(name, in_channels, out_channels, stride, size).params
    if params == 0:
        return 0
    normed, squeezed = _output_channels(op, in_channels, out_channels, stride)
    weights = params - 2 * normed - squeezed  # BatchNorm has two parameters a channel, the gate a bias
    return weights + PER_CHANNEL * (normed + squeezed)


def _output_channels(op: Op, in_channels: int, out_channels: int, stride: int) -> tuple[int, int]:
    """Return the output channels of all convolutions with BatchNorm, and of those in squeeze-and-excitation."""
    if op.family == "MB":
        hidden = op.hidden(in_channels)
        gate = squeeze_channels(hidden) + hidden if op.se else 0
        return hidden * (2 if op.expansion != 1 else 1) + out_channels, gate
    if op.family in ("SHUFFLE", "XCEPTION"):
        source = in_channels // 2 if stride == 1 else in_channels
        middle, grown = out_channels // 2, out_channels - source
        main = 2 * middle + grown if op.family == "SHUFFLE" else source + 4 * middle + grown
        return main + (0 if stride == 1 else 2 * source), 0
    return out_channels, 0
