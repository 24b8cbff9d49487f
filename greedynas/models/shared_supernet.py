"""A supernet whose ops of one layer are slices of one set of weights: smaller kernels and expansions of the same block.

The idea is that of superkernels (Single-Path NAS, Stamoulis et al., 2019) and of elastic networks (Once-for-all, Cai et al.,
ICLR 2020): an op takes the first channels of the widest block and the centre of its largest kernel. Every op has
normalisations of its own, because its activations have their own statistics. Around a pretrained network it also has
its own last convolution, which starts as a least-squares fit to the output of the whole block (`bases/start.py`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from greedynas.models.base_blocks import ACTIVATIONS, GATES, convolve
from greedynas.models.blocks import make_block
from greedynas.models.supernet import Supernet
from greedynas.spaces.base_block import BaseBlock
from greedynas.spaces.ops import Op, parse_op, squeeze_channels
from greedynas.spaces.space import Layer

SQUEEZE = {"squeeze_activation": "hard_swish", "gate": "hard_sigmoid"}  # of the SE ops of the spaces that ship


class SharedSupernet(Supernet):
    """All paths of a space, in which the inverted bottlenecks of one layer are slices of one set of weights.

    It is used like a `Supernet`. A space around a pretrained network has this supernet.

    Example:
        >>> import torch
        >>> from greedynas.models.shared_supernet import SharedSupernet
        >>> net = SharedSupernet("macro", num_classes=4)
        >>> tuple(net(torch.zeros(2, 3, 32, 32), "22212202").shape)
        (2, 4)
    """

    recordable = False

    def make_layer(self, layer: int) -> nn.Module:
        """Return the ops of a layer with their shared weights."""
        return SharedLayer(self.space.layers[layer], self.space.activation, own_projections=self.space.base is not None)

    def path_modules(self, path: Any) -> list[nn.Module]:
        """Return the modules that a step on this path trains, from the images on."""
        shared = [layer.shared for layer in self.layers if isinstance(layer, SharedLayer) and layer.shared is not None]
        return [*super().path_modules(path), *shared]

    def plain_block(self, layer: int, place: int) -> nn.Module:
        """Return an op as a block of its own, with copies of its weights."""
        block = self.layers[layer][place]  # type: ignore[index]
        return block.plain() if isinstance(block, SlicedBottleneck) else super().plain_block(layer, place)


class SharedLayer(nn.Module):
    """The ops of one layer. Those that are inverted bottlenecks share their weights; others have their own."""

    def __init__(self, layer: Layer, activation: str, own_projections: bool = False):
        super().__init__()
        kinds = {op: parse_op(op) for op in layer.ops}
        sliced = [op for op, kind in kinds.items() if _is_sliced(kind, layer)]
        self.block = layer.block or _largest_block([kinds[op] for op in sliced], layer, activation)
        self.shared = SharedWeights(self.block, layer) if sliced and self.block is not None else None
        self.ops = nn.ModuleList(
            SlicedBottleneck(self.shared, self.block, op, layer, activation, own_projections)
            if op in sliced and self.shared is not None and self.block is not None
            else make_block(op, layer, activation)
            for op in layer.ops
        )

    def __getitem__(self, place: int) -> nn.Module:
        return self.ops[place]

    def __len__(self) -> int:
        return len(self.ops)


class SharedWeights(nn.Module):
    """The weights of the widest block with the largest kernel, most important channels first."""

    def __init__(self, block: BaseBlock, layer: Layer):
        super().__init__()
        hidden = block.hidden or 0
        self.expand = nn.Conv2d(layer.in_channels, hidden, 1, bias=False) if block.expands else None
        self.depthwise = nn.Conv2d(hidden, hidden, block.kernel, groups=hidden, bias=False)
        self.reduce = nn.Conv2d(hidden, block.squeeze, 1) if block.squeeze else None
        self.excite = nn.Conv2d(block.squeeze, hidden, 1) if block.squeeze else None
        self.project = nn.Conv2d(hidden, layer.out_channels, 1, bias=False)


class SlicedBottleneck(nn.Module):
    """An inverted bottleneck that is a slice of shared weights, with its own normalisations."""

    def __init__(
        self, shared: SharedWeights, block: BaseBlock, op: str, layer: Layer, activation: str, own_projection: bool
    ):
        super().__init__()
        kind = parse_op(op)
        self.op, self.layer, self.block, self.space_activation = op, layer, block, activation
        self.hidden, self.kernel = kind.hidden(layer.in_channels), kind.kernel
        self.squeeze = 0 if not kind.se else block.squeeze if layer.block is not None else squeeze_channels(self.hidden)
        self.__dict__["shared"] = shared  # not a submodule: its weights belong to the layer
        self.expand_norm = nn.BatchNorm2d(self.hidden, block.eps) if block.expands else None
        self.depthwise_norm = nn.BatchNorm2d(self.hidden, block.eps)
        self.project_norm = nn.BatchNorm2d(layer.out_channels, block.eps)
        whole = (self.hidden, self.kernel, self.squeeze) == (block.hidden, block.kernel, block.squeeze)
        own = own_projection and not whole
        self.project = nn.Conv2d(self.hidden, layer.out_channels, 1, bias=False) if own else None
        self.activation = ACTIVATIONS[block.activation]()
        self.squeeze_activation = ACTIVATIONS[block.squeeze_activation]()

    def forward(self, x: Tensor) -> Tensor:
        out = self.projected(self.hidden_channels(x))
        out = self.project_norm(out)
        return x + out if self.block.residual else out

    def hidden_channels(self, x: Tensor) -> Tensor:
        """Return what the last convolution sees."""
        weights = self.weights()
        out = x
        if self.expand_norm is not None:
            out = self.activation(self.expand_norm(convolve(x, weights["expand"], None, 1, 1, False)))
        same = self.block.same_padding
        out = convolve(out, weights["depthwise"], None, self.layer.stride, self.hidden, same)
        out = self.activation(self.depthwise_norm(out))
        if self.squeeze:
            squeezed = convolve(out.mean((2, 3), keepdim=True), weights["reduce"], weights["reduce_bias"], 1, 1, False)
            gate = convolve(self.squeeze_activation(squeezed), weights["excite"], weights["excite_bias"], 1, 1, False)
            out = out * GATES[self.block.gate](gate)
        return out

    def projected(self, hidden: Tensor) -> Tensor:
        return convolve(hidden, self.weights()["project"], None, 1, 1, False)

    def weights(self) -> dict[str, Tensor]:
        """Return the slices of the shared weights, in the order of a block's own tensors."""
        shared: SharedWeights = self.__dict__["shared"]
        channels, squeezed = slice(self.hidden), slice(self.squeeze)
        found: dict[str, Tensor] = {}
        if shared.expand is not None:
            found["expand"] = shared.expand.weight[channels]
        margin = (shared.depthwise.kernel_size[0] - self.kernel) // 2
        centre = slice(margin, margin + self.kernel)
        found["depthwise"] = shared.depthwise.weight[channels, :, centre, centre]
        if self.squeeze and shared.reduce is not None and shared.excite is not None:
            assert shared.reduce.bias is not None
            assert shared.excite.bias is not None
            found["reduce"] = shared.reduce.weight[squeezed, channels]
            found["reduce_bias"] = shared.reduce.bias[squeezed]
            found["excite"] = shared.excite.weight[channels, squeezed]
            found["excite_bias"] = shared.excite.bias[channels]
        found["project"] = shared.project.weight[:, channels] if self.project is None else self.project.weight
        return found

    def plain(self) -> nn.Module:
        """Return this op as a block of its own, with copies of the weights."""
        weights = self.weights()
        tensors: list[Tensor] = []
        for name, norm in (("expand", self.expand_norm), ("depthwise", self.depthwise_norm)):
            if norm is not None:
                tensors += [weights[name], *norm.state_dict().values()]
        tensors += [weights[name] for name in ("reduce", "reduce_bias", "excite", "excite_bias") if name in weights]
        tensors += [weights["project"], *self.project_norm.state_dict().values()]
        block = make_block(self.op, self.layer, self.space_activation).to(self.project_norm.weight)
        block.load_state_dict(dict(zip(block.state_dict(), tensors, strict=True)))
        return block.train(self.training)


def _is_sliced(op: Op, layer: Layer) -> bool:
    """Return whether an op is a slice: an inverted bottleneck with an expansion, or whatever a pretrained block shrinks to."""
    return op.family == "MB" and (layer.block is not None or op.expansion != 1)


def _largest_block(ops: list[Op], layer: Layer, activation: str) -> BaseBlock | None:
    """Return the block that all of some MB ops of a space fit into."""
    if not ops:
        return None
    hidden = max(op.hidden(layer.in_channels) for op in ops)
    squeezed = [squeeze_channels(op.hidden(layer.in_channels)) for op in ops if op.se]
    return BaseBlock.model_validate(
        {
            "kernel": max(op.kernel for op in ops),
            "hidden": hidden,
            "squeeze": max(squeezed, default=0),
            "residual": layer.keeps_shape,
            "activation": activation,
            **SQUEEZE,
        }
    )


@torch.no_grad()
def slice_norm(norm: nn.BatchNorm2d, whole: nn.BatchNorm2d) -> None:
    """Give a normalisation the first channels of another one."""
    count = norm.num_features
    for name, value in whole.state_dict().items():
        getattr(norm, name).copy_(value[:count] if value.ndim else value)
