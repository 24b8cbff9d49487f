import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedynas.runtime.errors import GreedyNASError
from greedynas.studies.correlations import FEWEST, best_of, mean_interval, precision_at_top, rank_correlations


def papers_tau(r, s):
    """Return the supplement's τ: 2 / (n (n - 1)) times the sum over i < j of sign(r_i - r_j) sign(s_i - s_j)."""
    pairs = itertools.combinations(range(len(r)), 2)
    total = sum(np.sign(r[i] - r[j]) * np.sign(s[i] - s[j]) for i, j in pairs)
    return 2 * total / (len(r) * (len(r) - 1))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=FEWEST, max_size=60))
def test_tau_a_is_the_papers_formula_with_ties(pairs):
    r, s = np.array(pairs).T
    assert rank_correlations(r, s)["tau_a"] == pytest.approx(papers_tau(r, s), abs=1e-12)


def test_a_perfect_ranking_has_1_and_a_reversed_one_minus_1():
    values = np.random.default_rng(0).normal(size=200)
    assert rank_correlations(np.exp(values), values) == pytest.approx({"tau_a": 1, "tau_b": 1, "spearman": 1})
    assert rank_correlations(-values, values) == pytest.approx({"tau_a": -1, "tau_b": -1, "spearman": -1})


def test_equal_scores_have_no_correlation():
    assert rank_correlations(np.ones(50), np.arange(50)) == {"tau_a": 0.0, "tau_b": None, "spearman": None}


def test_too_few_paths_are_refused():
    with pytest.raises(GreedyNASError, match="a rank correlation of 29 paths is not meaningful; take at least 30"):
        rank_correlations(np.arange(29), np.arange(29))
    with pytest.raises(GreedyNASError, match="at least 30"):
        precision_at_top(np.arange(5), np.arange(5), 0.5)


def test_precision_counts_the_truly_best():
    truth = np.arange(100)
    assert precision_at_top(truth, truth, 0.05) == 1
    assert precision_at_top(-truth, truth, 0.05) == 0
    half = np.where(truth == 99, -1, truth)  # 94..98 are named, 95..99 are the best
    assert precision_at_top(half, truth, 0.05) == pytest.approx(4 / 5)


def test_precision_of_ties_is_that_of_chance():
    truth = np.arange(100)
    assert precision_at_top(np.zeros(100), truth, 0.05) == pytest.approx(0.05)
    # One certain hit, and four places for ten equal scores, of which four are among the best.
    scores = np.where(truth == 99, 2, np.where(truth >= 89, 1, 0))
    assert precision_at_top(scores, truth, 0.05) == pytest.approx((1 + 4 * 4 / 10) / 5)


def test_best_of_is_by_the_truth():
    assert best_of(np.array([1.0, 5.0, 3.0, 5.0]), 3).tolist() == [1, 3, 2]


def test_the_interval_is_students():
    found = mean_interval([1.0, 2.0, 3.0])
    half = 4.302652729911275 / 3**0.5  # t(0.975, 2) times s / sqrt(n), s = 1
    assert found == pytest.approx({"mean": 2.0, "low": 2 - half, "high": 2 + half, "n": 3})
    assert mean_interval([0.5]) == {"mean": 0.5, "low": None, "high": None, "n": 1}
