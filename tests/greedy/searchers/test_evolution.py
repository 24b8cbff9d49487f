import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymoo.indicators.hv import HV
from pymoo.util.nds.fast_non_dominated_sort import fast_non_dominated_sort
from scipy import stats

from greedynas import Budget, GreedyNASError, load_space, search
from greedynas.experimental.additive import Blended
from greedynas.greedy.search import search_steps
from greedynas.greedy.searchers.evolution import initial_population, make_new_population, survivors
from greedynas.greedy.searchers.task import Found, Plan, make_task
from tests.helpers.strategies import paths_of, spaces
from tests.helpers.synthetic_truth import synthetic_truth

MACRO = load_space("macro")
LIMIT = 60_000_000


class Truth:
    """A ground truth as an evaluator that fails on paths which a search must never evaluate."""

    def __init__(self, entries, seeds, regret):
        # Seeds of the compared searches, and how far below the best evolution may end
        self.seeds, self.regret = seeds, regret
        self.accuracies = {tuple(map(int, path)): entry["mean_acc"] for path, entry in entries.items()}
        self.macs = {tuple(map(int, path)): entry["flops"] for path, entry in entries.items()}

    def best(self, limit):
        return max(accuracy for path, accuracy in self.accuracies.items() if self.macs[path] <= limit)

    def __call__(self, budget=None):
        seen = set()
        limit = np.inf if budget is None else budget.max_macs

        def evaluate(paths):
            assert not seen & set(paths), "a path was evaluated twice"
            assert len(set(paths)) == len(paths)
            assert MACRO.costs(paths).macs.max() <= limit
            seen.update(paths)
            return [self.accuracies[path] for path in paths]

        return evaluate


@pytest.fixture(scope="module", params=["synthetic", "NAS-Bench-Macro"])
def truth(request):
    """Return the synthetic ground truth, and the real one if its file is beside the checkout."""
    if request.param == "synthetic":
        return Truth(synthetic_truth(), seeds=30, regret=0.3)
    return Truth(json.loads(request.getfixturevalue("macro_truth").read_text()), seeds=200, regret=0.06)


def smooth(paths):
    """Return synthetic accuracies: larger ops are better, with a little noise for each path."""
    return [sum(path) / 16 + hash(path) % 100 / 1000 for path in paths]


def test_evolution_finds_better_networks_than_random_search_under_a_budget(truth):
    budget = Budget(max_macs=LIMIT)
    best = {
        searcher: np.array(
            [
                search(MACRO, truth(budget), budget, searcher=searcher, generations=10, seed=seed).best.accuracy
                for seed in range(truth.seeds)
            ]
        )
        for searcher in ("evolution", "random")
    }
    gain = best["evolution"] - best["random"]
    assert gain.mean() - 1.96 * stats.sem(gain) > 0
    assert truth.best(LIMIT) - best["evolution"].mean() < truth.regret


