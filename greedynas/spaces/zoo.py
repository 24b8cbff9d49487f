"""Known networks by name, and parsing of an architecture in any of its forms."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.spaces.ops import parse_op
from greedynas.spaces.paths import OpPath, op_names, parse_path
from greedynas.spaces.space import Space, load_space, space_names


@dataclass(frozen=True)
class KnownNetwork:
    """A published network as a path of the space that holds it.

    Attributes:
        name: The name, such as "greedynas-a".
        space: The name of the space.
        path: The path.

    Example:
        >>> import greedynas
        >>> greedynas.known_networks()["greedynas-a"].space
        'mobilenet-se'
    """

    name: str
    space: str
    path: OpPath


@cache
def known_networks() -> dict[str, KnownNetwork]:
    """Return the known networks by name: those of the paper, and Proxyless-R.

    Returns:
        A mapping from names to networks.

    Example:
        >>> import greedynas
        >>> sorted(greedynas.known_networks())
        ['greedynas-a', 'greedynas-b', 'greedynas-c', 'proxyless-r']
    """
    entries = yaml.safe_load((Path(__file__).parent / "zoo.yaml").read_text(encoding="utf-8"))
    homes = {name: load_space(name) for name in {entry["space"] for entry in entries.values()}}
    return {
        name: KnownNetwork(name, entry["space"], parse_path(entry["ops"], homes[entry["space"]]))
        for name, entry in entries.items()
    }


def resolve(path: Any, space: Space | None = None) -> tuple[Space, OpPath]:
    """Return the space and the path of a known name, op names, digits or indices; a known name implies its space."""
    if isinstance(path, str) and (known := known_networks().get(path.strip().lower())):
        home = load_space(known.space)
        if space is None:
            return home, known.path
        if space.name != known.space:
            raise GreedyNASError(f"{known.name} is a network of {known.space}, not of {space.name}")
        return space, parse_path(op_names(known.path, home), space)
    if isinstance(path, str) and _looks_like_a_name(path):
        raise unknown("network", path.strip(), list(known_networks()))
    if space is None:
        raise GreedyNASError(f"name the space of that path with --space ({', '.join(space_names())} or a YAML file)")
    return space, parse_path(path, space)


def _looks_like_a_name(text: str) -> bool:
    """Return whether a text is one word, but neither an op nor indices: `greedynas-d`, not `MB3_K3` or `0123`."""
    words = text.split()
    if len(words) != 1 or not text.strip()[0].isalpha() or "," in text:
        return False
    try:
        parse_op(words[0])
    except GreedyNASError:
        return True
    return False
