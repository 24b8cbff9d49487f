"""The supernet: the weights of every op of every layer in one module, run one path at a time."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from greedynas.gpu import ends
from greedynas.models.blocks import initialise, make_block, start_as_identities
from greedynas.models.network import Network, feature_info, fixed_blocks, in_stages
from greedynas.runtime.rng import torch_stream
from greedynas.spaces.paths import OpPath, parse_path
from greedynas.spaces.space import Space, load_space


class Supernet(nn.Module):
    """All paths of a space with shared weights. `net(x, path)` touches the parameters of that path alone.

    Args:
        space: A space, or the name or file of one.
        num_classes: Of the classifier; None: the space's own.
        generator: Of the initial weights.

    Example:
        >>> import torch, greedynas
        >>> net = greedynas.Supernet("macro", num_classes=4)
        >>> tuple(net(torch.zeros(2, 3, 32, 32), "22212202").shape)
        (2, 4)
    """

    def __init__(self, space: str | Space, num_classes: int | None = None, generator: torch.Generator | None = None):
        super().__init__()
        self.space = load_space(space).adapt(num_classes=num_classes)
        with torch.device("meta"):  # shapes first, then one initialisation from one generator
            self.stem, self.head = fixed_blocks(self.space)
            layers = range(len(self.space.layers))
            self.layers = nn.ModuleList(nn.ModuleList(self.layer_blocks(layer)) for layer in layers)
            self.classifier = nn.Linear(self.space.features, self.space.num_classes)
        self.to_empty(device="cpu")
        initialise(self, generator)

    def layer_blocks(self, layer: int) -> list[nn.Module]:
        """Return new blocks for the ops of a layer."""
        shape = self.space.layers[layer]
        return [make_block(op, shape, self.space.activation) for op in shape.ops]

    def forward(self, x: Tensor, path: Any) -> Tensor:
        x = self.stem(x)
        for block in self.blocks(path):
            x = block(x)
        return self.classify(x)

    def classify(self, x: Tensor) -> Tensor:
        """Return the logits, from the output of the last layer."""
        return self.classifier(self.pooled(x))

    def pooled(self, x: Tensor) -> Tensor:
        """Return what the classifier sees, from the output of the last layer."""
        if len(self.head) == 1 and ends.pools(self.head[0], x):
            return ends.pooled(self.head[0], x)
        return self.head(x).mean((2, 3))

    def blocks(self, path: Any) -> list[nn.Module]:
        """Return the chosen block of every layer."""
        return [self.layers[i][j] for i, j in enumerate(self.places(parse_path(path, self.space)))]  # type: ignore[index]

    def places(self, path: OpPath) -> OpPath:
        """Return where in its layer the block of each op is."""
        return path

    def place(self, layer: int, op: int, before: int) -> int:
        """Return where in its layer the block of an op is behind an op of the layer before."""
        return op

    def path_modules(self, path: Any) -> list[nn.Module]:
        """Return the modules that a step on this path trains, from the images on."""
        return [self.stem, *self.blocks(path), self.head, self.classifier]

    def path_parameters(self, path: Any) -> Iterator[nn.Parameter]:
        for module in self.path_modules(path):
            yield from module.parameters()

    def subnet(self, path: Any) -> Network:
        """Return this path as a network of its own, with copies of the weights and nothing of the supernet."""
        stages = in_stages([deepcopy(block) for block in self.blocks(path)], self.space)
        network = Network(
            deepcopy(self.stem),
            stages,
            deepcopy(self.head),
            deepcopy(self.classifier),
            feature_info=feature_info(self.space),
        )
        return network.train(self.training)


def fresh_supernet(
    space: Space, seed: int, *, kind: type[Supernet] = Supernet, zero_residuals: bool = False
) -> Supernet:
    """Return the supernet that a training with this seed starts from, on the CPU."""
    net = kind(space, generator=torch_stream(seed, "init"))
    if zero_residuals:
        start_as_identities(net)
    return net
