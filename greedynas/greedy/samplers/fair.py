"""Strict fairness (FairNAS)."""

import numpy as np

from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.paths import OpPath, parse_path
from greedynas.spaces.space import Space


def fair_paths(space: Space, rng: np.random.Generator) -> list[OpPath]:
    """Strict fairness (FairNAS): as many paths as a layer has ops, in which every op of every layer is met exactly once."""
    if len(set(space.num_ops)) > 1:
        raise GreedyNASError(
            f"the fair sampler needs as many ops in every layer, {space.name} has {sorted(set(space.num_ops))}"
        )
    orders = [rng.permutation(count) for count in space.num_ops]
    return [parse_path(path, space) for path in np.stack(orders, axis=1)]
