import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from greedynas import CandidatePool, GreedyNASError, filter_paths, load_space
from greedynas.greedy.filtering import Filtered, sample_paths
from greedynas.runtime.parallel import ranks
from tests.helpers.strategies import paths_of

MACRO = load_space("macro")


@given(st.data())
def test_algorithm_1_keeps_the_k_lowest_losses_and_evaluates_each_path_once(data):
    m = data.draw(st.integers(1, 12))
    k = data.draw(st.integers(1, m))
    pool = CandidatePool(20)
    for path in data.draw(st.lists(paths_of(MACRO), min_size=1, max_size=3)):
        pool.update(path, 1.0)
    evaluated = []

    def losses(paths):
        evaluated.extend(paths)
        return [hash(path) % 7 / 7 for path in paths]  # ties happen

    rng = np.random.default_rng(data.draw(st.integers(0, 100)))
    result = filter_paths(MACRO, losses, m, k, rng, pool, epsilon=0.7)
    assert len(result.kept) == k
    assert len(result.rejected) == m - k
    assert len(evaluated) == len(set(evaluated)) == result.evaluated
    assert {path for path, _ in result.kept + result.rejected} == set(evaluated)
    kept, rejected = ([loss for _, loss in part] for part in (result.kept, result.rejected))
    assert kept == sorted(kept)
    assert max(kept) <= min(rejected, default=1)
    assert all(loss == hash(path) % 7 / 7 for path, loss in result.kept + result.rejected)


def test_a_path_drawn_twice_counts_twice():
    pool = CandidatePool(1)
    pool.update((0,) * 8, 1.0)
    result = filter_paths(MACRO, lambda paths: [0.5] * len(paths), 6, 3, np.random.default_rng(0), pool, epsilon=1.0)
    assert result.kept == [((0,) * 8, 0.5)] * 3
    assert result.rejected == [((0,) * 8, 0.5)] * 3
    assert result.evaluated == 1


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 0.8, 1.0])
def test_a_share_of_epsilon_of_the_paths_comes_from_the_pool(epsilon):
    pool = CandidatePool(5)
    for i in range(5):
        pool.update((2, 2, 2, 2, 2, 2, i % 3, i // 3), float(i))
    paths = sample_paths(MACRO, 4000, np.random.default_rng(0), pool, epsilon)
    from_pool = sum(path in pool for path in paths)
    expected = epsilon + (1 - epsilon) * 5 / 6561
    assert stats.binomtest(from_pool, 4000, min(expected, 1)).pvalue > 0.001
    others = [path for path in paths if path not in pool]
    if others:  # paths that are not from the pool are uniform in every layer
        for layer in range(8):
            assert stats.chisquare(np.bincount([path[layer] for path in others], minlength=3)).pvalue > 1e-4


@pytest.mark.parametrize("pool", [None, CandidatePool(3)])
def test_without_a_pool_or_with_an_empty_one_paths_are_uniform(pool):
    paths = sample_paths(MACRO, 3000, np.random.default_rng(1), pool, epsilon=1.0)
    for layer in range(8):
        assert stats.chisquare(np.bincount([path[layer] for path in paths], minlength=3)).pvalue > 1e-4


def test_by_default_no_path_is_sampled_from_the_pool():
    pool = CandidatePool(1)
    pool.update((0,) * 8, 1.0)
    paths = sample_paths(MACRO, 50, np.random.default_rng(0), pool)
    assert (0,) * 8 not in paths
    result = filter_paths(MACRO, lambda paths: [0.5] * len(paths), 50, 50, np.random.default_rng(0), pool)
    assert [path for path, _ in result.kept] == paths


@pytest.mark.parametrize(("m", "k"), [(5, 6), (5, 0)])
def test_invalid_values_of_k_are_refused(m, k):
    with pytest.raises(GreedyNASError, match="k = "):
        filter_paths(MACRO, lambda paths: [0.0] * len(paths), m, k, np.random.default_rng(0))


def test_the_first_rank_decides_which_paths_are_kept(monkeypatch):
    """On two machines the same losses may differ in their last digits, and so may the order of paths."""
    own = Filtered(kept=[((0, 1), 0.5)], rejected=[((2, 0), 0.6)], evaluated=2)
    first = ([[[2, 0], 0.59]], [[[0, 1], 0.61]])  # as received: JSON has no tuples
    monkeypatch.setattr(ranks, "broadcast", lambda value: first)
    assert own.agreed() == Filtered(kept=[((2, 0), 0.59)], rejected=[((0, 1), 0.61)], evaluated=2)
