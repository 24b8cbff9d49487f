import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymoo.indicators.hv import HV
from pymoo.util.nds.fast_non_dominated_sort import fast_non_dominated_sort
from scipy import stats

from greedynas import Budget, GreedyNASError, load_space, search
from greedynas.evolution import (
    Found,
    evolutionary_search,
    initial_population,
    make_new_population,
    make_task,
    random_search,
    survivors,
)
from tests.strategies import paths_of, spaces

MACRO = load_space("macro")
LIMIT = 60_000_000


@pytest.fixture(scope="module")
def truth(macro_truth):
    """The ground truth as an evaluator that refuses what a search must never ask for."""
    accuracies = {
        tuple(map(int, path)): entry["mean_acc"] for path, entry in json.loads(macro_truth.read_text()).items()
    }

    def lookup(budget=None):
        seen = set()
        limit = np.inf if budget is None else budget.max_macs

        def evaluate(paths):
            assert not seen & set(paths), "a path was evaluated twice"
            assert len(set(paths)) == len(paths)
            assert MACRO.costs(paths).macs.max() <= limit
            seen.update(paths)
            return [accuracies[path] for path in paths]

        return evaluate

    return lookup


def smooth(paths):
    """A made-up accuracy: more of the larger ops is better, with a little noise by path."""
    return [sum(path) / 16 + hash(path) % 100 / 1000 for path in paths]


def test_evolution_finds_better_networks_than_random_search_under_a_budget(truth):
    budget = Budget(max_macs=LIMIT)
    best = {
        searcher: np.array(
            [
                search(MACRO, truth(budget), budget, searcher=searcher, generations=10, seed=seed).best.accuracy
                for seed in range(200)
            ]
        )
        for searcher in ("evolution", "random")
    }
    gain = best["evolution"] - best["random"]
    assert gain.mean() - 1.96 * stats.sem(gain) > 0
    assert 92.567 - best["evolution"].mean() < 0.06


def test_the_front_dominates_more_than_random_search(truth):
    volume = HV(ref_point=np.array([-80, 106e6]))
    wins = 0
    for seed in range(100):
        found = [search(MACRO, truth(), searcher=s, generations=6, seed=seed) for s in ("evolution", "random")]
        assert [len(result.found) for result in found] == [300, 300]
        ours, theirs = (volume(result.task.scores(result.front())) for result in found)
        wins += ours > theirs
    assert wins >= 85


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30), st.integers(1, 20))
def test_survivors_are_the_reference_fronts_and_the_last_is_cut_by_accuracy(points, size):
    """Fronts by pymoo's own reference algorithm, on made-up accuracies and costs."""
    task = make_task(MACRO, Budget())
    by_cost = sorted({int(cost): path for path, cost in zip(PATHS, MACRO.costs(PATHS).macs, strict=True)}.items())
    candidates = [Found(by_cost[100 * cost][1], float(accuracy), 0) for accuracy, cost in points]
    kept = survivors(task, candidates, size)
    assert len(kept) == min(size, len(candidates))
    fronts = fast_non_dominated_sort(task.scores(candidates))
    expected = []
    for front in fronts:
        members = [candidates[i] for i in front]
        if len(expected) + len(members) > size:
            members = sorted(members, key=lambda entry: -entry.accuracy)[: size - len(expected)]
            assert sorted(e.accuracy for e in kept[len(expected) :]) == sorted(e.accuracy for e in members)
            break
        expected += members
        assert sorted(map(repr, kept[: len(expected)])) == sorted(map(repr, expected))


PATHS = [tuple(path) for path in np.unique(MACRO.sample(3000, np.random.default_rng(0)), axis=0).tolist()]


@given(st.data())
@settings(max_examples=15)
def test_offspring_are_new_valid_and_feasible(data):
    space = data.draw(spaces())
    cheapest, dearest = space.cost_tables["macs"].range
    budget = Budget(max_macs=int(cheapest + data.draw(st.floats(0.3, 1)) * (dearest - cheapest)) + 1)
    task = make_task(space, budget)
    rng = np.random.default_rng(0)
    start, _ = initial_population(task, (), 10, rng)
    population = [Found(path, accuracy, 0) for path, accuracy in zip(start, smooth(start), strict=True)]
    offspring, _ = make_new_population(task, population, set(start), 10, rng)
    assert len(offspring) == len(set(offspring))
    assert not set(offspring) & set(start)
    if offspring:
        assert space.costs(offspring).macs.max() <= budget.max_macs  # costs() refuses invalid paths


