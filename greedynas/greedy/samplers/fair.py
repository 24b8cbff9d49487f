"""Strict fairness (FairNAS, Chu et al., ICCV 2021): an update trains every op of every layer exactly once."""

import numpy as np

from greedynas.greedy.samplers.sampler import Draw, Drawn, Sampler
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.paths import OpPath, parse_path
from greedynas.spaces.space import Space


class Fair(Sampler):
    """Draws as many paths for an update as a layer has ops; no two of them share an op."""

    def check(self, space: Space) -> None:
        if len(set(space.num_ops)) > 1:
            raise GreedyNASError(
                "the fair sampler needs the same number of ops in every layer; "
                f"{space.name} has {sorted(set(space.num_ops))}"
            )

    def paths_per_update(self, space: Space) -> int:
        return max(space.num_ops)

    def draw(self, draw: Draw) -> Drawn:
        return Drawn([fair_paths(draw.space, draw.rng)])


def fair_paths(space: Space, rng: np.random.Generator) -> list[OpPath]:
    """Return as many paths as a layer has ops, which together use every op of every layer exactly once."""
    Fair().check(space)
    orders = [rng.permutation(count) for count in space.num_ops]
    return [parse_path(path, space) for path in np.stack(orders, axis=1)]
