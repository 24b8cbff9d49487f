"""Tests of the search: evaluated paths by generation, random streams, and counts."""

from itertools import pairwise

import numpy as np
import pytest

from greedynas import Budget, load_space, search
from greedynas.greedy.search import search_steps
from greedynas.greedy.searchers import evolution, task
from greedynas.greedy.searchers.evolution import initial_population, make_new_population, survivors
from greedynas.greedy.searchers.task import Found, Plan, Task, make_task

MACRO = load_space("macro")
SEARCHERS = ("evolution", "random")


def smooth(paths):
    return [sum(path) / 16 for path in paths]


def generations(found):
    return np.bincount([entry.generation for entry in found]).tolist()


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_the_papers_search_evaluates_50_paths_in_each_of_20_generations(searcher):
    result = search(MACRO, smooth, searcher=searcher)
    assert generations(result.found) == [50] * 20
    assert len({entry.path for entry in result.found}) == 1000
    *_, alone = search_steps(Plan(make_task(MACRO, Budget())), smooth, searcher)
    assert alone.found == result.found == search(MACRO, smooth, searcher=searcher, seed=0).found


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_search_steps_yield_the_result_after_each_generation(searcher):
    def steps(seed=0, earlier=(), evaluate=smooth):
        return search_steps(Plan(make_task(MACRO, Budget()), (), 10, 3, seed), evaluate, searcher, earlier)

    sizes = [len(result.found) for result in steps()]
    assert sizes == [10, 20, 30]
    *_, whole = steps(4)
    *_, other = steps(5)
    assert generations(whole.found) == [10, 10, 10]
    assert whole.found != other.found

    asked = []
    *_, resumed = steps(4, whole.found[:20], lambda paths: asked.extend(paths) or smooth(paths))
    assert resumed.found == whole.found
    assert asked == [entry.path for entry in whole.found[20:]]


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_every_generation_has_its_own_random_stream(searcher, monkeypatch):
    drawn, real = [], task.stream
    monkeypatch.setattr(task, "stream", lambda *key: drawn.append(key) or real(*key))
    search(MACRO, smooth, searcher=searcher, population_size=6, generations=4, seed=7)
    assert drawn == [(7, "search", generation) for generation in range(4)]


class Counting(Task):
    """Counts the paths that violate a limit."""

    violations = 0

    def feasible(self, paths):
        fits = super().feasible(paths)
        Counting.violations += int((~fits).sum())
        return fits


def test_offspring_that_violate_a_limit_are_counted():
    plain = make_task(MACRO, Budget(max_macs=45_000_000))
    task = Counting(plain.space, plain.budget, plain.objectives, plain.tables)
    assert task.score is plain.score is None
    rng = np.random.default_rng(0)
    start, _ = initial_population(task, (), 20, rng)
    population = [Found(path, accuracy, 0) for path, accuracy in zip(start, smooth(start), strict=True)]
    assert Counting.violations == 0
    _, rejected = make_new_population(task, population, set(start), 20, rng)
    assert rejected == Counting.violations > 1

    Counting.violations = 0
    counts = []
    for result in search_steps(Plan(task, (), 20, 5), smooth):
        assert result.rejected == Counting.violations
        counts.append(result.rejected)
    assert counts[0] == 0
    assert all(before < after for before, after in pairwise(counts))


def test_the_most_accurate_paths_of_the_last_front_survive():
    """The front has five paths: the more expensive a path, the more accurate it is."""
    task = make_task(MACRO, Budget())
    paths = sorted(
        map(tuple, MACRO.sample(5, np.random.default_rng(0)).tolist()), key=lambda p: MACRO.costs([p]).macs[0]
    )
    front = [Found(path, accuracy, 0) for path, accuracy in zip(paths, (0.1, 0.2, 0.3, 0.4, 0.5), strict=True)]
    worse = Found((2,) * 8, 0.05, 0)  # dominated by all of them
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]):
        candidates = [worse, *(front[i] for i in order)]
        assert sorted(entry.accuracy for entry in survivors(task, candidates, 3)) == [0.3, 0.4, 0.5]
        assert set(survivors(task, candidates, 5)) == set(front)
        assert set(survivors(task, candidates, 6)) == {worse, *front}


def test_the_middle_path_of_a_front_of_three_is_the_most_crowded():
    task = make_task(MACRO, Budget())
    paths = sorted(
        map(tuple, MACRO.sample(3, np.random.default_rng(0)).tolist()), key=lambda p: MACRO.costs([p]).macs[0]
    )
    front = [Found(path, accuracy, 0) for path, accuracy in zip(paths, (0.1, 0.2, 0.3), strict=True)]
    individuals = evolution._individuals(task, front)
    assert np.isinf(individuals.get("crowding")).tolist() == [True, False, True]
    assert individuals.get("rank").tolist() == [0, 0, 0]
    assert np.isinf(evolution._individuals(task, front[:2]).get("crowding")).all()


def test_random_search_keeps_all_limits_and_ignores_the_pool():
    result = search(MACRO, smooth, Budget(max_macs=45_000_000), searcher="random", generations=2)
    assert (result.rejected, result.from_pool) == (0, 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_offspring_of_a_small_population_descend_from_it(size):
    """With a single parent, mutation changes about one op in twelve; in a random path two ops in three differ."""
    task, parent = make_task(MACRO, Budget()), (1,) * 8
    offspring = []
    for seed in range(20):
        found, _ = make_new_population(task, [Found(parent, 0.5, 0)], {parent}, size, np.random.default_rng(seed))
        assert len(set(found)) == size
        offspring += found
    assert (np.array(offspring) != 1).mean() < 0.3
    assert generations(search(MACRO, smooth, population_size=size, generations=5).found) == [size] * 5
