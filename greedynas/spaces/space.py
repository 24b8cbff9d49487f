"""Search spaces as data: a fixed stem, stages of layers with candidate ops, a fixed head, an image size.

A space is a YAML file or a few lines of Python:

    Space(
        name="tiny", image_size=32, num_classes=10, ops=["ID", "MB3_K3", "MB6_K5"],
        stem=[Fixed(op="CONV_K3", channels=16)],
        stages=[Stage(channels=24, repeat=2, stride=2), Stage(channels=48, repeat=3, stride=2)],
        head=[Fixed(op="CONV_K1", channels=256)],
    )
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from greedynas.runtime.errors import GreedyNASError, first_problem, unknown
from greedynas.runtime.registry import Registry
from greedynas.runtime.yaml_files import read_yaml
from greedynas.spaces.base_block import BaseBlock
from greedynas.spaces.budget import Budget
from greedynas.spaces.colours import is_dark, op_colour
from greedynas.spaces.costs import Costs, CostTable, IntArray, PricesPaths, SizedCostTable
from greedynas.spaces.feasible import sample_feasible
from greedynas.spaces.memory import cost_tables_for
from greedynas.spaces.ops import Cost, check_shape, is_nothing, linear_cost, op_cost, out_size, parse_op

SPACES = Path(__file__).parent / "library"

# Generous bounds: they keep a mistyped or hostile file from allocating absurdly large tensors.
Channels = Annotated[int, Field(ge=1, le=8192)]
Stride = Annotated[int, Field(ge=1, le=8)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
OpNames = Annotated[tuple[str, ...], Field(min_length=1, max_length=64)]
MAX_LAYERS = 256
AROUND = "timm:"  # before the name of a network, for the space around it
# Readers of spaces around a base, called with where the base was named and the content of a space file.
BASES: Registry[Callable[[str, dict[str, Any]], Any]] = Registry(
    "base", {"timm": "greedynas.models.bases.timm_bases:read_space"}
)
IMAGE = "image"  # where the choice of an image size is
MAX_PARAMS = 2**30  # of a supernet: 24 times as many as the paper's largest one has


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class Fixed(_Data):
    """A layer without a choice, in the stem or in the head of a space.

    Attributes:
        op: The name of the op, such as "CONV_K3".
        channels: The output channels of it.
        stride: 1 or 2.
        block: How the block of a pretrained network is built; None: as the name of the op says.

    Example:
        >>> import greedynas
        >>> greedynas.Fixed(op="CONV_K3", channels=16, stride=2).channels
        16
    """

    op: str
    channels: Channels
    stride: Stride = 1
    block: BaseBlock | None = None


class Stage(_Data):
    """Several layers of the same width, the first of which has the stride.

    Attributes:
        channels: The output channels of each layer.
        repeat: The number of layers.
        stride: The stride of the first one.
        ops: The ops of this stage, if they differ from those of the space.
        block: The block of a pretrained network that the ops are smaller versions of.

    Example:
        >>> import greedynas
        >>> greedynas.Stage(channels=24, repeat=3, stride=2).repeat
        3
    """

    channels: Channels
    repeat: Annotated[int, Field(ge=1, le=64)] = 1
    stride: Stride = 1
    ops: OpNames | None = None
    block: BaseBlock | None = None

    @field_validator("ops", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Layer:
    """One layer at its place, with its shapes; `ops` has a single name if there is no choice."""

    where: str  # "stem", "stage 2" or "head"
    ops: tuple[str, ...]
    in_channels: int
    out_channels: int
    stride: int
    in_size: int
    block: BaseBlock | None = None  # of a pretrained network

    @property
    def out_size(self) -> int:
        return out_size(self.in_size, self.stride)

    @property
    def keeps_shape(self) -> bool:
        return self.in_channels == self.out_channels and self.stride == 1 and self.where != IMAGE

    def is_nothing(self, op: str) -> bool:
        """Return whether this op does nothing here: an identity that does not change the shape."""
        return is_nothing(op, self.in_channels, self.out_channels, self.stride)

    def cost(self, op: str) -> Cost:
        if self.block is not None and not self.is_nothing(op):
            return self.block.cost(op, self.in_channels, self.out_channels, self.stride, self.in_size)
        return op_cost(op, self.in_channels, self.out_channels, self.stride, self.in_size)


class Space(_Data):
    """A search space: stages of layers that have a choice of ops, between a fixed stem and a fixed head.

    A path has one op index for every layer of the stages.

    Attributes:
        name: The name.
        ops: The names of the ops that every layer can choose from.
        stages: The stages.
        stem: Fixed layers before the stages.
        head: Fixed layers after the stages; pooling and a linear layer follow.
        image_size: The height and width of images in pixels.
        image_channels: 1 or 3.
        num_classes: The number of classes.
        activation: "relu" or "hard_swish", inside MB blocks.
        base: The pretrained network that the space lies around, by its name in timm.
        sizes: The image sizes that a path can choose from; the first op of a path is then its image size.
        neck: A layer between pooling and classifier.
        mean: The mean of each channel, of pixels in [0, 1], with which images are normalised; None: ImageNet's.
        std: The standard deviation of each channel.

    Example:
        >>> import greedynas
        >>> space = greedynas.Space(
        ...     name="mine",
        ...     ops=["ID", "MB3_K3", "MB6_K5_SE"],
        ...     stem=[greedynas.Fixed(op="CONV_K3", channels=16, stride=2)],
        ...     stages=[greedynas.Stage(channels=24, repeat=2, stride=2)],
        ...     image_size=64,
        ...     num_classes=5,
        ... )
        >>> len(space.layers), space.costs([(1, 2)]).params.tolist()
        (2, [24865])
    """

    name: Annotated[str, Field(min_length=1, max_length=100)]
    ops: Annotated[tuple[str, ...], Field(min_length=1, max_length=1024)]  # around a base: those of all stages
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=64)]
    stem: Annotated[tuple[Fixed, ...], Field(min_length=1, max_length=64)]
    head: Annotated[tuple[Fixed, ...], Field(max_length=64)] = ()
    image_size: Annotated[int, Field(ge=1, le=4096)] = 224
    image_channels: Annotated[int, Field(ge=1, le=64)] = 3
    num_classes: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    activation: Literal["relu", "hard_swish"] = "relu"  # inside MB blocks; stem and head convolutions have ReLU
    # Around a pretrained network, which may choose among image sizes (the first op of a path)
    base: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,200}$")] | None = None  # its name in timm
    sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(max_length=32)] = ()
    neck: Fixed | None = None  # behind the pooling
    mean: Annotated[tuple[Finite, ...], Field(max_length=64)] | None = None  # of pixels in [0, 1]; None: ImageNet's
    std: Annotated[tuple[Annotated[Finite, Field(gt=0)], ...], Field(max_length=64)] | None = None

    @field_validator("ops", "stages", "stem", "head", "sizes", "mean", "std", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():  # names from a file are printed on the terminal
            raise ValueError("has characters that cannot be printed")
        return value

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        if sum(stage.repeat for stage in self.stages) > MAX_LAYERS:
            raise GreedyNASError(f"{self.name} has more than {MAX_LAYERS} layers")
        self._check_sizes()
        if (self.mean is None) != (self.std is None) or any(
            values is not None and len(values) != self.image_channels for values in (self.mean, self.std)
        ):
            raise GreedyNASError(f"{self.name}: mean and std need {self.image_channels} values each")
        for number, layer in enumerate((*self.stem_layers, *self.layers, *self.head_layers, *self.neck_layers)):
            place = f"{layer.where} (layer {number} of the network)"
            if len(set(layer.ops)) < len(layer.ops):
                raise GreedyNASError(f"{place}: an op is listed twice")
            for op in layer.ops:
                try:
                    if (parse_op(op).family == "PX") != (layer.where == IMAGE):
                        raise GreedyNASError(f"{op} is an image size: list it in sizes")
                    check_shape(op, layer.in_channels, layer.out_channels, layer.stride)
                    if layer.block is not None:
                        layer.block.check(op, layer.in_channels)
                except GreedyNASError as error:
                    raise GreedyNASError(f"{place}: {error}") from None
        smallest = min((self.image_size, *self.sizes))
        if smallest < self.total_stride:
            raise GreedyNASError(
                f"image_size {smallest} is too small: the strides of {self.name} divide it by {self.total_stride}; "
                f"use at least {self.total_stride}"
            )
        table = self.cost_tables["params"]
        if int(table.entries.sum()) + int(table.fixed) > MAX_PARAMS:
            raise GreedyNASError(f"all ops of {self.name} together have more than {MAX_PARAMS:,} parameters")
        return self

    def _check_sizes(self) -> None:
        if not self.sizes:
            return
        if list(self.sizes) != sorted(set(self.sizes)):
            raise GreedyNASError(f"{self.name}: sizes must rise, got {list(self.sizes)}")
        if self.image_size != self.sizes[-1]:
            raise GreedyNASError(f"{self.name}: image_size must be the largest of sizes, {self.sizes[-1]}")

    # Layers and their shapes

    @cached_property
    def stem_layers(self) -> tuple[Layer, ...]:
        """The layers before those that have a choice of ops."""
        return _place(self.stem, "stem", self.image_channels, self.image_size)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that have a choice of ops, one for each op of a path."""
        layers: list[Layer] = []
        if self.sizes:
            names = tuple(f"PX{size}" for size in self.sizes)
            layers.append(Layer(IMAGE, names, self.image_channels, self.image_channels, 1, self.image_size))
        channels, size = self.stem_layers[-1].out_channels, self.stem_layers[-1].out_size
        for number, stage in enumerate(self.stages):
            for i in range(stage.repeat):
                stride = stage.stride if i == 0 else 1
                ops = stage.ops or self.ops
                layers.append(Layer(f"stage {number + 1}", ops, channels, stage.channels, stride, size, stage.block))
                channels, size = stage.channels, out_size(size, stride)
        return tuple(layers)

    @cached_property
    def head_layers(self) -> tuple[Layer, ...]:
        """The layers between those that have a choice of ops and the pooling."""
        return _place(self.head, "head", self.layers[-1].out_channels, self.layers[-1].out_size)

    @cached_property
    def neck_layers(self) -> tuple[Layer, ...]:
        """The layer between pooling and classifier, if there is one: its images have one pixel."""
        if self.neck is None:
            return ()
        return _place((self.neck,), "neck", (self.head_layers or self.layers)[-1].out_channels, 1)

    @property
    def features(self) -> int:
        """The number of channels before the classifier."""
        return (self.neck_layers or self.head_layers or self.layers)[-1].out_channels

    @property
    def total_stride(self) -> int:
        """The factor between the size of an image and that of the last feature maps."""
        return math.prod(layer.stride for layer in (*self.stem_layers, *self.layers, *self.head_layers))

    @property
    def num_ops(self) -> tuple[int, ...]:
        """The number of ops to choose from in each layer."""
        return tuple(len(layer.ops) for layer in self.layers)

    @property
    def size(self) -> int:
        """The number of paths."""
        return math.prod(self.num_ops)

    def adapt(
        self, num_classes: int | None = None, image_size: int | None = None, image_channels: int | None = None
    ) -> "Space":
        """Return the same space for another number of classes, another image size, grey or coloured images."""
        given = {"num_classes": num_classes, "image_size": image_size, "image_channels": image_channels}
        changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if not changes:
            return self
        if "image_size" in changes:
            changes["sizes"] = ()
        return _validated(self.name, {**self.model_dump(), **changes})

    def settle(self, path: Sequence[int]) -> tuple["Space", tuple[int, ...]]:
        """Return the space at the image size that a path chooses, and the path's other ops."""
        if not self.sizes:
            return self, tuple(path)
        return self.adapt(image_size=self.sizes[path[0]]), tuple(path[1:])

    def to_yaml(self) -> str:
        """Return the text of a YAML file that `load_space` reads back as this space."""
        return yaml.safe_dump(
            self.model_dump(mode="json", exclude_none=True), sort_keys=False, default_flow_style=None, width=100
        )

    # Paths and their costs

    def sample(
        self,
        n: int,
        rng: np.random.Generator,
        budget: Budget | None = None,
        latency: PricesPaths | None = None,
    ) -> IntArray:
        """Return n paths drawn i.i.d. and uniformly from all paths, or from those within the budget: int64 (n, layers).

        A limit on latency needs a latency table, and excludes the paths that the table cannot price.
        """
        if budget is None or not budget.limits():
            return rng.integers(0, self.num_ops, size=(n, len(self.layers)))
        tables = cost_tables_for(self, budget.limits())
        if "latency_ms" in budget.limits():
            if latency is None:
                raise GreedyNASError("a latency limit needs a latency table")
            tables = {**tables, "latency_ms": latency.cost_table(self)}
        return sample_feasible(tables, budget.limits(), n, rng)

    def costs(self, paths: Any) -> Costs:
        """Return the exact multiply-adds and parameters of an array of paths (n, layers)."""
        paths = self.check_paths(paths)
        return Costs(macs=self.cost_tables["macs"](paths), params=self.cost_tables["params"](paths))

    @cached_property
    def cost_tables(self) -> dict[str, CostTable]:
        """The cost tables `macs` and `params`, by (layer, op)."""
        if self.sizes:
            at_sizes = [self.adapt(image_size=size).cost_tables for size in self.sizes]
            return {cost: SizedCostTable.of([tables[cost] for tables in at_sizes]) for cost in ("macs", "params")}
        entries = np.zeros((2, len(self.layers), max(self.num_ops)), dtype=np.int64)
        for i, layer in enumerate(self.layers):
            for j, op in enumerate(layer.ops):
                entries[:, i, j] = layer.cost(op)
        shared = [layer.cost(layer.ops[0]) for layer in (*self.stem_layers, *self.head_layers, *self.neck_layers)]
        shared.append(linear_cost(self.features, self.num_classes))
        return {
            "macs": CostTable(entries[0], sum(cost.macs for cost in shared), self.num_ops),
            "params": CostTable(entries[1], sum(cost.params for cost in shared), self.num_ops),
        }

    # Display

    def __repr__(self) -> str:
        ops = sorted(set(self.num_ops))
        many = str(ops[0]) if len(ops) == 1 else f"{ops[0]} to {ops[-1]}"
        size = f"{self.size:,}" if self.size < 10**7 else f"{self.size:.2g}"
        return (
            f"Space({self.name!r}: {len(self.layers)} layers of {many} ops, {size} paths, "
            f"{self.image_size} px, {self.num_classes} classes)"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        rows = [
            (layer.where, f"{layer.in_size}²×{layer.in_channels}", f"{layer.out_size}²×{layer.out_channels}", layer.ops)
            for layer in (*self.stem_layers, *self.layers, *self.head_layers, *self.neck_layers)
        ]
        body = "".join(
            f"<tr><td>{where}</td><td>{before}</td><td>{after}</td><td>{' '.join(map(_label, ops))}</td></tr>"
            for where, before, after, ops in rows
        )
        head = "<tr><th>where</th><th>input</th><th>output</th><th>ops</th></tr>"
        return f"<table><caption>{escape(repr(self))}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"

    def check_paths(self, paths: Any) -> IntArray:
        """Return any array-like of paths as int64 (n, layers); raise if an index is out of range."""
        array = np.asarray(paths)
        if array.ndim != 2 or array.shape[1] != len(self.layers) or not np.issubdtype(array.dtype, np.integer):
            raise GreedyNASError(
                f"paths of {self.name} are integers of shape (n, {len(self.layers)}), got {array.dtype} {array.shape}"
            )
        if len(array) and (array.min() < 0 or (array.max(axis=0) >= self.num_ops).any()):
            raise GreedyNASError(
                f"a path has an op index outside of its layer; ops by layer in {self.name}: {self.num_ops}"
            )
        return array.astype(np.int64, copy=False)


def space_names() -> list[str]:
    """Return the names of the built-in spaces.

    Returns:
        The names, which `load_space` and `--space` take.

    Example:
        >>> import greedynas
        >>> "mobilenet" in greedynas.space_names()
        True
    """
    return sorted(file.stem for file in SPACES.glob("*.yaml"))


def load_space(source: str | Path | Space) -> Space:
    """Return a space by name or from a YAML file.

    Args:
        source: The name of a built-in space, a YAML file, "timm:NAME" for the space around a network of timm, or a `Space`,
            which is returned unchanged.

    Returns:
        The space.

    Raises:
        GreedyNASError: If there is no such space, or the file does not describe one.

    Example:
        >>> import greedynas
        >>> len(greedynas.load_space("mobilenet").layers)
        21
    """
    if isinstance(source, Space):
        return source
    if str(source) in space_names():
        return _read(SPACES / f"{source}.yaml")
    if str(source).startswith(AROUND):
        return BASES["timm"](str(source), {"base": str(source).removeprefix(AROUND)})
    file = Path(source)
    if file.is_file():
        return _read(file)
    if file.suffix in (".yaml", ".yml") or len(file.parts) > 1:
        raise GreedyNASError(f"no such space file: {source}")
    raise unknown("space", str(source), [*space_names(), "or a YAML file"])


def _read(file: Path) -> Space:
    data = read_yaml(file, "space file")
    if "base" in data and "stages" not in data:
        return BASES["timm"](str(file), data)
    return _validated(str(file), data)


def _validated(source: str, data: dict[str, Any]) -> Space:
    try:
        return Space.model_validate(data)
    except ValidationError as error:
        raise GreedyNASError(f"{source}: {first_problem(error)}") from None


def _label(op: str) -> str:
    """Return the name of an op on its colour, as HTML."""
    letters = "#fff" if is_dark(parse_op(op)) else "#1b1f24"
    return (
        f'<span style="background:{op_colour(op)};color:{letters};padding:0 4px;border-radius:3px">{escape(op)}</span>'
    )


def _place(fixed: tuple[Fixed, ...], where: str, channels: int, size: int) -> tuple[Layer, ...]:
    layers = []
    for layer in fixed:
        layers.append(Layer(where, (layer.op,), channels, layer.channels, layer.stride, size, layer.block))
        channels, size = layer.channels, out_size(size, layer.stride)
    return tuple(layers)
