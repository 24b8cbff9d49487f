"""Latency tables: milliseconds by (layer, op) on one device, which predict the latency of any path there.

A table is measured by greedynas (`deploy/latency_measurement.py`), or filled from existing timings: a file in the
format of ProxylessNAS (Cai et al., ICLR 2019) or one of our own tables, matched block by block. An entry without a
timing stays empty, and a path that uses it cannot be priced.
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
NAMED = 8  # missing entries that a message names
IQR_OF_NORMAL = 1.349  # interquartile range over standard deviation


def _printable(text: str) -> str:
    if not text.isprintable():  # names from a file are printed on the terminal
        raise ValueError("has characters that cannot be printed")
    return text


Text = Annotated[str, Field(max_length=200), AfterValidator(_printable)]
Milliseconds = Annotated[float, Field(ge=0, le=MAX_MS, allow_inf_nan=False)]


@dataclass(frozen=True)
class Block:
    """The key of a timing: an op between given shapes."""

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
        """Return the distance between the widths of two blocks (0: equal), or None if anything else differs.

        A block that keeps its shape has a residual connection, or is an identity that does nothing, so its timing says
        nothing about a block that changes the shape.
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
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", strict=True)


class Entry(_Data):
    """The timing of one block."""

    ms: Milliseconds
    spread: Milliseconds = 0.0  # interquartile range
    count: Annotated[int, Field(ge=0, le=2**53)] = 0  # number of timings; 0 for an op that does nothing
    borrowed: Text | None = None  # the block of another width that this timing was taken from


class Row(_Data):
    """One layer of the space, with an entry for each of its ops, or None if there is no timing."""

    where: Text
    in_channels: Annotated[int, Field(ge=1)]
    out_channels: Annotated[int, Field(ge=1)]
    stride: Annotated[int, Field(ge=1)]
    in_size: Annotated[int, Field(ge=1)]
    ops: Annotated[dict[Text, Entry | None], Field(min_length=1, max_length=64)]


