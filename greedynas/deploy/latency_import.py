"""The import of latency tables that other projects measured."""

import math
import re
from pathlib import Path
from typing import Any

from greedynas.deploy.latency_kit import is_timings, table_of
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.text import logger
from greedynas.runtime.yaml_files import parse_yaml
from greedynas.spaces.latency import (
    IQR_OF_NORMAL,
    MAX_MS,
    Block,
    Entry,
    LatencyTable,
    _is_json,
    _listed,
    _parse_table,
    _read,
    _shown,
    fill,
    fingerprint,
)
from greedynas.spaces.ops import out_size
from greedynas.spaces.space import Space


def import_latency(source: str | Path, space: Space, *, nearest_width: bool = False) -> LatencyTable:
    """Return a latency table for a space from a file of timings.

    Args:
        source: A YAML file in the format of ProxylessNAS or Once-for-All, the `timings.json` of a latency kit, or a table of greedynas,
            which may be for another space with the same blocks.
        space: The space.
        nearest_width: Whether missing entries are borrowed from the block of the nearest width, and marked. Entries
            without such a block stay None. By default, no entry may be missing.

    Returns:
        The table.

    Raises:
        GreedyNASError: If entries are missing, or no path could be priced by the table.

    Example:
        >>> import greedynas
        >>> from pathlib import Path
        >>> space = greedynas.load_space("tiny.yaml")
        >>> greedynas.measure_latency(space, "torch", repeats=1).save(Path("mine.json"))
        >>> greedynas.import_latency("mine.json", space).space
        'tiny'
    """
    file = Path(source)
    text = _read(file)
    unknown: list[str] = []
    if _is_json(text) and is_timings(text):
        return table_of(file, text, space)
    if _is_json(text):
        table = _parse_table(file, text)
        if table.activation != space.activation:
            raise GreedyNASError(f"{file} was timed with {table.activation}, {space.name} has {space.activation}")
        about = table.model_dump(include={"device", "backend", "threads", "constant_ms"})
        about["fit"] = table.fit if table.fingerprint == fingerprint(space) else None
        timings = _timings_of(table)
    else:
        about = {"device": _shown(file.name), "backend": "imported"}
        timings, unknown = _parse_proxyless(file, text, space.activation)
    result = fill(space, timings, nearest_width=nearest_width, **about)
    missing = result.missing()
    if missing and not nearest_width:
        raise GreedyNASError(
            f"{file} lacks {len(missing)} entries of {space.name}: {_listed(missing)}; --nearest-width uses those of "
            "the nearest width, and excludes the paths whose ops have none"
        )
    if problem := result.useless():
        raise GreedyNASError(f"{file}: {problem}")
    if unknown:
        logger.warning("%s: unknown keys are left out: %s", file, _listed(unknown))
    return result


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
_OFA = r"-se:(?P<se>[01])-hs:(?P<hs>[01])"  # Once-for-All: and `expand` is the number of channels, not the ratio
_KEYS = (
    (re.compile("expanded_conv" + _SHAPES + _IMAGE + _MB), "MB"),
    (re.compile("expanded_conv" + _SHAPES + _IMAGE + _MB.replace(r"{1,3})-kernel", r"{1,5})-kernel") + _OFA), "MB"),
    # These keys have no kernel: they are the first and the last convolution of MobileNetV2.
    (re.compile("Conv" + _SHAPES + _IMAGE), "CONV_K3"),
    (re.compile("Conv_[12]" + _SHAPES + _IMAGE), "CONV_K1"),
    (re.compile("Logits" + _SHAPES + r"(?P<out>\d{1,7})"), "FC"),
)
_POOLING = re.compile("AvgPool2D" + _SHAPES + r"1x1x\d{1,5}")


