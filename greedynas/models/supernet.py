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

    With `split`, a layer that follows one with an identity has every op twice, and the second of each behind that identity: to
    replace the layer before is another task than to go on from it.
    """

    def __init__(
        self,
        space: str | Space,
        num_classes: int | None = None,
        generator: torch.Generator | None = None,
        *,
        split: bool = False,
    ):
        super().__init__()
        self.space, self.split = load_space(space).adapt(num_classes=num_classes), split
        before = [(), *(layer.ops for layer in self.space.layers[:-1])]
        self.identities = [{i for i, op in enumerate(ops) if split and op == "ID"} for ops in before]
        with torch.device("meta"):  # shapes first, then one initialisation from one generator
            self.stem, self.head = fixed_blocks(self.space)
            self.layers = nn.ModuleList(
                nn.ModuleList(make_block(op, layer, self.space.activation) for op in layer.ops * (2 if twice else 1))
                for layer, twice in zip(self.space.layers, self.identities, strict=True)
            )
            self.classifier = nn.Linear(self.space.features, self.space.num_classes)
        self.to_empty(device="cpu")
        initialise(self, generator)

    def forward(self, x: Tensor, path: Any) -> Tensor:
        x = self.stem(x)
        for block in self.blocks(path):
            x = block(x)
        return self.classify(x)

    def classify(self, x: Tensor) -> Tensor:
        """From the last layer's output to logits."""
        return self.classifier(self.pooled(x))

    def pooled(self, x: Tensor) -> Tensor:
        """From the last layer's output to what the classifier sees."""
        if len(self.head) == 1 and ends.pools(self.head[0], x):
            return ends.pooled(self.head[0], x)
        return self.head(x).mean((2, 3))

    def blocks(self, path: Any) -> list[nn.Module]:
        """The chosen block of every layer."""
        return [self.layers[i][j] for i, j in enumerate(self.places(parse_path(path, self.space)))]  # type: ignore[index]

    def places(self, path: OpPath) -> OpPath:
        """Where in its layer the block of each op is."""
        if not self.split:
            return path
        return tuple(self.place(i, op, path[i - 1]) for i, op in enumerate(path))

    def place(self, layer: int, op: int, before: int) -> int:
        """Where the block of an op is behind an op of the layer before."""
        return op + len(self.space.layers[layer].ops) if before in self.identities[layer] else op

    def path_modules(self, path: Any) -> list[nn.Module]:
        """What a step on this path trains, from the images on."""
        return [self.stem, *self.blocks(path), self.head, self.classifier]

    def path_parameters(self, path: Any) -> Iterator[nn.Parameter]:
        for module in self.path_modules(path):
            yield from module.parameters()

    def subnet(self, path: Any) -> Network:
        """This path as a network of its own, with copies of the weights and nothing of the supernet."""
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
    space: Space, seed: int, *, split: bool = False, zero_residuals: bool = False, number: int = 0
) -> Supernet:
    """The supernet that a training starts from, or a later one of several, on the CPU."""
    generator = torch_stream(seed, "init", *([number] if number else []))
    net = Supernet(space, generator=generator, split=split)
    if zero_residuals:
        start_as_identities(net)
    return net