class Fit(_Data):
    """The quality of the fit: how well blocks and constant add up to the networks that the constant was fitted on."""

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
    threads: Annotated[int, Field(ge=1)] | None = None  # None: unknown, or not applicable
    layers: Annotated[tuple[Row, ...], Field(min_length=1, max_length=4096)]
    fixed: Annotated[tuple[Row, ...], Field(min_length=1, max_length=256)]  # stem, head, classifier: one op each
    constant_ms: Annotated[float, Field(ge=-MAX_MS, le=MAX_MS, allow_inf_nan=False)] = (
        0.0  # time of whole networks that single blocks do not show
    )
    fit: Fit | None = None

    def __repr__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread{'s' * (self.threads > 1)}"
        missing = len(self.missing())
        gaps = f", {missing} entries missing" if missing else ""
        return (
            f"LatencyTable({self.space!r} at {self.image_size} px, {len(self.layers)} layers: "
            f"{self.backend} on {self.device}{threads}{gaps})"
        )

    __str__ = __repr__

    @property
    def entries(self) -> tuple[dict[str, Entry | None], ...]:
        """The entries by layer and name of the op: `entries[layer][op_name]`."""
        return tuple(row.ops for row in self.layers)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is the same for all tables of one space, image size and number of classes."""
        shapes = [(*_shape(row), *row.ops) for row in (*self.layers, *self.fixed)]
        return _digest(self.activation, shapes)

    def check(self, space: Space) -> None:
        """Raise if this table belongs to another space."""
        refuse_sizes(space)
        if self.fingerprint == fingerprint(space):
            return
        mine = f"{self.space} at {self.image_size} px with {self.num_classes} classes"
        other = f"{space.name} at {space.image_size} px with {space.num_classes} classes"
        if mine == other:
            raise GreedyNASError(
                f"the latency table is for another space of the name {self.space}: measure or import one for this space"
            )
        raise GreedyNASError(f"the latency table is for {mine}, not for {other}: measure or import one for this space")

    def cost_table(self, space: Space) -> CostTable:
        """Return the costs of paths in milliseconds, with NaN for missing entries."""
        self.check(space)
        entries = np.full((len(space.layers), max(space.num_ops)), np.nan)
        for i, (row, layer) in enumerate(zip(self.layers, space.layers, strict=True)):
            entries[i, : len(layer.ops)] = [_ms(row.ops[op]) for op in layer.ops]
        if problem := self.useless():
            raise GreedyNASError(problem)
        fixed = sum(_ms(entry) for row in self.fixed for entry in row.ops.values())
        return CostTable(entries, fixed + self.constant_ms, space.num_ops)

    def price(self, path: Any, space: Space) -> float | None:
        """Return the predicted milliseconds of one path, or None if it uses an op without a timing."""
        cost = float(self.cost_table(space)(space.check_paths([path]))[0])
        return None if math.isnan(cost) else cost

    def missing(self) -> list[str]:
        """Return descriptions of the entries without a timing, for messages."""
        rows = [(f"layer {i}", row) for i, row in enumerate(self.layers)] + [(row.where, row) for row in self.fixed]
        return [f"{place} {Block.of(row, op)}" for place, row in rows for op, entry in row.ops.items() if entry is None]

    def borrowed(self) -> int:
        """Return the number of entries whose timing is that of another width."""
        rows = (*self.layers, *self.fixed)
        return sum(entry is not None and entry.borrowed is not None for row in rows for entry in row.ops.values())

    def priceable_paths(self) -> int:
        """Return the number of paths that use only ops with a timing."""
        return math.prod(sum(entry is not None for entry in row.ops.values()) for row in self.layers)

    def unpriceable_share(self) -> float:
        """Return the share of all paths that use an op without a timing."""
        return 1 - self.priceable_paths() / math.prod(len(row.ops) for row in self.layers)

    def useless(self) -> str | None:
        """Return why no path at all can be priced, or None if some can."""
        rows = [(f"layer {i}", row) for i, row in enumerate(self.layers)] + [(row.where, row) for row in self.fixed]
        bare = [place for place, row in rows if all(entry is None for entry in row.ops.values())]
        return f"no path of {self.space} can be priced: no timing at all for {_listed(bare)}" if bare else None

    def save(self, file: Path) -> None:
        """Write the table to a JSON file, which `load_latency_table` reads."""
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
        raise GreedyNASError(f"{file} is not a latency table of greedynas; convert it with greedynas latency import")
    return _parse_table(file, text)


def refuse_sizes(space: Space) -> None:
    """Raise a GreedyNASError for a space that chooses among image sizes: a latency table is for one."""
    if space.sizes:
        raise GreedyNASError(
            f"a latency table is for one image size, and {space.name} chooses among {', '.join(map(str, space.sizes))}: "
            f"choose one with --set image_size={space.sizes[-1]}"
        )


def fixed_layers(space: Space) -> tuple[Layer, ...]:
    """Return the layers that every path has: stem, head, and the classifier (pooling and `FC`) as one layer."""
    refuse_sizes(space)
    size = (*space.layers, *space.head_layers)[-1].out_size
    classifier = Layer("classifier", ("FC",), space.features, space.num_classes, 1, size)
    return (*space.stem_layers, *space.head_layers, *space.neck_layers, classifier)


def fingerprint(space: Space) -> str:
    """Return a hash of what a table and a space must agree on: ops and shapes of all layers, and the activation."""
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
    # A borrowed timing says nothing about the width that it was borrowed for.
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
    """Return a name in a form that a table may hold: printable, with at most 200 characters."""
    return "".join(character if character.isprintable() else " " for character in name)[:200]


# Reading files


def _read(file: Path) -> str:
    try:
        if not file.is_file():
            raise GreedyNASError(f"no such file: {file}")
        if file.stat().st_size > MAX_JSON_BYTES:
            raise GreedyNASError(f"{file} is not a latency table: it is larger than {MAX_JSON_BYTES:,} bytes")
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
    """Return the latency table of a space, filled from timings of blocks."""

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
        raise GreedyNASError(f"{file} is not a latency table: {first_problem(error).removeprefix(': ')}") from None
