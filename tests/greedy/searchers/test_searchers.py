"""Tests of plugins' searchers: proposals must keep the budget, are evaluated once, and are limited in number."""

import numpy as np
import pytest

from greedynas import Budget, GreedyNASError, load_space, search
from greedynas.greedy.search import search_steps
from greedynas.greedy.searchers import SEARCHERS
from greedynas.greedy.searchers.task import STALE_ROUNDS, Plan, Proposal, make_task

MACRO = load_space("macro")
LIMIT = 45_000_000
PATHS = [tuple(path) for path in np.unique(MACRO.sample(500, np.random.default_rng(0)), axis=0).tolist()]
CHEAP = [path for path in PATHS if MACRO.costs([path]).macs[0] <= LIMIT]
DEAR = [path for path in PATHS if MACRO.costs([path]).macs[0] > LIMIT]


class Evaluator:
    """A synthetic accuracy that records the evaluated paths."""

    def __init__(self):
        self.asked = []

    def __call__(self, paths):
        self.asked += paths
        return [sum(path) / 16 for path in paths]


def searched(registered, searcher, evaluate, generations=4, **more):
    registered(SEARCHERS, "mine", searcher)
    return search(MACRO, evaluate, Budget(max_macs=LIMIT), searcher="mine", population_size=10, generations=generations, **more)  # fmt: skip


def test_a_searcher_receives_the_accuracies_of_its_proposals(registered):
    received = []

    def listening(plan):
        seen = set()
        for generation in range(plan.generations):
            found = yield plan.task.new_random_paths(plan.population, seen, plan.rng(generation))
            seen |= {entry.path for entry in found}
            received.append(found)

    evaluate = Evaluator()
    result = searched(registered, listening, evaluate, seed=3)
    # There are no results for the last proposal.
    assert [[entry.generation for entry in found] for found in received] == [[i] * 10 for i in range(3)]
    assert [entry for found in received for entry in found] == result.found[:30]
    assert [entry.path for entry in result.found] == evaluate.asked
    assert len(result.found) == 40
    assert result.best.accuracy == max(entry.accuracy for entry in result.found)


def test_paths_that_violate_a_limit_are_rejected_and_never_evaluated(registered):
    def careless(plan):
        for start in range(0, 12, 3):
            found = yield [*DEAR[start : start + 3], *CHEAP[start : start + 3]]
            assert [entry.path for entry in found] == CHEAP[start : start + 3]

    evaluate = Evaluator()
    result = searched(registered, careless, evaluate)
    assert evaluate.asked == [entry.path for entry in result.found] == CHEAP[:12]
    assert result.rejected == 12


def test_counts_of_a_searcher_are_added(registered):
    def counting(plan):
        yield Proposal([*CHEAP[:4], DEAR[0]], from_pool=2, rejected=5)
        yield Proposal(CHEAP[4:6], rejected=1)

    result = searched(registered, counting, Evaluator())
    assert (result.from_pool, result.rejected, len(result.found)) == (2, 7, 6)


def test_repeated_paths_are_evaluated_once(registered):
    def repeating(plan):
        found = yield [CHEAP[0], CHEAP[1], CHEAP[0], "".join(map(str, CHEAP[1])), list(CHEAP[0])]
        assert [entry.path for entry in found] == CHEAP[:2]
        found = yield [CHEAP[1], CHEAP[2]]
        assert [(entry.path, entry.accuracy) for entry in found] == [(path, sum(path) / 16) for path in CHEAP[1:3]]

    evaluate = Evaluator()
    result = searched(registered, repeating, evaluate)
    assert evaluate.asked == [entry.path for entry in result.found] == CHEAP[:3]
    assert [entry.generation for entry in result.found] == [0, 0, 1]


@pytest.mark.parametrize("later", [CHEAP[:2], DEAR[:2], []])
def test_a_searcher_that_proposes_nothing_new_is_stopped(registered, later):
    rounds = []

    def endless(plan):
        yield CHEAP[:2]
        while True:
            rounds.append(1)
            yield later

    evaluate = Evaluator()
    result = searched(registered, endless, evaluate)
    assert len(rounds) == STALE_ROUNDS
    assert evaluate.asked == [entry.path for entry in result.found] == CHEAP[:2]


def test_rounds_without_new_paths_are_allowed_in_between(registered):
    def slow(plan):
        for path in CHEAP[:3]:
            for _ in range(STALE_ROUNDS - 1):
                yield DEAR[:1]
            yield [path]

    result = searched(registered, slow, Evaluator())
    assert [entry.path for entry in result.found] == CHEAP[:3]


@pytest.mark.parametrize("proposals", [[], [[]], [DEAR[:3]] * 2, [[]] * 100])
def test_a_searcher_without_feasible_proposals_is_an_error(registered, proposals):
    def hopeless(plan):
        for paths in proposals:  # noqa: UP028 (a list takes no answers)
            yield paths

    with pytest.raises(GreedyNASError, match=r"^the searcher 'mine' has proposed no path that keeps the budget$"):
        searched(registered, hopeless, Evaluator())


def test_no_more_paths_are_evaluated_than_planned(registered):
    def greedy(plan):
        found = yield CHEAP[:25]
        assert len(found) == 25
        found = yield [*CHEAP[:5], *CHEAP[20:100]]
        raise AssertionError("it is over")

    evaluate = Evaluator()
    result = searched(registered, greedy, evaluate, generations=3)
    assert evaluate.asked == [entry.path for entry in result.found] == CHEAP[:30]


def test_invalid_paths_are_refused(registered):
    def broken(plan):
        yield [CHEAP[0], (0, 1)]

    with pytest.raises(GreedyNASError, match="has 8 ops"):
        searched(registered, broken, Evaluator())


def test_the_search_of_a_plugin_is_resumed(registered):
    """The searcher receives all earlier results again, and no path is evaluated twice."""

    def climbing(plan):
        found = yield CHEAP[:10]
        while True:
            best = max(found, key=lambda entry: (entry.accuracy, entry.path))
            rng = plan.rng(len(found))
            near = [(*best.path[:i], int(rng.integers(3)), *best.path[i + 1 :]) for i in range(8)]
            found = [*found, *(yield near)]

    registered(SEARCHERS, "mine", climbing)
    plan = Plan(make_task(MACRO, Budget(max_macs=LIMIT)), population=10, generations=3, seed=1)
    *_, whole = search_steps(plan, Evaluator(), "mine")
    assert len(whole.found) > 14
    for cut in (10, 14, len(whole.found)):
        evaluate = Evaluator()
        *_, resumed = search_steps(plan, evaluate, "mine", whole.found[:cut])
        assert resumed.found == whole.found
        assert evaluate.asked == [entry.path for entry in whole.found[cut:]]
