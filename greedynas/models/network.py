"""A path as an ordinary network outside of the supernet: stem, stages of blocks, head, classifier.

It has the methods that timm expects of its models, so that timm's feature extraction works on it (`timm_models.py`).
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
    """The mean over all pixels: (n, channels, height, width) -> (n, channels)."""

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
        neck: nn.Module | None = None,
    ):
        super().__init__()
        self.num_features = self.head_hidden_size = classifier.in_features
        self.num_classes = classifier.out_features
        self.feature_info = [dict(info) for info in feature_info]  # tells timm where each stride's feature map is
        self.grad_checkpointing = False
        self.described_as: dict[str, Any] | None = None  # space and path, of networks that timm has built
        self.stem = stem
        self.stages = stages
        self.head = head
        self.global_pool: nn.Module = MeanPool()
        self.neck = neck
        self.dropout = nn.Dropout(dropout)
        self.classifier: nn.Module = classifier

    @property
    def _model_args(self) -> dict[str, Any]:
        """The arguments with which timm builds this network again, for `timm.models.save_for_hf`.

        timm stores those of `create_model`, in which `arch` may be a local path: it is replaced by the architecture.
        """
        args: dict[str, Any] = dict(self.__dict__.get("timm_args", {}))
        if self.described_as is not None and "arch" in args:
            args.pop("space", None)
            args["arch"] = self.described_as
        return args

    @_model_args.setter
    def _model_args(self, args: dict[str, Any]) -> None:
        self.__dict__["timm_args"] = args

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the feature maps behind the convolutions of the head, which `forward_head` classifies."""
        x = self.stem(x)
        if self.grad_checkpointing and torch.is_grad_enabled():
            for block in (block for stage in self.stages.children() for block in stage.children()):
                x = checkpoint(block, x, use_reentrant=False)
        else:
            x = self.stages(x)
        return self.head(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits of feature maps, or with `pre_logits` the vectors that the classifier receives."""
        x = self.global_pool(x)
        x = x if self.neck is None else pooled_through(self.neck, x)
        x = self.dropout(x)
        return x if pre_logits else self.classifier(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """Return the classifier."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        """Replace the classifier and the pooling; with 0 classes there is no classifier, with "" no pooling."""
        from timm.layers import create_classifier  # type: ignore[attr-defined]

        pool, classifier = create_classifier(self.num_features, num_classes, pool_type=global_pool)
        initialise(classifier)
        parameter = next(self.parameters())
        self.num_classes = num_classes
        self.global_pool = MeanPool() if global_pool == "avg" else pool
        self.classifier = classifier.to(parameter.device, parameter.dtype).train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Switch gradient checkpointing on or off: the backward pass computes the blocks again, which saves memory."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the patterns by which timm groups parameters for layer-wise learning rates."""
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
        num_classes: The number of classes; None: that of the space.
        dropout: The probability of dropout before the classifier.
        generator: The generator of the initial weights.

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
    space, path = known_space.adapt(num_classes=num_classes).settle(path)
    with torch.device("meta"):  # only shapes; `initialise` then draws all weights from one generator
        stem, head = fixed_blocks(space)
        blocks = [
            make_block(layer.ops[op], layer, space.activation) for layer, op in zip(space.layers, path, strict=True)
        ]
        classifier = nn.Linear(space.features, space.num_classes)
        stages, neck = in_stages(blocks, space), neck_block(space)
        network = Network(stem, stages, head, classifier, dropout, feature_info(space), neck)
    network.to_empty(device="cpu")
    initialise(network, generator)
    return network


def feature_info(space: Space) -> list[dict[str, Any]]:
    """Return timm's description of feature maps: for each stride the last module that has it, and its channels."""
    places: dict[int, dict[str, Any]] = {}
    stride = 1
    parts: list[tuple[str, Fixed | Stage]] = [(f"stem.{i}", layer) for i, layer in enumerate(space.stem)]
    parts += [(f"stages.{i}", stage) for i, stage in enumerate(space.stages)]
    for module, part in parts:
        stride *= part.stride
        places[stride] = {"num_chs": part.channels, "reduction": stride, "module": module}
    return list(places.values())


def fixed_blocks(space: Space) -> tuple[nn.Sequential, nn.Sequential]:
    """Return the stem and the head of a space, which are the same for all paths."""
    stem, head = (
        nn.Sequential(*(make_block(layer.ops[0], layer, space.activation) for layer in layers))
        for layers in (space.stem_layers, space.head_layers)
    )
    return stem, head


def neck_block(space: Space) -> nn.Module | None:
    """Return the layer between pooling and classifier, if there is one."""
    layers = space.neck_layers
    return make_block(layers[0].ops[0], layers[0], space.activation) if layers else None


def pooled_through(neck: nn.Module, pooled: Tensor) -> Tensor:
    """Run the layer between pooling and classifier: (n, channels) -> (n, its channels)."""
    return neck(pooled[:, :, None, None]).flatten(1)


def in_stages(blocks: Sequence[nn.Module], space: Space) -> nn.Sequential:
    """Group blocks (one for each layer) into one Sequential for each stage, and leave out identities."""
    rest = iter(blocks)
    return nn.Sequential(
        *(
            nn.Sequential(
                *(block for block in (next(rest) for _ in range(stage.repeat)) if not isinstance(block, nn.Identity))
            )
            for stage in space.stages
        )
    )
