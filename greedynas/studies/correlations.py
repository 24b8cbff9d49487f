"""Rank correlations between the values of paths on a supernet and their true accuracies.

τ-a is the paper's formula (concordant minus discordant pairs over all pairs): tied pairs count as neither. τ-b leaves
ties out of the denominator, so a predictor with few distinct values is not penalised for them. Both are computed from
scipy's O(n log n) τ-b.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.runtime.errors import GreedyNASError

Numbers = NDArray[Any]
FEWEST = 30  # paths; with as few as 30, τ of random rankings has a standard deviation of 0.13


def rank_correlations(scores: Numbers, truth: Numbers) -> dict[str, float | None]:
    """Return Kendall's τ-a and τ-b and Spearman's ρ; τ-b and ρ are None if all values of a side are the same."""
    from scipy import stats

    scores, truth = np.asarray(scores, float), np.asarray(truth, float)
    enough_paths(len(scores))
    if np.ptp(scores) == 0 or np.ptp(truth) == 0:
        return {"tau_a": 0.0, "tau_b": None, "spearman": None}
    tau_b = float(stats.kendalltau(scores, truth).statistic)
    pairs = len(scores) * (len(scores) - 1) / 2
    untied = math.sqrt((pairs - _tied_pairs(scores)) * (pairs - _tied_pairs(truth)))
    return {
        "tau_a": tau_b * untied / pairs,
        "tau_b": tau_b,
        "spearman": float(stats.spearmanr(scores, truth).statistic),
    }


def precision_at_top(scores: Numbers, truth: Numbers, share: float) -> float:
    """Return the share of the best paths by score that is among the truly best, for a share of all paths.

    Equal scores at the border have equal chances to be included; equally good paths are all among the best.
    """
    scores, truth = np.asarray(scores, float), np.asarray(truth, float)
    enough_paths(len(scores))
    count = max(1, round(share * len(scores)))
    good = truth >= np.sort(truth)[-count]
    border = np.sort(scores)[-count]
    above, at = scores > border, scores == border
    hits = good[above].sum() + (count - above.sum()) * good[at].mean()
    return float(hits / count)


def best_of(truth: Numbers, count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` truly best paths, best first."""
    return np.argsort(-np.asarray(truth, float), kind="stable")[:count]


def enough_paths(count: int) -> None:
    if count < FEWEST:
        raise GreedyNASError(f"a rank correlation of {count} paths is not meaningful; take at least {FEWEST}")


def mean_interval(values: list[float], level: float = 0.95) -> dict[str, float | int | None]:
    """Return the mean and its confidence interval by Student's t; a single value has no interval."""
    from scipy import stats

    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return {"mean": mean, "low": None, "high": None, "n": n}
    half = float(stats.sem(values)) * float(stats.t.ppf((1 + level) / 2, n - 1))
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n}


def _tied_pairs(values: Numbers) -> float:
    _, counts = np.unique(values, return_counts=True)
    return float((counts * (counts - 1) / 2).sum())
