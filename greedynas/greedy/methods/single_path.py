"""Single-Path NAS: Stamoulis et al., Designing Hardware-Efficient ConvNets in less than 4 Hours, ECML PKDD 2019.

All inverted bottlenecks of a layer are slices of one superkernel (`SharedSupernet`): the centre of the largest kernel, the
first channels of the widest expansion. A trainable threshold decides about each part of it, by the size of its weights:

    kernel = centre + 1(|ring|² > t) · ring,        likewise for the further channels, and for the layer as a whole

In a backward pass, sigmoids take the place of these indicators. The sizes are means of squares relative to the mean of the
whole kernel, so that thresholds of different layers are comparable. Every update of the weights trains the path that the
thresholds decide for. The thresholds are trained in turn with the weights, on validation images, like the parameters of
the other methods; in the paper both are trained together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from greedynas.greedy.methods.method import Method, chained, refuse_image_sizes
from greedynas.greedy.samplers.learning import Learning
from greedynas.greedy.samplers.sampler import Draw, Drawn
from greedynas.models.base_blocks import convolve
from greedynas.models.shared_supernet import SharedLayer, SharedSupernet, SlicedBottleneck
from greedynas.models.supernet import Mixture, Supernet
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.ops import parse_op
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Layer, Space

WIDTH = 0.2  # of the sigmoids, in relative sizes


class SinglePath(Method):
    """Trains the path that thresholds on the superkernels decide for, and learns these thresholds."""

    learning_rate, paper_updates, betas = 1e-3, 10_000, (0.9, 0.999)  # 8 epochs of 1,250 batches
    mixes = True
    supernet = SharedSupernet

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Parts] = []
        self.sizes: list[Tensor] = []

    def check(self, space: Space) -> None:
        refuse_image_sizes(space)
        for layer in space.layers:
            for op in layer.ops:
                kind = parse_op(op)
                sliced = kind.family == "MB" and (layer.block is not None or kind.expansion != 1)
                if (not sliced and kind.family != "ID") or kind.se:
                    raise GreedyNASError(
                        "single-path decides about the kernels and expansions of inverted bottlenecks, and about skipping: "
                        f"{space.name} also has {op}"
                    )

    def learning_paths(self, space: Space) -> int:
        return 1

    def initial(self, space: Space) -> list[NDArray[np.float64]]:
        self.parts = [Parts.of(layer) for layer in space.layers]
        return [np.zeros(parts.thresholds) for parts in self.parts]

    def draw(self, draw: Draw) -> Drawn:
        if draw.learning is not None:
            parts = self.parts or [Parts.of(layer) for layer in draw.space.layers]
            layers = zip(draw.learning.net.layers, parts, strict=True)
            self.sizes = [part_sizes(layer, own) for layer, own in layers]
        return super().draw(draw)

    def learn(self, draw: Draw, learning: Learning) -> None:
        chances = self.chances()
        path = self.most_probable()
        loss, inner = learning.gradient(Gated(path, self.parts, chances), chances)
        shares = [parts.op_probabilities(layer) for parts, layer in zip(self.parts, chances, strict=True)]
        loss = loss.double().cpu().requires_grad_()
        objective = loss + self.weight_of_cost(draw) * self.target.excess(shares)
        self.descend(chained(objective, loss, inner, chances, self.alpha))

    def choose(self, draw: Draw, learning: Learning) -> list[list[Any]]:
        return [[self.most_probable() if learning.warm else draw.uniform()[0]]]

    def chances(self) -> list[Tensor]:
        """Return the sigmoids of each layer's parts: how far their sizes are above the thresholds."""
        return [((size - layer) / WIDTH).sigmoid() for size, layer in zip(self.sizes, self.alpha, strict=True)]

    def probabilities(self) -> list[NDArray[np.float64]]:
        with torch.no_grad():
            layers = zip(self.parts, self.chances(), strict=True)
            return [parts.op_probabilities(chances).numpy() for parts, chances in layers]


