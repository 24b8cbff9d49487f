"""An ordinary network: stem, stages of blocks, head, classifier. What a path becomes outside of the supernet.

It has the methods that timm expects of its models, so that timm's own feature extraction works on it (`backbones.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from greedynas.models.blocks import initialise, make_block
from greedynas.spaces.space import Fixed, Space, Stage, load_space
from greedynas.spaces.zoo import resolve


class MeanPool(nn.Module):
    """(n, channels, height, width) -> (n, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Network(nn.Module):
    """An ordinary PyTorch network of one architecture, with the methods that timm expects of a model.

    Identities that change no shape are left out.

    Example:
        >>> import greedynas, torch
        >>> network = greedynas.build_network("22212202", "macro", num_classes=10)
        >>> network(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        stem: nn.Sequential,
        stages: nn.Sequential,
        head: nn.Sequential,
        classifier: nn.Linear,
        dropout: float = 0.0,
        feature_info: Sequence[dict[str, Any]] = (),
    ):
        super().__init__()
        self.num_features = self.head_hidden_size = classifier.in_features
        self.num_classes = classifier.out_features
        self.feature_info = [dict(info) for info in feature_info]  # where timm finds a feature map of each stride
        self.grad_checkpointing = False
        self.stem = stem
        self.stages = stages
        self.head = head
        self.global_pool: nn.Module = MeanPool()
        self.dropout = nn.Dropout(dropout)
        self.classifier: nn.Module = classifier

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.grad_checkpointing and torch.is_grad_enabled():
            for block in (block for stage in self.stages.children() for block in stage.children()):
                x = checkpoint(block, x, use_reentrant=False)
        else:
            x = self.stages(x)
        return self.head(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.dropout(self.global_pool(x))
        return x if pre_logits else self.classifier(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        """A new classifier, and one of timm's poolings if it is not the mean; 0 classes: none, "": no pooling."""
        from timm.layers import create_classifier  # type: ignore[attr-defined]

        pool, classifier = create_classifier(self.num_features, num_classes, pool_type=global_pool)
        initialise(classifier)
        parameter = next(self.parameters())
        self.num_classes = num_classes
        self.global_pool = MeanPool() if global_pool == "avg" else pool
        self.classifier = classifier.to(parameter.device, parameter.dtype).train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the blocks again in the backward pass instead of keeping what is inside them."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """For timm's learning rates by depth."""
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.(\d+)"}


def build_network(
    path: Any,
    space: str | Space | None = None,
    num_classes: int | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Network:
    """Build a freshly initialised network from a path, or from the name of a known network.

    Args:
        path: A path in any form that `parse_path` reads, or a known name such as "greedynas-a".
        space: The space of the path; not needed for a known network.
        num_classes: The classes, where they are not those of the space.
        dropout: The probability of dropout before the classifier.
        generator: The random numbers of the initialisation.

    Returns:
        The network, in training mode. No supernet is built for it.

    Raises:
        GreedyNASError: If the path is not one of the space.

    Example:
        >>> import greedynas
        >>> network = greedynas.build_network("greedynas-a", num_classes=10)
        >>> sum(parameter.numel() for parameter in network.parameters())
        5234892
    """
    known_space, path = resolve(path, None if space is None else load_space(space))
    space = known_space.adapt(num_classes=num_classes)
    with torch.device("meta"):  # shapes first, then one initialisation from one generator
        stem, head = fixed_blocks(space)
        blocks = [
            make_block(layer.ops[op], layer, space.activation) for layer, op in zip(space.layers, path, strict=True)
        ]
        classifier = nn.Linear(space.features, space.num_classes)
        network = Network(stem, in_stages(blocks, space), head, classifier, dropout, feature_info(space))
    network.to_empty(device="cpu")
    initialise(network, generator)
    return network


def feature_info(space: Space) -> list[dict[str, Any]]:
    """For each stride the last module of stem and stages that has it, with its channels: timm's description of features."""
    places: dict[int, dict[str, Any]] = {}
    stride = 1
    parts: list[tuple[str, Fixed | Stage]] = [(f"stem.{i}", layer) for i, layer in enumerate(space.stem)]
    parts += [(f"stages.{i}", stage) for i, stage in enumerate(space.stages)]
    for module, part in parts:
        stride *= part.stride
        places[stride] = {"num_chs": part.channels, "reduction": stride, "module": module}
    return list(places.values())


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
