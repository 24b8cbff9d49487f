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
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from greedynas.runtime.errors import GreedyNASError, first_problem, unknown
from greedynas.runtime.yaml_files import read_yaml
from greedynas.spaces.budget import Budget
from greedynas.spaces.colours import is_dark, op_colour
from greedynas.spaces.costs import Costs, CostTable, IntArray, PricesPaths
from greedynas.spaces.feasible import sample_feasible
from greedynas.spaces.ops import Cost, check_shape, is_nothing, linear_cost, op_cost, out_size, parse_op

SPACES = Path(__file__).parent / "library"

# Generous bounds: they keep a mistyped or hostile file from asking for absurd tensors.
Channels = Annotated[int, Field(ge=1, le=8192)]
Stride = Annotated[int, Field(ge=1, le=8)]
OpNames = Annotated[tuple[str, ...], Field(min_length=1, max_length=64)]
MAX_LAYERS = 256
MAX_PARAMS = 2**30  # of a supernet, 24 times as many as the paper's largest has


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Fixed(_Data):
    """A layer without a choice, in the stem or in the head of a space.

    Attributes:
        op: The name of the op, such as "CONV_K3".
        channels: The channels that come out of it.
        stride: 1 or 2.

    Example:
        >>> import greedynas
        >>> greedynas.Fixed(op="CONV_K3", channels=16, stride=2).channels
        16
    """

    op: str
    channels: Channels
    stride: Stride = 1


