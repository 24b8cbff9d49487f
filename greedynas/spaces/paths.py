"""The forms of an architecture: a tuple of op indices, op names, a compact string; and its canonical form.

Everything that stores or sends an architecture uses the tuple (a list in JSON). Names are shown to people.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.spaces.ops import parse_op
from greedynas.spaces.space import Layer, Space

OpPath = tuple[int, ...]


def parse_path(path: Any, space: Space) -> OpPath:
    """Return a path as a tuple of op indices.

    Args:
        path: A sequence of indices or of op names, a text of op names, digits ("22212202"), or indices with separators ("0,12,3").
        space: The space of the path.

    Returns:
        One op index for each layer.

    Raises:
        GreedyNASError: If it is not a path of the space.

    Example:
        >>> import greedynas
        >>> greedynas.parse_path("22212202", greedynas.load_space("macro"))
        (2, 2, 2, 1, 2, 2, 0, 2)
    """
    if isinstance(path, str):
        items: list[Any] = path.translate(str.maketrans(",|[]", "    ")).split()
        if (
            len(items) == 1
            and items[0].isascii()
            and items[0].isdigit()
            and len(space.layers) > 1
            and max(space.num_ops) <= 10
        ):
            items = list(items[0])
        if items and all(item.isascii() and item.isdigit() and len(item) < 10 for item in items):
            items = [int(item) for item in items]
    elif isinstance(path, Iterable):
        items = list(path)
    else:
        raise GreedyNASError(f"a path is a sequence of op indices or names, got {path!r:.80}")
    if len(items) != len(space.layers):
        raise GreedyNASError(f"a path of {space.name} has {len(space.layers)} ops, got {len(items)}")
    return tuple(
        _op_index(item, i, layer, space) for i, (item, layer) in enumerate(zip(items, space.layers, strict=True))
    )


def _op_index(item: Any, position: int, layer: Layer, space: Space) -> int:
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        if not 0 <= item < len(layer.ops):
            raise GreedyNASError(
                f"layer {position} of {space.name} has no op {item}, only 0 to {len(layer.ops) - 1} ({' '.join(layer.ops)})"
            )
        return int(item)
    if not isinstance(item, str):
        raise GreedyNASError(f"layer {position}: an op is an index or a name, got {item!r:.80}")
    if item in layer.ops:
        return layer.ops.index(item)
    try:
        parse_op(item)
    except GreedyNASError:
        raise unknown(f"op of layer {position} of {space.name}", item, list(layer.ops)) from None
    raise GreedyNASError(f"op {item} is not in layer {position} of {space.name}, which has {' '.join(layer.ops)}")


def op_names(path: Sequence[int], space: Space) -> list[str]:
    """Return the names of the ops of a path.

    Args:
        path: A path.
        space: Its space.

    Returns:
        One name for each layer.

    Example:
        >>> import greedynas
        >>> greedynas.op_names((2, 0, 2, 0, 1, 2, 0, 1), greedynas.load_space("macro"))[:3]
        ['MB6_K5', 'ID', 'MB6_K5']
    """
    return [layer.ops[op] for layer, op in zip(space.layers, path, strict=True)]


def most_expensive(space: Space) -> OpPath:
    """Return the path with the most multiply-adds: of every layer the most expensive op."""
    return tuple(int(cells.argmax()) for cells in space.cost_tables["macs"].by_layer())


def compact(path: Sequence[int], space: Space) -> str:
    """Return the shortest text that `parse_path` reads: digits if no layer has over ten ops, else indices with commas.

    Args:
        path: A path.
        space: Its space.

    Returns:
        The text.

    Example:
        >>> import greedynas
        >>> greedynas.compact((2, 2, 2, 1, 2, 2, 0, 2), greedynas.load_space("macro"))
        '22212202'
    """
    return ("" if max(space.num_ops) <= 10 else ",").join(str(op) for op in path)


def pretty(path: Sequence[int], space: Space) -> str:
    """Return the op names of a path with `|` between stages."""
    names = iter(op_names(path, space))
    size = f"{next(names)} | " if space.sizes else ""
    return size + " | ".join(" ".join(next(names) for _ in range(stage.repeat)) for stage in space.stages)


def canonical(path: Sequence[int], space: Space) -> OpPath:
    """Return the path that represents all paths with the same network.

    Where neither width nor resolution changes, an identity does nothing, so only the order of the other ops matters:
    they come first and the identities last. Inside a supernet, two such paths still use different weights. Around a
    pretrained network, whose blocks differ from place to place, every path is a network of its own.

    Args:
        path: A path.
        space: Its space.

    Returns:
        The canonical path.

    Example:
        >>> import greedynas
        >>> greedynas.canonical((2, 0, 2, 0, 1, 2, 0, 1), greedynas.load_space("macro"))
        (2, 0, 2, 1, 0, 2, 1, 0)
    """
    if space.base is not None:  # pretrained blocks differ from place to place
        return tuple(path)
    result: list[int] = []
    for start, stop in _runs(space):
        layers = space.layers[start:stop]
        chosen = [layer.ops[op] for layer, op in zip(layers, path[start:stop], strict=True)]
        working = tuple(op for layer, op in zip(layers, chosen, strict=True) if not layer.is_nothing(op))
        names = _earliest(working, tuple(layer.ops for layer in layers))
        assert names is not None  # the path itself is one such placement
        result += [layer.ops.index(name) for name, layer in zip(names, layers, strict=True)]
    return tuple(result)


@lru_cache
def _runs(space: Space) -> list[tuple[int, int]]:
    """Return the ranges of layers over which ops may move: neighbours that keep their shape; others are single."""
    runs: list[tuple[int, int]] = []
    for i, layer in enumerate(space.layers):
        if i and layer.keeps_shape and space.layers[i - 1].keeps_shape:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs


@lru_cache(maxsize=100_000)
def _earliest(ops: tuple[str, ...], layers: tuple[tuple[str, ...], ...]) -> tuple[str, ...] | None:
    """Place `ops` in order on the earliest layers that offer them, and identities on the others; None if impossible."""
    if not layers:
        return () if not ops else None
    here, later = layers[0], layers[1:]
    if ops and ops[0] in here and (rest := _earliest(ops[1:], later)) is not None:
        return (ops[0], *rest)
    if "ID" in here and (rest := _earliest(ops, later)) is not None:
        return ("ID", *rest)
    return None
