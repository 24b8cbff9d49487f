"""Import of latency tables that other projects measured."""

import math
import re
from pathlib import Path
from typing import Any

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
        source: A YAML file in the format of ProxylessNAS, or a table of greedynas, perhaps for another space with the same blocks.
        space: The space.
        nearest_width: Whether an entry that is missing is borrowed from the block of the nearest width, and marked. What is missing
            even then stays None. Otherwise every entry must be there.

    Returns:
        The table.

    Raises:
        GreedyNASError: If entries are missing, or the table could price no path at all.

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
