"""Greedy path filtering: Algorithm 1 of the paper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from greedynas.greedy.pool import CandidatePool
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.spaces.paths import OpPath, parse_path
from greedynas.spaces.space import Space

Evaluate = Callable[[Sequence[OpPath]], Sequence[float]]
Explore = Callable[[], OpPath]


@dataclass(frozen=True)
class Filtered:
    """The outcome of one filtering: the k best of m paths, best first, and the others.

    Attributes:
        kept: The k best paths, each with its loss.
        rejected: The other paths, each with its loss.
        evaluated: How many distinct paths were evaluated.

    Example:
        >>> import greedynas, numpy
        >>> space, rng = greedynas.load_space("macro"), numpy.random.default_rng(0)
        >>> filtered = greedynas.filter_paths(space, lambda paths: [sum(path) for path in paths], 10, 5, rng)
        >>> len(filtered.kept), len(filtered.rejected), filtered.kept[0][1] <= filtered.rejected[-1][1]
        (5, 5, True)
    """

    kept: list[tuple[OpPath, float]]
    rejected: list[tuple[OpPath, float]]
    evaluated: int  # distinct paths

    def agreed(self) -> "Filtered":
        """Return the outcome of rank 0 on every rank."""
        kept, rejected = ranks.broadcast((self.kept, self.rejected))
        return replace(self, kept=_with_tuples(kept), rejected=_with_tuples(rejected))


def _with_tuples(entries: Sequence[tuple[Sequence[int], float]]) -> list[tuple[OpPath, float]]:
    return [(tuple(path), loss) for path, loss in entries]


def filter_paths(
    space: Space,
    evaluate: Evaluate,
    m: int,
    k: int,
    rng: np.random.Generator,
    pool: CandidatePool | None = None,
    epsilon: float = 0.0,
    explore: Explore | None = None,
) -> Filtered:
    """Sample m paths from the space and the pool, rank them by loss and keep the best k: Algorithm 1.

    A path that is sampled twice counts twice among the m and the k, and is evaluated once.

    Args:
        space: The space.
        evaluate: A function that takes distinct paths and returns their losses, all on the same validation batch.
        m: How many paths are sampled.
        k: How many of them are kept.
        rng: The random number generator.
        pool: The candidate pool; without one, or while it is empty, all paths are sampled from the space.
        epsilon: The probability with which each path is sampled from the pool.
        explore: A function that draws one path of the space; None: uniformly. A training with limits draws from the paths
            within them.

    Returns:
        The kept and the rejected paths with their losses.

    Example:
        >>> import greedynas, numpy
        >>> space, rng = greedynas.load_space("macro"), numpy.random.default_rng(0)
        >>> filtered = greedynas.filter_paths(space, lambda paths: [16 - sum(path) for path in paths], 10, 5, rng)
        >>> [loss for path, loss in filtered.kept] == sorted(loss for path, loss in filtered.kept)
        True
    """
    if not 1 <= k <= m:
        raise GreedyNASError(f"k must be between 1 and m = {m}, got k = {k}")
    paths = sample_paths(space, m, rng, pool, epsilon, explore)
    distinct = list(dict.fromkeys(paths))
    losses = dict(zip(distinct, evaluate(distinct), strict=True))
    ranked = sorted(((path, losses[path]) for path in paths), key=lambda entry: entry[1])
    return Filtered(kept=ranked[:k], rejected=ranked[k:], evaluated=len(distinct))


def sample_paths(
    space: Space,
    m: int,
    rng: np.random.Generator,
    pool: CandidatePool | None = None,
    epsilon: float = 0.0,
    explore: Explore | None = None,
) -> list[OpPath]:
    """Sample m paths i.i.d. from (1 - ε) U(A) + ε U(P), or uniformly from the space while the pool is empty."""
    if pool is None or len(pool) == 0:
        epsilon = 0.0
    explore = explore or (lambda: parse_path(space.sample(1, rng)[0], space))
    return [pool.sample(rng) if pool is not None and rng.random() < epsilon else explore() for _ in range(m)]
