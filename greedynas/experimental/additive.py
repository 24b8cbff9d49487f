"""A search that ranks paths by their accuracy mixed with an additive model of all evaluated paths. Not in the paper.

The accuracy of a single path on a supernet is uncertain, because the weights were last updated for other paths; the
mean over all paths with a certain op is much less so. If networks are nearly additive, the mixed score ranks better
than the accuracy alone. The record that justifies it is `study macro` (docs/results/studies.md), by which the share of
a half was chosen. In the demo's space it has no benefit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from greedynas.greedy.searchers.additive import additive_model
from greedynas.runtime.errors import GreedyNASError
from greedynas.settings.experiments import Hooks
from greedynas.spaces.paths import OpPath


def additive(share: Any, hooks: Hooks) -> Hooks:
    """Return the hooks with a score in which an additive model has this share."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise GreedyNASError(f"experimental.additive must be a share between 0 and 1, got {share!r:.80}")
    return replace(hooks, score=Blended(share)) if share > 0 else hooks


@dataclass(frozen=True)
class Blended:
    """A score that mixes accuracies with an additive model, which is fitted to the same paths."""

    share: float

    def __call__(self, paths: Sequence[OpPath], accuracies: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the score of each path."""
        return blended(paths, accuracies, self.share)


def blended(paths: ArrayLike, accuracies: NDArray[Any], share: float) -> NDArray[np.float64]:
    """Return `share` times an additive model, fitted to these paths, plus `1 - share` times their accuracies."""
    accuracies = np.asarray(accuracies, float)
    if share == 0 or np.ptp(accuracies) == 0:  # a fit to equal numbers would rank by rounding errors
        return accuracies
    return (1 - share) * accuracies + share * additive_model(paths, accuracies)
