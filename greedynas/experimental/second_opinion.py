"""A search that asks for a second opinion: the rank of a path among untrained networks (NWOT). Not in the paper.

A supernet ranks the best networks worst, since what separates them is small beside the error that shared weights bring.
The score of an untrained network knows nothing of the supernet, so its errors are others. Both rankings of all evaluated
paths are mixed, and the mixed order is put on the scale of the accuracies. Seen with the truth in view on NAS-Bench-Macro,
and not proven elsewhere: docs/results/studies.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from greedynas.data.datasets import Data
from greedynas.greedy.searchers.task import Score
from greedynas.models.nwot import BATCH, nwot_score
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream
from greedynas.settings.experiments import Hooks
from greedynas.spaces.paths import OpPath, canonical
from greedynas.spaces.space import Space


def second_opinion(weight: Any, hooks: Hooks) -> Hooks:
    """Return the hooks with a search in whose ranking untrained networks have this weight."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
        raise GreedyNASError(f"experimental.second_opinion must be a weight between 0 and 1, got {weight!r:.80}")

    def refine(score: Score | None, space: Space, data: Data, seed: int) -> Score:
        if space.base is not None:
            raise GreedyNASError(
                "experimental.second_opinion ranks untrained networks, and those around a pretrained network are trained: "
                "use it in a space without a base"
            )
        rows = stream(seed, "second opinion").choice(len(data.train), min(BATCH, len(data.train)), replace=False)
        images, _ = data.train.eval_batch(rows)
        return SecondOpinion(float(weight), space, images.float().cpu(), seed, score)

    return replace(hooks, refine_score=refine) if weight > 0 else hooks


@dataclass(frozen=True)
class SecondOpinion:
    """A score that mixes the ranks of paths by accuracy (or by another score) and by their untrained networks."""

    weight: float
    space: Space
    images: Tensor
    seed: int
    first: Score | None = None  # None: the accuracies
    known: dict[OpPath, float] = field(default_factory=dict)  # scores of untrained networks by canonical path

    def __call__(self, paths: Sequence[OpPath], accuracies: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the score of each path: the mixed order of the paths, with the values of the first opinion."""
        values = accuracies if self.first is None else self.first(paths, accuracies)
        return in_mixed_order(values, np.array([self.untrained(tuple(path)) for path in paths]), self.weight)

    def untrained(self, path: OpPath) -> float:
        """Return the score of a path as an untrained network."""
        form = canonical(path, self.space)
        if form not in self.known:
            self.known[form] = nwot_score(form, self.space, self.images, self.seed)
        return self.known[form]


def in_mixed_order(values: NDArray[np.float64], opinions: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
    """Return the sorted `values` in the order of a weighted mean of both ranks; equal means get equal values."""
    mixed = (1 - weight) * rankdata(values) + weight * rankdata(opinions)
    places = rankdata(mixed.round(6), method="min").astype(int) - 1
    ordered: NDArray[np.float64] = np.sort(values)[places]
    return ordered