@dataclass(frozen=True)
class Parts:
    """The parts of a layer's superkernel about which thresholds decide: rings, further channels, and the whole layer."""

    kernels: tuple[int, ...]  # of the ops, smallest first
    widths: tuple[int, ...]  # hidden channels
    shapes: tuple[tuple[int, int] | None, ...]  # (kernel, width) of each op; None: an identity

    @classmethod
    def of(cls, layer: Layer) -> "Parts":
        """Return the parts of a layer."""
        kinds = [parse_op(op) for op in layer.ops]
        shapes = [None if kind.family == "ID" else (kind.kernel, kind.hidden(layer.in_channels)) for kind in kinds]
        known = [shape for shape in shapes if shape is not None]
        kernels, widths = ({shape[i] for shape in known} for i in (0, 1))
        return cls(tuple(sorted(kernels)), tuple(sorted(widths)), tuple(shapes))

    @property
    def skips(self) -> bool:
        """Whether the layer may be skipped."""
        return None in self.shapes and len(self.kernels) > 0

    @property
    def thresholds(self) -> int:
        return max(len(self.kernels) - 1, 0) + max(len(self.widths) - 1, 0) + self.skips

    @cached_property
    def bits(self) -> NDArray[np.float64]:
        """Which parts each op has: (ops, thresholds) of ones and zeros; an identity has NaN for all but the last."""
        rows = []
        for shape in self.shapes:
            kernel, width = shape or (0, 0)
            row = [float(kernel >= other) for other in self.kernels[1:]] + [
                float(width >= other) for other in self.widths[1:]
            ]
            rows.append(
                [*(row if shape is not None else [np.nan] * len(row)), *[float(shape is not None)] * self.skips]
            )
        return np.array(rows).reshape(len(self.shapes), self.thresholds)

    def op_probabilities(self, chances: Tensor) -> Tensor:
        """Return the probability of each op: the product over its parts, relative to all ops of the layer.

        An identity has no parts, and each counts as decided, so that it is most probable exactly if the layer is skipped.
        """
        bits = torch.from_numpy(self.bits)
        on, off = chances.log(), (1 - chances).log()
        decided = torch.maximum(on, off)
        scores = torch.where(bits.isnan(), decided, torch.where(bits == 1, on, off)).sum(1)
        return scores.softmax(0)


class Gated(Mixture):
    """The decided path, as slices of superkernels whose other parts are multiplied by gates of zero."""

    def __new__(cls, path: OpPath, parts: Sequence[Parts], chances: Sequence[Tensor]) -> "Gated":
        gated = super().__new__(cls, path, [])
        gated.parts, gated.chances = parts, chances  # type: ignore[attr-defined]
        return gated  # type: ignore[return-value]

    def blocks(self, net: Supernet) -> list[nn.Module]:
        layers: list[Any] = list(net.layers)
        parts, chances = self.parts, self.chances  # type: ignore[attr-defined]
        return [
            GatedLayer(layer, own, sigmoids, op) if own.thresholds else layer[op]
            for layer, own, sigmoids, op in zip(layers, parts, chances, self, strict=True)
        ]


