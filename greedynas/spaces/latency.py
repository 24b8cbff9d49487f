"""Latency tables: milliseconds by (layer, op) on one device, to price paths that nobody has run there.

A table is measured here (`timing.py`), or filled from timings of somebody else: a file in the format of ProxylessNAS
(Cai et al., ICLR 2019) or one of our own tables, matched block by block. What has no timing stays empty, and a path that
uses it cannot be priced.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from greedynas.runtime.errors import GreedyNASError, first_problem
from greedynas.runtime.files import write_json
from greedynas.spaces.costs import CostTable
from greedynas.spaces.space import Layer, Space

MAX_JSON_BYTES = 20_000_000
MAX_MS = 600_000.0  # ten minutes for one block: a larger number is an error of units
NAMED = 8  # of a list of missing entries
IQR_OF_NORMAL = 1.349  # interquartile range over standard deviation


def _printable(text: str) -> str:
    if not text.isprintable():  # names from a file end up on the terminal
        raise ValueError("has characters that cannot be printed")
    return text


Text = Annotated[str, Field(max_length=200), AfterValidator(_printable)]
Milliseconds = Annotated[float, Field(ge=0, le=MAX_MS, allow_inf_nan=False)]


@dataclass(frozen=True)
class Block:
    """What a timing belongs to: an op between given shapes."""

    op: str
    in_channels: int
    out_channels: int
    stride: int
    in_size: int

    @classmethod
    def of(cls, layer: "Layer | Row", op: str) -> "Block":
        return cls(op, layer.in_channels, layer.out_channels, layer.stride, layer.in_size)

    @property
    def keeps_shape(self) -> bool:
        return self.in_channels == self.out_channels and self.stride == 1

    def __str__(self) -> str:
        size = self.in_size
        stride = f" /{self.stride}" if self.stride > 1 else ""
        return f"{self.op} {size}x{size}x{self.in_channels} to {self.out_channels} channels{stride}"

    def width_apart(self, other: "Block") -> float | None:
        """How far the widths of two blocks are apart (0: equal), or None where anything else differs.

        A block that keeps its shape has a residual connection, or, as an identity, does nothing at all: it stands for
        no block that changes it.
        """
        if (self.op, self.stride, self.in_size, self.keeps_shape) != (
            other.op,
            other.stride,
            other.in_size,
            other.keeps_shape,
        ):
            return None
        ratios = self.in_channels / other.in_channels, self.out_channels / other.out_channels
        return sum(abs(math.log(ratio)) for ratio in ratios)


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Entry(_Data):
    """What one block takes."""

    ms: Milliseconds
    spread: Milliseconds = 0.0  # interquartile range
    count: Annotated[int, Field(ge=0, le=2**53)] = 0  # timings behind it; 0 where nothing happens
    borrowed: Text | None = None  # the block of another width whose timing this is


class Row(_Data):
    """One layer as it lies in the space, with an entry for each of its ops; None where there is no timing."""

    where: Text
    in_channels: Annotated[int, Field(ge=1)]
    out_channels: Annotated[int, Field(ge=1)]
    stride: Annotated[int, Field(ge=1)]
    in_size: Annotated[int, Field(ge=1)]
    ops: Annotated[dict[Text, Entry | None], Field(min_length=1, max_length=64)]


class Fit(_Data):
    """How well blocks and constant added up to the whole networks that the constant was fitted on."""

    networks: Annotated[int, Field(ge=1)]
    median_error: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # relative


class LatencyTable(_Data):
    """The latency of each op in each layer of a space, for one device, image size and number of classes.

    Example:
        >>> import greedynas
        >>> table = greedynas.measure_latency(greedynas.load_space("tiny.yaml"), "torch", repeats=1)
        >>> table.price((0, 1, 0, 1), greedynas.load_space("tiny.yaml")) > 0
        True
    """

    schema_version: Literal[1] = 1
    space: Text
    image_size: Annotated[int, Field(ge=1)]
    num_classes: Annotated[int, Field(ge=1)]
    activation: Text
    device: Text
    backend: Text
    threads: Annotated[int, Field(ge=1)] | None = None  # None: not known, or not a matter of threads
    layers: Annotated[tuple[Row, ...], Field(min_length=1, max_length=4096)]
    fixed: Annotated[tuple[Row, ...], Field(min_length=1, max_length=256)]  # stem, head, classifier: one op each
    constant_ms: Annotated[float, Field(ge=-MAX_MS, le=MAX_MS, allow_inf_nan=False)] = 0.0  # what blocks do not show
    fit: Fit | None = None

    def __repr__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread{'s' * (self.threads > 1)}"
        missing = len(self.missing())
        told = f", {missing} entries missing" if missing else ""
        return (
            f"LatencyTable({self.space!r} at {self.image_size} px, {len(self.layers)} layers: "
            f"{self.backend} on {self.device}{threads}{told})"
        )

    __str__ = __repr__

    @property
    def entries(self) -> tuple[dict[str, Entry | None], ...]:
        """The entries by layer and name of the op: `entries[layer][op_name]`."""
        return tuple(row.ops for row in self.layers)

    @cached_property
    def fingerprint(self) -> str:
        """The same for all tables of one space, image size and number of classes."""
        shapes = [(*_shape(row), *row.ops) for row in (*self.layers, *self.fixed)]
        return _digest(self.activation, shapes)

    def check(self, space: Space) -> None:
        """Raise if this table belongs to another space."""
        if self.fingerprint == fingerprint(space):
            return
        mine = f"{self.space} at {self.image_size} px with {self.num_classes} classes"
        other = f"{space.name} at {space.image_size} px with {space.num_classes} classes"
        if mine == other:
            raise GreedyNASError(f"the latency table is for another space that is called {self.space}, too")
        raise GreedyNASError(f"the latency table is for {mine}, not for {other}: measure or import one for that")

    def cost_table(self, space: Space) -> CostTable:
        """The table that prices paths, in milliseconds; NaN where an entry is missing."""
        self.check(space)
        entries = np.full((len(space.layers), max(space.num_ops)), np.nan)
        for i, (row, layer) in enumerate(zip(self.layers, space.layers, strict=True)):
            entries[i, : len(layer.ops)] = [_ms(row.ops[op]) for op in layer.ops]
        if problem := self.useless():
            raise GreedyNASError(problem)
        fixed = sum(_ms(entry) for row in self.fixed for entry in row.ops.values())
        return CostTable(entries, fixed + self.constant_ms, space.num_ops)

    def price(self, path: Any, space: Space) -> float | None:
        """Milliseconds of one path, or None where it uses an op without a timing."""
        cost = float(self.cost_table(space)(space.check_paths([path]))[0])
        return None if math.isnan(cost) else cost

    def missing(self) -> list[str]:
        """What has no timing, for people to read."""
        rows = [(f"layer {i}", row) for i, row in enumerate(self.layers)] + [(row.where, row) for row in self.fixed]
        return [f"{place} {Block.of(row, op)}" for place, row in rows for op, entry in row.ops.items() if entry is None]

    def borrowed(self) -> int:
        """How many entries are timings of another width."""
        rows = (*self.layers, *self.fixed)
        return sum(entry is not None and entry.borrowed is not None for row in rows for entry in row.ops.values())

    def priceable_paths(self) -> int:
        """How many paths use only ops with a timing."""
        return math.prod(sum(entry is not None for entry in row.ops.values()) for row in self.layers)

    def unpriceable_share(self) -> float:
        """The share of all paths that use an op without a timing."""
        return 1 - self.priceable_paths() / math.prod(len(row.ops) for row in self.layers)

    def useless(self) -> str | None:
        """Why no path at all can be priced, if that is so."""
        rows = [(f"layer {i}", row) for i, row in enumerate(self.layers)] + [(row.where, row) for row in self.fixed]
        bare = [place for place, row in rows if all(entry is None for entry in row.ops.values())]
        return f"no path of {self.space} can be priced: no timing at all for {_listed(bare)}" if bare else None

    def save(self, file: Path) -> None:
        try:
            write_json(file, self.model_dump(mode="json"))
        except OSError as error:
            raise GreedyNASError(f"cannot write {file}: {error.strerror}") from None


def load_latency_table(source: str | Path | LatencyTable) -> LatencyTable:
    """Read a latency table that `measure_latency` or `import_latency` made.

    Args:
        source: The file, or a table, which is returned as it is.

    Returns:
        The table.

    Raises:
        GreedyNASError: If there is no such file, or it is not a latency table.

    Example:
        >>> import greedynas
        >>> from pathlib import Path
        >>> greedynas.measure_latency(greedynas.load_space("tiny.yaml"), "torch", repeats=1).save(Path("tiny.json"))
        >>> greedynas.load_latency_table("tiny.json").space
        'tiny'
    """
    if isinstance(source, LatencyTable):
        return source
    file = Path(source)
    text = _read(file)
    if not _is_json(text):
        raise GreedyNASError(f"{file} is no latency table of ours; make one of it with greedynas latency import")
    return _parse_table(file, text)


def fixed_layers(space: Space) -> tuple[Layer, ...]:
    """What every path has: stem, head, and the classifier (pooling and `FC`) as a layer of its own."""
    size = (*space.layers, *space.head_layers)[-1].out_size
    classifier = Layer("classifier", ("FC",), space.features, space.num_classes, 1, size)
    return (*space.stem_layers, *space.head_layers, classifier)


def fingerprint(space: Space) -> str:
    """What a table and a space must agree on: ops and shapes of all layers, and the activation."""
    return _digest(space.activation, [(*_shape(layer), *layer.ops) for layer in (*space.layers, *fixed_layers(space))])


def _digest(activation: str, shapes: list[tuple[Any, ...]]) -> str:
    return hashlib.sha256(json.dumps([activation, shapes]).encode()).hexdigest()[:16]


def _shape(layer: Layer | Row) -> tuple[int, ...]:
    return layer.in_channels, layer.out_channels, layer.stride, layer.in_size


def _entry(block: Block, layer: Layer, timings: Mapping[Block, Entry], nearest_width: bool) -> Entry | None:
    if layer.is_nothing(block.op):
        return Entry(ms=0.0)
    if block in timings or not nearest_width:
        return timings.get(block)
    candidates = [(block.width_apart(other), str(other), other) for other in timings]
    near = [(apart, text, other) for apart, text, other in candidates if apart is not None]
    # A borrowed timing says nothing about the width that it stands at.
    near = [candidate for candidate in near if timings[candidate[2]].borrowed is None]
    if not near:
        return None
    _, text, nearest = min(near, key=lambda candidate: candidate[:2])
    return timings[nearest].model_copy(update={"borrowed": text})


def _ms(entry: Entry | None) -> float:
    return math.nan if entry is None else entry.ms


def _listed(items: list[str]) -> str:
    rest = len(items) - NAMED
    return ", ".join(items[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _shown(name: str) -> str:
    """A name as a table may hold it."""
    return "".join(character if character.isprintable() else " " for character in name)[:200]


# Files from others


def _read(file: Path) -> str:
    try:
        if not file.is_file():
            raise GreedyNASError(f"no such file: {file}")
        if file.stat().st_size > MAX_JSON_BYTES:
            raise GreedyNASError(f"{file}: larger than {MAX_JSON_BYTES:,} bytes, that is no latency table")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise GreedyNASError(f"cannot read {file}: it is not text") from None
    except OSError as error:
        raise GreedyNASError(f"cannot read {file}: {error.strerror}") from None


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] == "{"


def fill(
    space: Space,
    timings: Mapping[Block, Entry],
    *,
    nearest_width: bool = False,
    device: str,
    backend: str,
    threads: int | None = None,
    constant_ms: float = 0.0,
    fit: Fit | None = None,
) -> LatencyTable:
    """Put timings in their places."""

    def row(layer: Layer) -> Row:
        return Row(
            where=layer.where,
            in_channels=layer.in_channels,
            out_channels=layer.out_channels,
            stride=layer.stride,
            in_size=layer.in_size,
            ops={op: _entry(Block.of(layer, op), layer, timings, nearest_width) for op in layer.ops},
        )

    return LatencyTable(
        space=_shown(space.name),
        image_size=space.image_size,
        num_classes=space.num_classes,
        activation=space.activation,
        device=device,
        backend=backend,
        threads=threads,
        layers=tuple(row(layer) for layer in space.layers),
        fixed=tuple(row(layer) for layer in fixed_layers(space)),
        constant_ms=constant_ms,
        fit=fit,
    )


def _parse_table(file: Path, text: str) -> LatencyTable:
    try:
        return LatencyTable.model_validate_json(text)
    except ValidationError as error:
        raise GreedyNASError(f"{file} is no latency table: {first_problem(error).removeprefix(': ')}") from None
