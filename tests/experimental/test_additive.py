import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from greedynas.experimental.additive import Blended
from greedynas.greedy.searchers.additive import additive_model
from tests.helpers.strategies import paths_of, spaces


@st.composite
def scored(draw):
    """Draw paths of a space and a number for each."""
    space = draw(spaces())
    paths = draw(st.lists(paths_of(space), min_size=1, max_size=20, unique=True))
    values = draw(st.lists(st.floats(0, 1), min_size=len(paths), max_size=len(paths)))
    return space, np.array(paths), np.array(values)


@given(scored(), st.integers(0, 2**31))
def test_the_model_fits_a_sum_over_ops_exactly(example, seed):
    space, paths, _ = example
    rng = np.random.default_rng(seed)
    worth = [rng.random(count) for count in space.num_ops]
    sums = np.array([sum(layer[op] for layer, op in zip(worth, path, strict=True)) for path in paths])
    assert additive_model(paths, sums) == pytest.approx(sums)
    assert Blended(0.5)(paths, sums) == pytest.approx(sums)


@given(scored(), st.floats(0, 1))
def test_a_score_lies_between_the_accuracy_and_the_model(example, share):
    _, paths, values = example
    model, score = additive_model(paths, values), Blended(share)(paths, values)
    assert (score >= np.minimum(values, model) - 1e-9).all()
    assert (score <= np.maximum(values, model) + 1e-9).all()
    assert score.mean() == pytest.approx(values.mean())  # a fit with a constant keeps the mean
    assert (Blended(0.0)(paths, values) == values).all()
    assert ((model - values) ** 2).sum() <= ((values.mean() - values) ** 2).sum() + 1e-9


def test_equal_accuracies_stay_equal():
    """A fit would rank them by rounding errors."""
    paths = np.stack(np.unravel_index(np.arange(6561), [3] * 8), axis=1)
    assert np.ptp(Blended(0.5)(paths, np.full(6561, np.float32(0.1)))) == 0


def test_fewer_paths_than_ops_are_not_smoothed():
    """If nothing can be learned from other paths, the score is the accuracy."""
    paths, values = [(0, 0, 0), (1, 1, 1), (2, 2, 2)], np.array([0.3, 0.1, 0.2])
    assert Blended(0.5)(paths, values) == pytest.approx(values)


@pytest.mark.parametrize("interactions", [0.0, 1.0])
def test_the_score_ranks_noisy_accuracies_better(interactions):
    """This also holds if the truth is only mostly additive."""
    rng = np.random.default_rng(0)
    paths = np.stack(np.unravel_index(np.arange(6561), [3] * 8), axis=1)
    truth = paths @ rng.random(8) + interactions * 0.2 * (paths[:, :-1] * paths[:, 1:]).sum(1)
    noisy = truth + rng.normal(0, 1.0, len(truth))
    measured, score = (stats.kendalltau(values, truth).statistic for values in (noisy, Blended(0.5)(paths, noisy)))
    assert score > measured + 0.05