@given(st.lists(paths_of(MACRO), max_size=30, unique=True), st.integers(1, 20))
def test_the_initial_population_is_the_pools_best_feasible_and_random_ones(pool, size):
    task = make_task(MACRO, Budget(max_macs=LIMIT))
    feasible = [path for path in pool if MACRO.costs([path]).macs[0] <= LIMIT]
    population, from_pool = initial_population(task, pool, size, np.random.default_rng(0))
    assert from_pool == min(len(feasible), size)
    assert population[:from_pool] == feasible[:size]
    assert len(set(population)) == len(population) == size
    assert MACRO.costs(population).macs.max() <= LIMIT


@pytest.mark.parametrize("searcher", [evolutionary_search, random_search])
def test_interrupted_after_any_generation_and_resumed_equals_uninterrupted(searcher):
    task = make_task(MACRO, Budget(max_macs=LIMIT))
    arguments = (
        {"generations": 6, "population_size": 20} if searcher is evolutionary_search else {"paths": 120, "step": 20}
    )
    *_, whole = searcher(task, smooth, seed=3, **arguments)
    for cut in (20, 60, 100, 120):
        asked = []

        def counting(paths, asked=asked):
            asked.extend(paths)
            return smooth(paths)

        *_, resumed = searcher(task, counting, seed=3, earlier=whole.found[:cut], **arguments)
        assert resumed.found == whole.found
        assert resumed.ditched == whole.ditched
        assert len(asked) == 120 - cut


def test_the_same_seed_gives_the_same_search_and_another_seed_another():
    first, second, other = (search(MACRO, smooth, generations=4, seed=seed) for seed in (1, 1, 2))
    assert first.found == second.found
    assert first.found != other.found


def test_a_space_that_is_exhausted_ends_the_search():
    budget = Budget(max_macs=13_000_000)  # few paths fit
    result = search(MACRO, smooth, budget, generations=20)
    count = int((MACRO.costs(EVERYTHING).macs <= budget.max_macs).sum())
    assert len(result.found) == count < 1000


EVERYTHING = np.array(np.meshgrid(*[range(3)] * 8, indexing="ij")).reshape(8, -1).T


def test_the_choice_can_go_by_what_all_evaluated_paths_say():
    lucky = (0, 2, 1, 0, 2, 2, 1, 0)  # one path that its noise puts above all others

    def evaluate(paths):
        return [2.0 if path == lucky else sum(path) / 16 for path in paths]

    plain, steady = (
        search(MACRO, evaluate, pool=[lucky, (2,) * 8], generations=6, additive=share) for share in (0.0, 1.0)
    )
    assert [entry.path for entry in plain.found] == [entry.path for entry in steady.found]  # the search is the same
    assert plain.best.path == lucky
    assert steady.best.path == (2,) * 8
    assert steady.best.accuracy == 1.0  # as measured
    worth = dict(zip((entry.path for entry in steady.found), steady.worth, strict=True))
    front = steady.front()
    macs = MACRO.costs([entry.path for entry in front]).macs
    assert (np.diff(macs) >= 0).all()
    assert (np.diff([worth[entry.path] for entry in front]) >= 0).all()
    assert front[-1].path == steady.best.path


def test_three_objectives():
    result = search(MACRO, smooth, generations=4, objectives=("macs", "params"))
    scores = result.task.scores(result.front())
    assert scores.shape[1] == 3
    for one in scores:
        assert not any((other <= one).all() and (other < one).any() for other in scores)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": Budget(max_macs=1_000_000)}, "cheapest has 7,713,280"),
        ({"budget": Budget(max_latency_ms=5)}, "latency table"),
        ({"searcher": "bayes"}, "unknown searcher"),
        ({"objectives": ("beauty",)}, "unknown cost"),
    ],
)
def test_wrong_inputs(arguments, message):
    with pytest.raises(GreedyNASError, match=message):
        search(MACRO, smooth, **arguments)
