"""Tests of the choice of a search's network, against brute force and scipy's interval."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from greedynas import Budget, load_space
from greedynas.greedy.searchers.choice import choose, wilson_margin
from greedynas.greedy.searchers.task import Found, Searched, make_task
from greedynas.rundir.schemas import Chosen, Evaluated
from greedynas.spaces.costs import CostTable
from greedynas.stages.search_summary import describe_choice

MACRO = load_space("macro")
PATHS = [tuple(path) for path in np.unique(MACRO.sample(400, np.random.default_rng(0)), axis=0).tolist()]


@st.composite
def searches(draw):
    """Draw the result of a search with few distinct accuracies, so that there are ties, and one or two objectives."""
    accuracies = st.integers(0, 30).map(lambda number: number / 30)
    paths = draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=25, unique=True))
    objectives = draw(st.sampled_from([("macs",), ("params", "macs"), ("latency_ms",), ("latency_ms", "params")]))
    coarse = CostTable(
        np.array([[1.0, 2.0, np.nan]] + [[1.0, 1.0, 2.0]] * 7), 0.5, MACRO.num_ops
    )  # equal and missing costs
    task = make_task(MACRO, Budget(), objectives, coarse)
    return Searched(task, [Found(path, draw(accuracies), 0) for path in paths])


def costs_of(searched):
    """Return the costs of every evaluated path by the objectives in order, with infinity for unknown ones."""
    tables = [searched.task.tables[name] for name in searched.task.objectives]
    rows = zip(*(table(np.array([entry.path for entry in searched.found])).tolist() for table in tables), strict=True)
    return [tuple(math.inf if math.isnan(cost) else cost for cost in row) for row in rows]


def undominated(searched):
    """Return the evaluated paths that no other one dominates, with their costs."""
    points = list(zip(searched.found, costs_of(searched), strict=True))

    def beats(rival, price, entry, cost):
        as_good = rival.accuracy >= entry.accuracy and all(a <= b for a, b in zip(price, cost, strict=True))
        return as_good and (rival.accuracy, price) != (entry.accuracy, cost)

    return [point for point in points if not any(beats(*rival, *point) for rival in points)]


@given(searches())
def test_the_best_is_the_cheapest_of_the_most_accurate_and_on_the_front(searched):
    best, costs = searched.best, dict(zip(searched.found, costs_of(searched), strict=True))
    assert best.accuracy == max(entry.accuracy for entry in searched.found)
    assert costs[best] == min(costs[entry] for entry in searched.found if entry.accuracy == best.accuracy)
    assert best in searched.front()
    front = [costs[entry] for entry in searched.front()]
    assert front == sorted(front)
    assert sorted(front) == sorted(cost for _, cost in undominated(searched))


@given(searches(), st.floats(2, 60), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_the_choice_is_the_cheapest_on_the_front_within_the_error(searched, images, tolerance):
    choice = choose(searched, images, tolerance)
    highest = max(entry.accuracy for entry in searched.found)
    lowest = highest - wilson_margin(highest, images, tolerance)
    equals = [(entry, cost) for entry, cost in undominated(searched) if entry.accuracy >= lowest]
    assert choice.within == len(equals)
    assert choice.tied == sum(entry.accuracy == highest for entry in searched.found)
    assert choice.best == searched.best
    chosen = [cost for entry, cost in equals if entry == choice.chosen]
    assert chosen == [min(cost for _, cost in equals)]
    if tolerance == 0:
        assert choice.chosen == searched.best


@given(st.integers(1, 5000), st.floats(0, 1), st.sampled_from([0.5, 1.0, 1.96, 3.0]))
def test_the_margin_equals_that_of_wilsons_interval(images, share, errors):
    right = round(share * images)
    interval = stats.binomtest(right, images).proportion_ci(math.erf(errors / math.sqrt(2)), method="wilson")
    assert right / images - wilson_margin(right / images, images, errors) == pytest.approx(interval.low, abs=1e-9)


def test_the_margin_of_shares_of_0_and_1_and_of_scores_beyond():
    assert wilson_margin(1.0, 100, 1.0) == pytest.approx(1 / 101)  # not zero if every image is right
    assert wilson_margin(0.0, 100, 1.0) == 0
    assert wilson_margin(0.7, 100, 0.0) == 0
    assert wilson_margin(1.2, 100, 1.0) == wilson_margin(1.0, 100, 1.0)  # an additive model may give such a score


def test_more_images_distinguish_smaller_differences():
    """Accuracies rise with the cost; a hundred times the images distinguish a tenth of the difference."""
    paths = sorted(PATHS, key=lambda path: MACRO.costs([path]).macs[0])[::10]
    searched = Searched(make_task(MACRO, Budget()), [Found(path, 0.8 + i / 1000, 0) for i, path in enumerate(paths)])
    few, many = choose(searched, 400), choose(searched, 40_000)
    assert few.best == many.best == searched.found[-1]
    assert (few.within, many.within) == (20, 2)  # the standard errors of 0.839 are 1.84 and 0.18 points
    assert (few.chosen, many.chosen) == (searched.found[-20], searched.found[-2])


def test_the_cheapest_of_many_ties_is_chosen_in_any_order():
    paths = sorted(PATHS[:20], key=lambda path: -MACRO.costs([path]).macs[0])
    searched = Searched(make_task(MACRO, Budget()), [Found(path, 1.0, 0) for path in paths])
    choice = choose(searched, 600)
    assert choice.chosen == choice.best == searched.best == searched.front()[0] == searched.found[-1]
    assert (choice.tied, choice.within) == (20, 1)


# The description of a choice


def told(*, best=(1, 0.912, 31_500_000, None), own=(0, 0.905, 11_100_000), objectives=("macs",), **choice):
    op, accuracy, macs, score = best
    row = Evaluated(path=(op,), accuracy=accuracy, generation=0, macs=macs, params=9, latency_ms=3.4, score=score)
    numbers = {"tolerance": 1.0, "images": 600.0, "margin": 0.0117, "tied": 1, "within": 4, "best": row, **choice}
    chosen = {"path": own[:1], "supernet_accuracy": own[1], "macs": own[2], "params": 9, "latency_ms": 1.2}
    return describe_choice(Chosen(**chosen, choice=numbers), objectives)


def test_the_description_of_a_choice():
    assert told() == (
        "4 paths on the front lie within one standard error (1.2 points on 600 validation images) of the highest accuracy, "
        "91.2%. The cheapest of them was chosen, with 11.1M multiply-adds instead of 31.5M; --set search.tolerance=0 takes the "
        "highest accuracy."
    )
    assert "within 2.5 standard errors" in told(tolerance=2.5)
    assert "accuracy, 91.2%, which 3 paths have. The cheapest" in told(tied=3)
    assert "with 1.2 ms instead of 3.4 ms" in told(objectives=("params", "latency_ms"))  # the first that differs
    assert "of the highest score, 91.5%" in told(best=(1, 0.9, 31_500_000, 0.915))
    assert told(best=(0, 0.912, 11_100_000, None), tied=20, within=1) == (
        "20 paths tie at the highest accuracy, 91.2%; the cheapest of them was chosen."
    )
    assert told(best=(0, 0.912, 11_100_000, None), within=3) is None  # simply the most accurate
    assert describe_choice(Chosen(path=(0,), supernet_accuracy=0.9), ("macs",)) is None  # of an earlier version