def _parse_proxyless(file: Path, text: str, activation: str) -> tuple[dict[Block, Entry], list[str]]:
    """Return timings by block, and the unknown keys.

    A key is, for example, `expanded_conv-input:14x14x80-output:14x14x96-expand:3-kernel:5-stride:1-idskip:0`, where
    idskip is the residual connection. Once-for-All adds `-se:1-hs:0` (squeeze-and-excitation, hard-swish), and times
    the pooling before the classifier by itself. Its blocks with another activation are left out.
    """
    data = parse_yaml(text, file, "latency table")
    timings: dict[Block, Entry] = {}
    pooling: dict[int, tuple[int, Entry]] = {}  # by channels: the size of the image that is pooled, and the time
    unknown = []
    for key, value in data.items():
        block = _parse_key(key) if isinstance(key, str) else None
        pool = _POOLING.fullmatch(key) if isinstance(key, str) else None
        if pool is not None and pool["size"] == pool["width"]:
            pooling[int(pool["in"])] = int(pool["size"]), _parse_timing(file, key, value)
        elif block is None:
            unknown.append(f"{key!r:.100}")
        elif "-hs:" not in key or key.endswith("-hs:1") == (activation == "hard_swish"):
            timings[block] = _parse_timing(file, key, value)
    if not timings:
        raise GreedyNASError(f"{file} is no latency table: it has no key of ProxylessNAS's or Once-for-All's format")
    return _with_pooling(timings, pooling), unknown


def _with_pooling(timings: dict[Block, Entry], pooling: dict[int, tuple[int, Entry]]) -> dict[Block, Entry]:
    """Return timings in which a classifier of pooled features includes the pooling that was timed by itself."""
    result = dict(timings)
    for block, entry in timings.items():
        if block.op == "FC" and block.in_size == 1 and block.in_channels in pooling:
            size, pool = pooling[block.in_channels]
            both = Entry(ms=entry.ms + pool.ms, spread=entry.spread + pool.spread, count=min(entry.count, pool.count))
            result[Block("FC", block.in_channels, block.out_channels, 1, size)] = both
    return result


def _parse_key(key: str) -> Block | None:
    """Return the block that a key names, or None for blocks that no space can have, such as those of oblong images."""
    match, op = next(((m, op) for pattern, op in _KEYS if (m := pattern.fullmatch(key))), (None, ""))
    if match is None or match["size"] != match["width"]:
        return None
    parts = {name: int(value) for name, value in match.groupdict().items() if value is not None}
    size, before, after = parts["size"], parts["in"], parts["out"]
    if min(size, before, after) < 1:
        return None
    if op == "FC":
        return Block("FC", before, after, 1, size)
    if op == "MB":
        ratio = parts["expand"] / before if "hs" in parts else parts["expand"]
        gate = "_SE" if parts.get("se") else ""
        block = Block(f"MB{ratio:g}_K{parts['kernel']}{gate}", before, after, parts["stride"], size)
        strides = [parts["stride"]] if block.keeps_shape == bool(parts["skip"]) else []
    else:
        strides = [1, 2, 3, 4]
    for stride in strides:
        if stride > 0 and parts["out_size"] == parts["out_width"] == out_size(size, stride):
            return Block(block.op if op == "MB" else op, before, after, stride, size)
    return None


def _parse_timing(file: Path, key: str, value: Any) -> Entry:
    if not isinstance(value, dict):
        raise GreedyNASError(f"{file}: {key}: a timing must be a mapping with mean, var and count")
    numbers = {name: value.get(name, 0) for name in ("var", "count")} | {"mean": value.get("mean")}
    for name, number in numbers.items():
        highest = MAX_MS if name == "mean" else 1e12
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 <= number <= highest:
            raise GreedyNASError(f"{file}: {key}: {name} must be a number from 0 to {highest:g}")
    spread = min(IQR_OF_NORMAL * math.sqrt(numbers["var"]), MAX_MS)
    return Entry(ms=float(numbers["mean"]), spread=spread, count=int(numbers["count"]))
