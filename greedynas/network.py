"""An ordinary network: stem, stages of blocks, head, classifier. What a path becomes outside of the supernet."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from greedynas.blocks import initialise, make_block
from greedynas.known import resolve
from greedynas.space import Space, load_space


class Network(nn.Module):
    """One architecture. Identities that change no shape are not there at all."""

    def __init__(
        self,
        stem: nn.Sequential,
        stages: nn.Sequential,
        head: nn.Sequential,
        classifier: nn.Linear,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.stem = stem
        self.stages = stages
        self.head = head
        self.dropout = nn.Dropout(dropout)
        self.classifier = classifier

    def forward_features(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.forward_features(x).mean((2, 3))))


def build_network(
    path: Any,
    space: str | Space | None = None,
    num_classes: int | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Network:
    """A path, or a known network by name, as a freshly initialised network; no supernet is built for it.

    >>> build_network("greedynas-a", num_classes=10)
    >>> build_network("22212202", "macro")
    """
    known_space, path = resolve(path, None if space is None else load_space(space))
    space = known_space.adapt(num_classes=num_classes)
    with torch.device("meta"):  # shapes first, then one initialisation from one generator
        stem, head = fixed_blocks(space)
        blocks = [
            make_block(layer.ops[op], layer, space.activation) for layer, op in zip(space.layers, path, strict=True)
        ]
        network = Network(stem, in_stages(blocks, space), head, nn.Linear(space.features, space.num_classes), dropout)
    network.to_empty(device="cpu")
    initialise(network, generator)
    return network


def fixed_blocks(space: Space) -> tuple[nn.Sequential, nn.Sequential]:
    """Stem and head."""
    stem, head = (
        nn.Sequential(*(make_block(layer.ops[0], layer, space.activation) for layer in layers))
        for layers in (space.stem_layers, space.head_layers)
    )
    return stem, head


def in_stages(blocks: Sequence[nn.Module], space: Space) -> nn.Sequential:
    """One block a layer -> a Sequential a stage, without the blocks that do nothing."""
    rest = iter(blocks)
    return nn.Sequential(
        *(
            nn.Sequential(
                *(block for block in (next(rest) for _ in range(stage.repeat)) if not isinstance(block, nn.Identity))
            )
            for stage in space.stages
        )
    )
