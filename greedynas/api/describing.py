"""Descriptions of spaces and networks as plain data, as the verb `describe` prints them."""

from typing import Any

from greedynas.spaces.describe import catalogue_facts, path_facts, space_facts
from greedynas.spaces.latency import LatencyTable
from greedynas.spaces.space import Space, load_space
from greedynas.spaces.zoo import resolve


def describe(
    space: str | Space | None = None, path: Any = None, *, latency: LatencyTable | None = None
) -> dict[str, Any]:
    """Return a description of a space, or of a network with its costs layer by layer.

    Args:
        space: A space, or the name or file of one. It is not needed for known networks.
        path: A path in any form that `parse_path` takes, or a known network's name. Without one, the space is
            described; without a space either, all named spaces and networks are listed.
        latency: A latency table, to predict latencies with.

    Returns:
        The output of `greedynas describe --json`: for a path "ops", "macs", "params" and "layers", for a space
        "layers", "paths" and the distributions of its costs.

    Raises:
        GreedyNASError: If the space or path does not exist.

    Example:
        >>> import greedynas
        >>> greedynas.describe("macro", "22212202")["macs"]
        85164544
        >>> greedynas.describe("macro")["paths"]
        6561
    """
    home = None if space is None else load_space(space)
    if path is None:
        return catalogue_facts() if home is None else space_facts(home, latency)
    home, ops = resolve(path, home)
    return path_facts(ops, home, latency)