class GatedLayer(nn.Module):
    """A layer that computes the decided op from its whole superkernel, so that the gates of all parts have a gradient."""

    def __init__(self, layer: SharedLayer, parts: Parts, chances: Tensor, op: int):
        super().__init__()
        self.layer, self.parts = layer, parts
        with torch.no_grad():
            likely = parts.op_probabilities(chances).tolist()
        shaped = [i for i, shape in enumerate(parts.shapes) if shape is not None]
        self.inner = op if op in shaped else max(shaped, key=lambda i: likely[i])
        widest = max(shaped, key=lambda i: parts.shapes[i][1])  # type: ignore[index]
        self.op: SlicedBottleneck = layer.ops[self.inner]  # type: ignore[assignment]
        self.widest: SlicedBottleneck = layer.ops[widest]  # type: ignore[assignment]
        hard = torch.from_numpy(parts.bits[self.inner].copy())
        if parts.skips:
            hard[-1] = float(op in shaped)
        # The gate has the value of the decision and the gradient of the sigmoid.
        self.gates = hard + chances - chances.detach()

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gates.to(x.device).unbind()
        rings, further = gates[: len(self.parts.kernels) - 1], gates[len(self.parts.kernels) - 1 :]
        out = self.op.project_norm(self._projected(x, rings, further[: len(self.parts.widths) - 1]))
        out = x + out if self.op.block.residual else out
        if not self.parts.skips:
            return out
        return gates[-1] * out + (1 - gates[-1]) * self.layer.ops[self.parts.shapes.index(None)](x)

    def _projected(self, x: Tensor, rings: Sequence[Tensor], further: Sequence[Tensor]) -> Tensor:
        op, weights = self.op, self.layer.shared
        assert weights is not None
        out = x
        if weights.expand is not None and op.expand_norm is not None and self.widest.expand_norm is not None:
            out = convolve(out, weights.expand.weight, None, 1, 1, False)
            out = op.activation(_normalised(out, op.expand_norm, self.widest.expand_norm))
        kernel = gated_kernel(weights.depthwise.weight, self.parts.kernels, rings)
        out = convolve(out, kernel, None, op.layer.stride, len(kernel), op.block.same_padding)
        out = op.activation(_normalised(out, op.depthwise_norm, self.widest.depthwise_norm))
        out = gated_channels(out, self.parts.widths, further)
        return convolve(out, weights.project.weight if op.project is None else self._own(op.project), None, 1, 1, False)

    def _own(self, project: nn.Conv2d) -> Tensor:
        """Return an op's own last convolution, with zeros for the channels that it lacks."""
        missing = self.parts.widths[-1] - project.weight.shape[1]
        return nn.functional.pad(project.weight, (0, 0, 0, 0, 0, missing))


def gated_kernel(weight: Tensor, kernels: Sequence[int], gates: Sequence[Tensor]) -> Tensor:
    """Return a depthwise kernel whose rings are multiplied by gates: an outer ring by its own and all inner ones."""
    mask = weight.new_zeros(weight.shape[-2:])
    passed: Any = 1.0
    for i, size in enumerate(kernels):
        passed = passed if i == 0 else passed * gates[i - 1]
        mask = mask + passed * _ring(weight, size, 0 if i == 0 else kernels[i - 1])
    return weight * mask


def gated_channels(x: Tensor, widths: Sequence[int], gates: Sequence[Tensor]) -> Tensor:
    """Return activations whose channels beyond the smallest width are multiplied by gates."""
    mask = x.new_zeros(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    places = torch.arange(x.shape[1], device=x.device)
    passed: Any = 1.0
    for i, width in enumerate(widths):
        passed = passed if i == 0 else passed * gates[i - 1]
        mask = mask + passed * ((places < width) & (places >= (0 if i == 0 else widths[i - 1]))).to(mask.dtype)
    return x * mask.to(x.dtype)[:, None, None]


@torch.no_grad()
def part_sizes(layer: Any, parts: Parts) -> Tensor:
    """Return the mean square of each part of a superkernel, relative to that of the whole kernel."""
    if not parts.thresholds:
        return torch.zeros(0, dtype=torch.float64)
    weight = layer.shared.depthwise.weight.detach().double().cpu()
    sizes = [
        (weight.square() * _ring(weight, size, inner)).sum() / (len(weight) * (size**2 - inner**2))
        for inner, size in zip(parts.kernels, parts.kernels[1:], strict=False)
    ]
    sizes += [weight[low:high].square().mean() for low, high in zip(parts.widths, parts.widths[1:], strict=False)]
    sizes += [weight[: parts.widths[0]].square().mean()] * parts.skips
    return torch.stack(sizes) / weight.square().mean()


def _ring(weight: Tensor, size: int, inner: int) -> Tensor:
    """Return ones where a kernel of this size exceeds the inner one, within the largest kernel."""
    largest = weight.shape[-1]
    ring = weight.new_zeros(largest, largest)
    for width, value in ((size, 1.0), (inner, 0.0)):
        margin = (largest - width) // 2
        ring[margin : margin + width, margin : margin + width] = value
    return ring


def _normalised(x: Tensor, own: nn.BatchNorm2d, widest: nn.BatchNorm2d) -> Tensor:
    """Return normalised channels: the op's own normalisation on its channels, that of the widest op on the others."""
    count = own.num_features
    return own(x) if count == x.shape[1] else torch.cat((own(x[:, :count]), widest(x)[:, count:]), 1)
