"""The supernet: one module with the weights of every op of every layer, of which one path is run at a time."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from greedynas.gpu import ends
from greedynas.models.base_blocks import Resize
from greedynas.models.blocks import initialise, make_block, start_as_identities
from greedynas.models.network import Network, feature_info, fixed_blocks, in_stages, neck_block, pooled_through
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import torch_stream
from greedynas.spaces.paths import OpPath, parse_path
from greedynas.spaces.space import Space, load_space


class Supernet(nn.Module):
    """All paths of a space with shared weights. `net(x, path)` uses only the parameters of that path.

    Args:
        space: A space, or the name or file of one.
        num_classes: The number of classes; None: that of the space.
        generator: The generator of the initial weights.

    Example:
        >>> import torch, greedynas
        >>> net = greedynas.Supernet("macro", num_classes=4)
        >>> tuple(net(torch.zeros(2, 3, 32, 32), "22212202").shape)
        (2, 4)
    """

    recordable = True  # whether its steps may be recorded as CUDA graphs

    def __init__(self, space: str | Space, num_classes: int | None = None, generator: torch.Generator | None = None):
        super().__init__()
        self.space = load_space(space).adapt(num_classes=num_classes)
        with torch.device("meta"):  # only shapes; `initialise` then draws all weights from one generator
            self.stem, self.head = fixed_blocks(self.space)
            layers = range(len(self.space.layers))
            self.layers = nn.ModuleList(self.make_layer(layer) for layer in layers)
            self.neck = neck_block(self.space)
            if self.space.sizes:  # the first op of a path makes the images smaller, before the stem
                self.layers[0] = SizeLayer(self.stem, self.space.sizes)
                self.stem = nn.Sequential()
            self.classifier = nn.Linear(self.space.features, self.space.num_classes)
        self.to_empty(device="cpu")
        initialise(self, generator)

    def make_layer(self, layer: int) -> nn.Module:
        """Return the ops of a layer, of which the n-th is found at place n."""
        return nn.ModuleList(self.layer_blocks(layer))

    def layer_blocks(self, layer: int) -> list[nn.Module]:
        """Return new blocks, one for each op of a layer."""
        shape = self.space.layers[layer]
        return [make_block(op, shape, self.space.activation) for op in shape.ops]

    def forward(self, x: Tensor, path: Any) -> Tensor:
        x = self.stem(x)
        for block in self.blocks(path):
            x = block(x)
        return self.classify(x)

    def classify(self, x: Tensor) -> Tensor:
        """Return the logits, computed from the output of the last layer."""
        return self.classifier(self.pooled(x))

    def pooled(self, x: Tensor) -> Tensor:
        """Return the input of the classifier, computed from the output of the last layer."""
        if len(self.head) == 1 and ends.pools(self.head[0], x):
            return self.through_neck(ends.pooled(self.head[0], x))
        return self.through_neck(self.head(x).mean((2, 3)))

    def through_neck(self, pooled: Tensor) -> Tensor:
        """Return the input of the classifier, computed from the output of the pooling."""
        return pooled if self.neck is None else pooled_through(self.neck, pooled)

    def blocks(self, path: Any) -> list[nn.Module]:
        """Return the block that a path uses in each layer. The layers of a `Mixture` are blocks that run several ops."""
        if isinstance(path, Mixture):
            return path.blocks(self)
        return [self.layers[i][j] for i, j in enumerate(self.places(parse_path(path, self.space)))]  # type: ignore[index]

    def places(self, path: OpPath) -> OpPath:
        """Return the index of each op's block among the blocks of its layer."""
        return path

    def place(self, layer: int, op: int, before: int) -> int:
        """Return the index of an op's block in its layer, where the previous layer has the op `before`."""
        return op

    def path_modules(self, path: Any) -> list[nn.Module]:
        """Return the modules that a step on this path trains, in the order in which images pass them."""
        neck = [] if self.neck is None else [self.neck]
        return [self.stem, *self.blocks(path), self.head, *neck, self.classifier]

    def path_parameters(self, path: Any) -> Iterator[nn.Parameter]:
        """Yield the parameters that a path uses, which are those that its training updates."""
        for module in self.path_modules(path):
            yield from module.parameters()

    def subnet(self, path: Any) -> Network:
        """Return this path as an independent network, with copies of the weights."""
        places = self.places(parse_path(path, self.space))
        first = 1 if self.space.sizes else 0  # the image size is no block
        stem = self.layers[0].stem if first else self.stem
        blocks = [self.plain_block(layer, place) for layer, place in enumerate(places) if layer >= first]
        network = Network(
            deepcopy(stem),  # type: ignore[arg-type]
            in_stages(blocks, self.space),
            deepcopy(self.head),
            deepcopy(self.classifier),
            feature_info=feature_info(self.space),
            neck=deepcopy(self.neck),
        )
        return network.train(self.training)

    def plain_block(self, layer: int, place: int) -> nn.Module:
        """Return an op as a block of its own, with copies of its weights."""
        return deepcopy(self.layers[layer][place])  # type: ignore[index]