def test_the_front_dominates_more_than_random_search(truth):
    volume = HV(ref_point=np.array([-80, 106e6]))
    wins = 0
    for seed in range(truth.seeds // 2):
        found = [search(MACRO, truth(), searcher=s, generations=6, seed=seed) for s in ("evolution", "random")]
        assert [len(result.found) for result in found] == [300, 300]
        ours, theirs = (volume(result.task.scores(result.front())) for result in found)
        wins += ours > theirs
    assert wins >= 0.85 * (truth.seeds // 2)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30), st.integers(1, 20))
def test_survivors_are_the_reference_fronts_and_the_last_is_cut_by_accuracy(points, size):
    """The reference fronts are those of pymoo's own algorithm, on synthetic accuracies and costs."""
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
    cheapest, most_expensive = space.cost_tables["macs"].range
    budget = Budget(max_macs=int(cheapest + data.draw(st.floats(0.3, 1)) * (most_expensive - cheapest)) + 1)
    task = make_task(space, budget)
    rng = np.random.default_rng(0)
    start, _ = initial_population(task, (), 10, rng)
    population = [Found(path, accuracy, 0) for path, accuracy in zip(start, smooth(start), strict=True)]
    offspring, _ = make_new_population(task, population, set(start), 10, rng)
    assert len(offspring) == len(set(offspring))
    assert not set(offspring) & set(start)
    if offspring:
        assert space.costs(offspring).macs.max() <= budget.max_macs  # costs() refuses invalid paths


def children(population, size=200):
    """Return the offspring of a population without a limit, as an array."""
    task, seen = make_task(MACRO, Budget()), {entry.path for entry in population}
    offspring, rejected = make_new_population(task, population, seen, size, np.random.default_rng(0))
    assert (len(offspring), rejected) == (size, 0)
    return np.array(offspring)


def on_a_front(paths, accuracies):
    """Return a population in which each path costs more and is better than the previous one."""
    assert (np.diff(MACRO.costs(paths).macs) > 0).all()
    assert (np.diff(accuracies) > 0).all()
    return [Found(path, float(accuracy), 0) for path, accuracy in zip(paths, accuracies, strict=True)]


def test_offspring_mix_the_ops_of_two_parents():
    mixed = children(on_a_front([(0,) * 8, (2,) * 8], [0.5, 0.6]), size=100)
    shares = np.sort([(mixed == op).sum(1) for op in (0, 2)], axis=0)[0]  # ops of the parent that gave fewer
    assert (shares >= 2).mean() > 0.4  # with mutation alone it would be one in twenty-five
    changes = (np.diff(mixed[shares >= 2], axis=1) != 0).sum(1)
    assert changes.mean() > 2.5  # layers are mixed independently: one-point crossover would give one change


def test_offspring_have_a_few_mutated_ops():
    """One op in eight is drawn anew, and a third of these are in no parent; unchanged parents do not count."""
    mutated = children(on_a_front([(0,) * 8, (2,) * 8], [0.5, 0.6]), size=100) == 1
    assert 0.03 < mutated.mean() < 0.1
    assert (mutated.mean(0) > 0).all()  # in every layer


def by_first_op(first, others):
    """Return paths of increasing cost that begin with an op."""
    return sorted(((first, *rest) for rest in others), key=lambda path: MACRO.costs([path]).macs[0])


def share_of_first_op(offspring, op, other):
    counts = [(offspring[:, 0] == one).sum() for one in (op, other)]
    return counts[0] / sum(counts)


def test_the_better_rank_wins_a_tournament():
    """Every path of the front has a twin that costs more and is worse. Three quarters of random pairs contain a path of
    the front, so three quarters of the parents have its first op; without a preference it would be a half."""
    distinct = {int(MACRO.costs([path]).macs[0]): path[1:] for path in PATHS if path[0] == 0}
    rest = [distinct[cost] for cost in sorted(distinct)][::8][:30]
    accuracies = np.linspace(0.5, 0.8, len(rest))
    front = on_a_front(by_first_op(0, rest), accuracies)
    behind = on_a_front(by_first_op(2, rest), accuracies - 0.005)
    assert 0.65 < share_of_first_op(children(front + behind), 0, 2) < 0.85
    assert 0.65 < share_of_first_op(children(behind + front), 0, 2) < 0.85  # in either order


def test_the_less_crowded_path_wins_a_tournament_within_a_front():
    """One half of the front lies close together; the other half lies far apart and begins with another op."""
    distinct = {int(MACRO.costs([path]).macs[0]): path for path in PATHS}
    costs = np.array(sorted(distinct))
    close = [distinct[cost] for cost in costs if distinct[cost][0] == 0 and cost > 30_000_000][:20]
    last = MACRO.costs(close[-1:]).macs[0]
    far = [distinct[cost] for cost in costs if distinct[cost][0] == 2 and cost > last + 2_000_000][::12][:20]
    assert len(far) == len(close) == 20
    steps = [0.0001] * 20 + [0.01] * 20
    population = on_a_front(close + far, 0.5 + np.cumsum(steps))
    assert 0.65 < share_of_first_op(children(population), 2, 0) < 0.85
    assert 0.65 < share_of_first_op(children(population[::-1]), 2, 0) < 0.85


@given(st.lists(paths_of(MACRO), max_size=30, unique=True), st.integers(1, 20))
def test_the_initial_population_has_the_best_feasible_paths_of_the_pool_and_random_ones(pool, size):
    task = make_task(MACRO, Budget(max_macs=LIMIT))
    feasible = [path for path in pool if MACRO.costs([path]).macs[0] <= LIMIT]
    population, from_pool = initial_population(task, pool, size, np.random.default_rng(0))
    assert from_pool == min(len(feasible), size)
    assert population[:from_pool] == feasible[:size]
    assert len(set(population)) == len(population) == size
    assert MACRO.costs(population).macs.max() <= LIMIT


@pytest.mark.parametrize("searcher", ["evolution", "random"])
def test_a_search_resumed_after_any_generation_equals_an_uninterrupted_one(searcher):
    plan = Plan(make_task(MACRO, Budget(max_macs=LIMIT)), population=20, generations=6, seed=3)
    *_, whole = search_steps(plan, smooth, searcher)
    for cut in (20, 60, 100, 120):
        asked = []

        def counting(paths, asked=asked):
            asked.extend(paths)
            return smooth(paths)

        *_, resumed = search_steps(plan, counting, searcher, whole.found[:cut])
        assert resumed.found == whole.found
        assert resumed.rejected == whole.rejected
        assert len(asked) == 120 - cut


def test_searches_are_equal_for_equal_seeds_only():
    first, second, other = (search(MACRO, smooth, generations=4, seed=seed) for seed in (1, 1, 2))
    assert first.found == second.found
    assert first.found != other.found


def test_the_search_ends_when_all_feasible_paths_are_evaluated():
    budget = Budget(max_macs=13_000_000)  # few paths fit
    result = search(MACRO, smooth, budget, generations=20)
    count = int((MACRO.costs(EVERYTHING).macs <= budget.max_macs).sum())
    assert len(result.found) == count < 1000


EVERYTHING = np.array(np.meshgrid(*[range(3)] * 8, indexing="ij")).reshape(8, -1).T


def test_the_choice_can_use_scores_of_all_evaluated_paths():
    lucky = (0, 2, 1, 0, 2, 2, 1, 0)  # noise makes this path better than all others

    def evaluate(paths):
        return [2.0 if path == lucky else sum(path) / 16 for path in paths]

    plain, steady = (
        search(MACRO, evaluate, pool=[lucky, (2,) * 8], generations=6, score=score) for score in (None, Blended(1.0))
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


def test_a_search_with_three_objectives():
    result = search(MACRO, smooth, generations=4, objectives=("macs", "params"))
    scores = result.task.scores(result.front())
    assert scores.shape[1] == 3
    for one in scores:
        assert not any((other <= one).all() and (other < one).any() for other in scores)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": Budget(max_macs=1_000_000)}, "cheapest path has 7,713,280"),
        ({"budget": Budget(max_latency_ms=5)}, "latency table"),
        ({"searcher": "bayes"}, "unknown searcher"),
        ({"objectives": ("beauty",)}, "unknown cost"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(GreedyNASError, match=message):
        search(MACRO, smooth, **arguments)
