"""Latency tables: milliseconds by (layer, op) on one device, to price paths that nobody has run there.

A table is measured here (`timing.py`), or filled from timings of somebody else: a file in the format of ProxylessNAS
(Cai et al., ICLR 2019) or one of our own tables, matched block by block. What has no timing stays empty, and a path that
uses it cannot be priced.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from greedynas.cleaning import logger
from greedynas.cost import CostTable
from greedynas.errors import GreedyNASError
from greedynas.files import write_json
from greedynas.ops import out_size
from greedynas.space import Layer, Space, first_problem
from greedynas.yamlfiles import parse_yaml

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
    """Latency by (layer, op) of one space at one image size and number of classes, on one device."""

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

    @property
    def entries(self) -> tuple[dict[str, Entry | None], ...]:
        """entries[layer][op name]."""
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


@dataclass(frozen=True)
class Block:
    """What a timing belongs to: an op between given shapes."""

    op: str
    in_channels: int
    out_channels: int
    stride: int
    in_size: int

    @classmethod
    def of(cls, layer: Layer | Row, op: str) -> "Block":
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


def load_latency_table(source: str | Path | LatencyTable) -> LatencyTable:
    """A table that `latency measure` or `latency import` wrote, or one as it is."""
    if isinstance(source, LatencyTable):
        return source
    file = Path(source)
    text = _read(file)
    if not _is_json(text):
        raise GreedyNASError(f"{file} is no latency table of ours; make one of it with greedynas latency import")
    return _parse_table(file, text)


def import_latency(source: str | Path, space: Space, *, nearest_width: bool = False) -> LatencyTable:
    """A table for `space` from a file of timings: ProxylessNAS's YAML or a table of ours, perhaps for another space.

    Without `nearest_width` every entry must be there. With it, a missing entry is borrowed from the block of the nearest
    width and is marked; what is missing even then stays None. A table that could price no path at all is refused.
    """
    file = Path(source)
    text = _read(file)
    strange: list[str] = []
    if _is_json(text):
        table = _parse_table(file, text)
        if table.activation != space.activation:
            raise GreedyNASError(f"{file} was timed with {table.activation}, {space.name} has {space.activation}")
        about = table.model_dump(include={"device", "backend", "threads", "constant_ms"})
        about["fit"] = table.fit if table.fingerprint == fingerprint(space) else None
        timings = _timings_of(table)
    else:
        about = {"device": _shown(file.name), "backend": "imported"}
        timings, strange = _parse_proxyless(file, text)
    result = fill(space, timings, nearest_width=nearest_width, **about)
    missing = result.missing()
    if missing and not nearest_width:
        raise GreedyNASError(
            f"{file} lacks {len(missing)} entries of {space.name}: {_listed(missing)}; --nearest-width takes those of "
            "the nearest width, and leaves out the paths whose ops have none"
        )
    if problem := result.useless():
        raise GreedyNASError(f"{file}: {problem}")
    if strange:
        logger.warning("%s: keys that are not understood are left out: %s", file, _listed(strange))
    return result


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


def _parse_table(file: Path, text: str) -> LatencyTable:
    try:
        return LatencyTable.model_validate_json(text)
    except ValidationError as error:
        raise GreedyNASError(f"{file} is no latency table: {first_problem(error).removeprefix(': ')}") from None


def _timings_of(table: LatencyTable) -> dict[Block, Entry]:
    timings: dict[Block, Entry] = {}
    for row in (*table.layers, *table.fixed):
        for op, entry in row.ops.items():
            if entry is not None:
                timings.setdefault(Block.of(row, op), entry)
    return timings


_SHAPES = r"-input:(?P<size>\d{1,5})x(?P<width>\d{1,5})x(?P<in>\d{1,5})-output:"
_IMAGE = r"(?P<out_size>\d{1,5})x(?P<out_width>\d{1,5})x(?P<out>\d{1,5})"
_MB = r"-expand:(?P<expand>\d{1,3})-kernel:(?P<kernel>\d{1,3})-stride:(?P<stride>\d)-idskip:(?P<skip>[01])"
_KEYS = (
    (re.compile("expanded_conv" + _SHAPES + _IMAGE + _MB), "MB"),
    (re.compile("Conv" + _SHAPES + _IMAGE), "CONV_K3"),  # the format has no kernel here: MobileNetV2's first one ...
    (re.compile("Conv_1" + _SHAPES + _IMAGE), "CONV_K1"),  # ... and its last
    (re.compile("Logits" + _SHAPES + r"(?P<out>\d{1,7})"), "FC"),
)


def _parse_proxyless(file: Path, text: str) -> tuple[dict[Block, Entry], list[str]]:
    """Timings by block, and the keys that are not understood.

    Keys are such as `expanded_conv-input:14x14x80-output:14x14x96-expand:3-kernel:5-stride:1-idskip:0`; idskip is the
    residual connection.
    """
    data = parse_yaml(text, file, "latency table")
    timings: dict[Block, Entry] = {}
    strange = []
    for key, value in data.items():
        block = _parse_key(key) if isinstance(key, str) else None
        if block is None:
            strange.append(f"{key!r:.100}")
        else:
            timings[block] = _parse_timing(file, key, value)
    if not timings:
        raise GreedyNASError(f"{file} is no latency table: no key of ProxylessNAS's format in it")
    return timings, strange


def _parse_key(key: str) -> Block | None:
    """The block that a key names; None for what our spaces cannot contain, such as images that are not square."""
    match, op = next(((m, op) for pattern, op in _KEYS if (m := pattern.fullmatch(key))), (None, ""))
    if match is None or match["size"] != match["width"]:
        return None
    parts = {name: int(value) for name, value in match.groupdict().items()}
    size, before, after = parts["size"], parts["in"], parts["out"]
    if min(size, before, after) < 1:
        return None
    if op == "FC":
        return Block("FC", before, after, 1, size)
    if op == "MB":
        block = Block(f"MB{parts['expand']}_K{parts['kernel']}", before, after, parts["stride"], size)
        strides = [parts["stride"]] if block.keeps_shape == bool(parts["skip"]) else []
    else:
        strides = [1, 2, 3, 4]
    for stride in strides:
        if stride > 0 and parts["out_size"] == parts["out_width"] == out_size(size, stride):
            return Block(block.op if op == "MB" else op, before, after, stride, size)
    return None


def _parse_timing(file: Path, key: str, value: Any) -> Entry:
    if not isinstance(value, dict):
        raise GreedyNASError(f"{file}: {key}: a timing is a mapping with mean, var and count")
    numbers = {name: value.get(name, 0) for name in ("var", "count")} | {"mean": value.get("mean")}
    for name, number in numbers.items():
        highest = MAX_MS if name == "mean" else 1e12
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 <= number <= highest:
            raise GreedyNASError(f"{file}: {key}: {name} must be a number from 0 to {highest:g}")
    spread = min(IQR_OF_NORMAL * math.sqrt(numbers["var"]), MAX_MS)
    return Entry(ms=float(numbers["mean"]), spread=spread, count=int(numbers["count"]))