class Mixture(tuple[int, ...]):
    """A path that runs several ops in a layer, and adds up their outputs, each multiplied by its share.

    Methods with architecture parameters pass it to a supernet in place of a path. As a tuple, it is the path that names
    it in messages.

    Args:
        path: That path.
        shares: For each layer, the share of each op that is run, as a tensor without dimensions.

    Example:
        >>> import torch, greedynas
        >>> net, half = greedynas.Supernet("macro"), torch.tensor(0.5)
        >>> mixture = greedynas.Mixture("22212202", [{1: half, 2: half}] * 8)
        >>> tuple(net(torch.zeros(2, 3, 32, 32), mixture).shape)
        (2, 10)
    """

    shares: Sequence[Mapping[int, Tensor]]

    def __new__(cls, path: Any, shares: Sequence[Mapping[int, Tensor]]) -> "Mixture":
        mixture = super().__new__(cls, map(int, path))
        mixture.shares = shares
        return mixture

    def blocks(self, net: Supernet) -> list[nn.Module]:
        """Return a block for each layer that runs its ops on the same input."""
        layers: list[Any] = list(net.layers)
        if net.space.sizes or [len(layer) for layer in layers] != list(net.space.num_ops):
            raise GreedyNASError(
                "the ops of a layer can be mixed only if it has one block for each op: not with image sizes in the space, "
                "nor with experimental.split_after_identity"
            )
        return [MixedLayer(layer, shares) for layer, shares in zip(layers, self.shares, strict=True)]


class MixedLayer(nn.Module):
    """Some ops of a layer, which are run together."""

    def __init__(self, layer: Any, shares: Mapping[int, Tensor]):
        super().__init__()
        self.ops = nn.ModuleList(layer[op] for op in shares)
        self.shares = list(shares.values())

    def forward(self, x: Tensor) -> Tensor:
        # One by one, because a stack of all outputs would hold each of them twice.
        return reduce(add, (share.to(x.device) * op(x) for share, op in zip(self.shares, self.ops, strict=True)))


class SizeLayer(nn.Module):
    """The image sizes that a path can choose from, and the stem, which all of them share."""

    def __init__(self, stem: nn.Module, sizes: Sequence[int]):
        super().__init__()
        self.stem = stem
        # Not registered: they would list the weights of the stem once for each size.
        self.__dict__["sized"] = [nn.Sequential(Resize(pixels), stem) for pixels in sizes]

    def __getitem__(self, place: int) -> nn.Module:
        block: nn.Module = self.__dict__["sized"][place]
        return block

    def __len__(self) -> int:
        return len(self.__dict__["sized"])


def fresh_supernet(
    space: Space, seed: int, *, kind: type[Supernet] = Supernet, zero_residuals: bool = False
) -> Supernet:
    """Return the freshly initialised supernet from which a training with this seed starts, on the CPU."""
    net = kind(space, generator=torch_stream(seed, "init"))
    if zero_residuals:
        start_as_identities(net)
    return net