class Stage(_Data):
    """Several layers of the same width, of which the first one has the stride.

    Attributes:
        channels: The channels that come out of each layer.
        repeat: How many layers there are.
        stride: The stride of the first one.
        ops: The ops of this stage, where they are others than the space's own.

    Example:
        >>> import greedynas
        >>> greedynas.Stage(channels=24, repeat=3, stride=2).repeat
        3
    """

    channels: Channels
    repeat: Annotated[int, Field(ge=1, le=64)] = 1
    stride: Stride = 1
    ops: OpNames | None = None

    @field_validator("ops", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Layer:
    """One layer in place, with the shapes that stem and stages give it; `ops` has one name where there is no choice."""

    where: str  # "stem", "stage 2" or "head"
    ops: tuple[str, ...]
    in_channels: int
    out_channels: int
    stride: int
    in_size: int

    @property
    def out_size(self) -> int:
        return out_size(self.in_size, self.stride)

    @property
    def keeps_shape(self) -> bool:
        return self.in_channels == self.out_channels and self.stride == 1

    def is_nothing(self, op: str) -> bool:
        """Whether this op does nothing here: an identity that changes no shape."""
        return is_nothing(op, self.in_channels, self.out_channels, self.stride)

    def cost(self, op: str) -> Cost:
        return op_cost(op, self.in_channels, self.out_channels, self.stride, self.in_size)


class Space(_Data):
    """A search space: stages of layers that have a choice of ops, between a fixed stem and a fixed head.

    A path has one op index for every layer of the stages.

    Attributes:
        name: The name.
        ops: The names of the ops that every layer can choose from.
        stages: The stages.
        stem: Fixed layers before them.
        head: Fixed layers behind them; pooling and a linear layer follow.
        image_size: The height and width of images in pixels.
        image_channels: 1 or 3.
        num_classes: The classes.
        activation: "relu" or "hard_swish", inside MB blocks.

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
    ops: OpNames
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=64)]
    stem: Annotated[tuple[Fixed, ...], Field(min_length=1, max_length=64)]
    head: Annotated[tuple[Fixed, ...], Field(max_length=64)] = ()
    image_size: Annotated[int, Field(ge=1, le=4096)] = 224
    image_channels: Annotated[int, Field(ge=1, le=64)] = 3
    num_classes: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    activation: Literal["relu", "hard_swish"] = "relu"  # inside MB blocks; stem and head convolutions have ReLU

    @field_validator("ops", "stages", "stem", "head", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():  # names from a file end up on the terminal
            raise ValueError("has characters that cannot be printed")
        return value

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        if sum(stage.repeat for stage in self.stages) > MAX_LAYERS:
            raise GreedyNASError(f"{self.name} has more than {MAX_LAYERS} layers")
        for number, layer in enumerate((*self.stem_layers, *self.layers, *self.head_layers)):
            place = f"{layer.where} (layer {number} of the network)"
            if len(set(layer.ops)) < len(layer.ops):
                raise GreedyNASError(f"{place}: an op is listed twice")
            for op in layer.ops:
                try:
                    parse_op(op)
                    check_shape(op, layer.in_channels, layer.out_channels, layer.stride)
                except GreedyNASError as error:
                    raise GreedyNASError(f"{place}: {error}") from None
        if self.image_size < self.total_stride:
            raise GreedyNASError(
                f"image_size {self.image_size} is too small: the strides of {self.name} divide it by {self.total_stride}; "
                f"use at least {self.total_stride}"
            )
        table = self.cost_tables["params"]
        if int(table.entries.sum()) + int(table.fixed) > MAX_PARAMS:
            raise GreedyNASError(f"all ops of {self.name} together have more than {MAX_PARAMS:,} parameters")
        return self

    # What is where

    @cached_property
    def stem_layers(self) -> tuple[Layer, ...]:
        return _place(self.stem, "stem", self.image_channels, self.image_size)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers with a choice: as many as a path has ops."""
        layers: list[Layer] = []
        channels, size = self.stem_layers[-1].out_channels, self.stem_layers[-1].out_size
        for number, stage in enumerate(self.stages):
            for i in range(stage.repeat):
                stride = stage.stride if i == 0 else 1
                layers.append(
                    Layer(f"stage {number + 1}", stage.ops or self.ops, channels, stage.channels, stride, size)
                )
                channels, size = stage.channels, out_size(size, stride)
        return tuple(layers)

    @cached_property
    def head_layers(self) -> tuple[Layer, ...]:
        return _place(self.head, "head", self.layers[-1].out_channels, self.layers[-1].out_size)

    @property
    def features(self) -> int:
        """Channels before the classifier."""
        return (self.head_layers or self.layers)[-1].out_channels

    @property
    def total_stride(self) -> int:
        return math.prod(layer.stride for layer in (*self.stem_layers, *self.layers, *self.head_layers))

    @property
    def num_ops(self) -> tuple[int, ...]:
        return tuple(len(layer.ops) for layer in self.layers)

    @property
    def size(self) -> int:
        """How many paths there are."""
        return math.prod(self.num_ops)

    def adapt(
        self, num_classes: int | None = None, image_size: int | None = None, image_channels: int | None = None
    ) -> "Space":
        """The same space for another number of classes, another image size, grey or coloured images."""
        changes = {"num_classes": num_classes, "image_size": image_size, "image_channels": image_channels}
        changes = {key: value for key, value in changes.items() if value is not None}
        return _validated(self.name, {**self.model_dump(), **changes})

    def to_yaml(self) -> str:
        """The text of a file that `load_space` reads back as this space."""
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
        """n paths, i.i.d. uniform over all paths, or over those within the budget: int64 (n, layers).

        A limit on latency needs a table, and leaves out the paths that the table cannot price.
        """
        if budget is None or not budget.limits():
            return rng.integers(0, self.num_ops, size=(n, len(self.layers)))
        tables = self.cost_tables
        if "latency_ms" in budget.limits():
            if latency is None:
                raise GreedyNASError("a latency limit needs a latency table")
            tables = {**tables, "latency_ms": latency.cost_table(self)}
        return sample_feasible(tables, budget.limits(), n, rng)

    def costs(self, paths: Any) -> Costs:
        """Multiply-adds and parameters of an array of paths (n, layers), to the integer."""
        paths = self.check_paths(paths)
        return Costs(macs=self.cost_tables["macs"](paths), params=self.cost_tables["params"](paths))

    @cached_property
    def cost_tables(self) -> dict[str, CostTable]:
        """`macs` and `params` by (layer, op)."""
        entries = np.zeros((2, len(self.layers), max(self.num_ops)), dtype=np.int64)
        for i, layer in enumerate(self.layers):
            for j, op in enumerate(layer.ops):
                entries[:, i, j] = layer.cost(op)
        shared = [layer.cost(layer.ops[0]) for layer in (*self.stem_layers, *self.head_layers)]
        shared.append(linear_cost(self.features, self.num_classes))
        return {
            "macs": CostTable(entries[0], sum(cost.macs for cost in shared), self.num_ops),
            "params": CostTable(entries[1], sum(cost.params for cost in shared), self.num_ops),
        }

    # What people see

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
            for layer in (*self.stem_layers, *self.layers, *self.head_layers)
        ]
        body = "".join(
            f"<tr><td>{where}</td><td>{before}</td><td>{after}</td><td>{' '.join(map(_label, ops))}</td></tr>"
            for where, before, after, ops in rows
        )
        head = "<tr><th>where</th><th>input</th><th>output</th><th>ops</th></tr>"
        return f"<table><caption>{escape(repr(self))}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"

    def check_paths(self, paths: Any) -> IntArray:
        """Any array-like of paths as int64 (n, layers), with every index in range."""
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
    """Return the names of the spaces that ship.

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
        source: The name of a space that ships, a YAML file, or a `Space`, which is returned as it is.

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
    file = Path(source)
    if file.is_file():
        return _read(file)
    if file.suffix in (".yaml", ".yml") or len(file.parts) > 1:
        raise GreedyNASError(f"no such space file: {source}")
    raise unknown("space", str(source), [*space_names(), "or a YAML file"])


def _read(file: Path) -> Space:
    return _validated(str(file), read_yaml(file, "space file"))


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
        layers.append(Layer(where, (layer.op,), channels, layer.channels, layer.stride, size))
        channels, size = layer.channels, out_size(size, layer.stride)
    return tuple(layers)
