"""Test the second opinion of a search: the ranks of untrained networks mixed with those of accuracies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from greedynas import GreedyNASError
from greedynas.experimental.second_opinion import SecondOpinion, in_mixed_order
from greedynas.settings.experiments import hooks_of
from tests.helpers.pictures import paint
from tests.helpers.training import opened, tiny_space

numbers = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30)


@given(numbers, st.floats(0, 1))
def test_the_mixed_order_keeps_the_values_and_follows_both_rankings(pairs, weight):
    values, opinions = np.array(pairs, float).T / 50
    mixed = in_mixed_order(values, opinions, weight)
    assert set(mixed) <= set(values)
    assert mixed.max() <= values.max()
    means = (1 - weight) * stats.rankdata(values) + weight * stats.rankdata(opinions)
    for i in range(len(pairs)):
        for j in range(len(pairs)):
            if means[i] > means[j] + 1e-5:
                assert mixed[i] >= mixed[j]
    assert (in_mixed_order(values, opinions, 0.0) == values).all()


def test_the_weight_decides_between_two_opinions():
    values, opinions = np.array([0.1, 0.2, 0.3]), np.array([9.0, 5.0, 1.0])
    assert in_mixed_order(values, opinions, 0.4).tolist() == [0.1, 0.2, 0.3]
    assert in_mixed_order(values, opinions, 0.6).tolist() == [0.3, 0.2, 0.1]
    assert len(set(in_mixed_order(values, opinions, 0.5))) == 1


def test_the_score_is_that_of_untrained_networks_and_repeatable(tmp_path):
    space = tiny_space()
    data = opened(paint(tmp_path, {"a": 14, "b": 14, "c": 14}))
    score = hooks_of({"second_opinion": 1.0}).refine_score(None, space, data, 3)
    assert isinstance(score, SecondOpinion)
    paths = [tuple(path) for path in space.sample(12, np.random.default_rng(0)).tolist()]
    worth = score(paths, np.linspace(0, 1, 12))
    untrained = np.array([score.untrained(path) for path in paths])
    assert stats.kendalltau(worth, untrained).statistic == pytest.approx(1)
    again = hooks_of({"second_opinion": 1.0}).refine_score(None, space, data, 3)
    assert (again(paths, np.linspace(0, 1, 12)) == worth).all()


@pytest.mark.parametrize("weight", [-0.1, 1.5, "half", True, None])
def test_wrong_weights_are_refused(weight):
    with pytest.raises(GreedyNASError, match="between 0 and 1"):
        hooks_of({"second_opinion": weight})
