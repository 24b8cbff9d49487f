"""Tests of the searchers besides Algorithm 3 on synthetic truths whose optimum under a limit is known exactly."""

import gc
import itertools
import time

import numpy as np
import pytest

from greedynas import Budget, Space, load_space, search
from greedynas.greedy.search import search_steps
from greedynas.greedy.searchers import model
from greedynas.greedy.searchers.model import Surrogate, one_hot
from greedynas.greedy.searchers.task import Found, Plan, make_task, one_change

MACRO = load_space("macro")
EVERYTHING = np.array(list(itertools.product(range(3), repeat=8)))
MACS = MACRO.costs(EVERYTHING).macs
LIMIT = 60_000_000
NEW = ("model", "aging", "local")


class Truth:
    """Accuracies from random numbers for ops and pairs, that no op's cost predicts; paths must be new and feasible."""

    def __init__(self, num_ops, seed, pairs):
        rng = np.random.default_rng(seed)
        self.num_ops, cells = num_ops, sum(num_ops)
        self.ops, self.pairs = rng.normal(size=cells), np.triu(rng.normal(0, pairs, (cells, cells)))

    def __call__(self, paths):
        onehot = one_hot(np.array(paths), self.num_ops)
        accuracies = onehot @ self.ops + ((onehot @ self.pairs) * onehot).sum(1)
        return accuracies.round(6)  # the same for a path alone and among others

    def strict(self, space, budget):
        seen = set()

        def evaluate(paths):
            assert not seen & set(paths)
            assert len(set(paths)) == len(paths)
            assert make_task(space, budget).feasible(np.array(paths)).all()
            seen.update(paths)
            return self(paths).tolist()

        return evaluate


def regrets(pairs, searcher, evaluations, seeds=8):
    """Return how far below the best feasible path searches end, in standard deviations of all feasible paths."""
    found = []
    for seed in range(seeds):
        truth, budget = Truth(MACRO.num_ops, seed, pairs), Budget(max_macs=LIMIT)
        feasible = truth(EVERYTHING[MACS <= LIMIT])
        evaluate = truth.strict(MACRO, budget)
        result = search(
            MACRO, evaluate, budget, searcher=searcher, population_size=20, generations=evaluations // 20, seed=seed
        )
        assert len(result.found) == evaluations
        found.append((feasible.max() - result.best.accuracy) / feasible.std())
    return np.array(found)


def test_the_model_finds_the_best_path_of_an_additive_truth_within_60_evaluations():
    """A model that ignores the limit in its proposals, or the op of any layer, ends on a worse path."""
    assert regrets(0, "model", 60).max() == pytest.approx(0, abs=1e-6)
    assert regrets(0, "random", 60).mean() > 0.3


def test_the_model_finds_the_best_path_of_a_truth_with_pairs_within_160_evaluations():
    ours = regrets(0.5, "model", 160)
    assert (ours < 1e-6).mean() >= 0.75
    assert ours.mean() < regrets(0.5, "random", 160).mean() / 5


@pytest.mark.parametrize("searcher", ["aging", "local"])
def test_aging_and_local_find_better_paths_than_random_search(searcher):
    assert regrets(0.3, searcher, 200).mean() < 0.7 * regrets(0.3, "random", 200).mean()


@pytest.mark.parametrize("searcher", NEW)
@pytest.mark.parametrize("pool", [(), [(2,) * 8, *map(tuple, EVERYTHING[1000:4000:40].tolist())]])
def test_a_search_resumed_at_any_cut_equals_an_uninterrupted_one(searcher, pool):
    """Also after a part of a proposal, and with the pool."""
    truth, budget = Truth(MACRO.num_ops, 0, 0.3), Budget(max_macs=LIMIT, min_macs=30_000_000)
    plan = Plan(make_task(MACRO, budget), pool, population=10, generations=6, seed=3)
    *_, whole = search_steps(plan, truth.strict(MACRO, budget), searcher)
    assert len(whole.found) == 60
    for cut in (10, 13, 41, 60):
        asked = []

        def counting(paths, asked=asked):
            asked.extend(paths)
            return truth(paths)

        *_, resumed = search_steps(plan, counting, searcher, whole.found[:cut])
        assert resumed.found == whole.found
        assert asked == [entry.path for entry in whole.found[cut:]]
    *_, other = search_steps(Plan(plan.task, pool, 10, 6, seed=4), truth, searcher)
    assert other.found != whole.found


@pytest.mark.parametrize(("searcher", "most"), [("model", 5), ("aging", 10), ("local", 1)])
def test_a_search_starts_with_the_best_feasible_paths_of_the_pool(searcher, most):
    pool = [(2,) * 8, *map(tuple, EVERYTHING[5000::-100].tolist())]
    task = make_task(MACRO, Budget(max_macs=LIMIT))
    *_, result = search_steps(Plan(task, pool, population=10, generations=1), Truth(MACRO.num_ops, 0, 0), searcher)
    expected = [path for path in pool if task.feasible(np.array([path]))[0]][:most]
    assert result.from_pool == most
    assert [entry.path for entry in result.found][:most] == expected


@pytest.mark.parametrize("searcher", NEW)
def test_a_search_ends_when_all_feasible_paths_are_evaluated(searcher):
    budget = Budget(max_macs=13_000_000)
    result = search(MACRO, Truth(MACRO.num_ops, 0, 0.3).strict(MACRO, budget), budget, searcher=searcher)
    assert len(result.found) == (budget.max_macs >= MACS).sum() < 1000


@pytest.mark.parametrize("searcher", NEW)
def test_several_limits_and_image_sizes(searcher):
    """The costs of a path depend on its first decision, the image size."""
    space = Space.model_validate({**load_space("mobilenet").model_dump(), "sizes": (160, 192, 224)})
    table = space.cost_tables["macs"]
    assert len(getattr(table, "at_size", ())) == 3
    for budget in (
        Budget(max_macs=int(table.mean)),
        Budget(max_macs=int(table.mean), min_macs=int(0.9 * table.mean), max_params=4_500_000),
    ):
        evaluate = Truth(space.num_ops, 0, 0.1).strict(space, budget)
        result = search(space, evaluate, budget, searcher=searcher, population_size=10, generations=2, seed=1)
        assert len(result.found) == 20


def test_the_surrogate_is_ridge_regression_on_explicit_features():
    """Against the primal solution with a column for each op and for each pair of ops in two layers."""
    rng, num_ops = np.random.default_rng(0), (3, 2, 4)
    everything = np.array(list(itertools.product(*map(range, num_ops))))
    paths = everything[rng.permutation(len(everything))[:15]]
    values = rng.normal(size=15)
    surrogate = Surrogate.fit(paths, values, num_ops)
    share, penalty = model._choose(*_gram_and_targets(paths, values, num_ops), 3)
    assert share in model.PAIR_SHARES
    assert penalty in model.PENALTIES
    features = _features(paths, num_ops, share)
    targets = values - values.mean()
    weights = np.linalg.solve(features.T @ features + penalty * np.eye(features.shape[1]), features.T @ targets)
    expected = values.mean() + _features(everything, num_ops, share) @ weights
    assert surrogate.predict(everything) == pytest.approx(expected)


def _gram_and_targets(paths, values, num_ops):
    onehot = one_hot(paths, num_ops)
    return onehot @ onehot.T, (values - values.mean()) / values.std()


def _features(paths, num_ops, share):
    layers, cells = len(num_ops), one_hot(paths, num_ops)
    starts = np.cumsum([0, *num_ops])
    columns = [cells * np.sqrt((1 - share) / layers)]
    for first, second in itertools.combinations(range(layers), 2):
        pairs = cells[:, starts[first] : starts[first + 1], None] * cells[:, None, starts[second] : starts[second + 1]]
        columns.append(pairs.reshape(len(paths), -1) * np.sqrt(2 * share / (layers * (layers - 1))))
    return np.concatenate(columns, axis=1)


def test_the_penalty_is_the_best_by_leaving_each_path_out():
    rng, num_ops = np.random.default_rng(1), (3, 3, 3, 3)
    paths = rng.integers(0, 3, (25, 4))
    values = paths.sum(1) + 2.0 * (paths[:, 0] == paths[:, 1]) + rng.normal(0, 0.1, 25)
    gram, targets = _gram_and_targets(paths, values, num_ops)
    errors = {}
    for share, penalty in itertools.product(model.PAIR_SHARES, model.PENALTIES.tolist()):
        kernel, total = model._kernel(gram, 4, share), 0.0
        for i in range(25):
            rest = np.delete(np.arange(25), i)
            weights = np.linalg.solve(kernel[np.ix_(rest, rest)] + penalty * np.eye(24), targets[rest])
            total += float((targets[i] - kernel[i, rest] @ weights) ** 2)
        errors[share, penalty] = total
    assert model._choose(gram, targets, 4) == min(errors, key=errors.__getitem__)


def test_the_predictions_of_changed_paths_are_those_of_the_model():
    rng, num_ops = np.random.default_rng(0), (3, 2, 4)
    paths = np.array(list(itertools.product(*map(range, num_ops))))[::3]
    surrogate = Surrogate.fit(paths, rng.normal(size=len(paths)), num_ops)
    changed, predictions = model._changes(surrogate, paths)
    assert predictions == pytest.approx(surrogate.predict(changed))
    assert sorted(map(tuple, changed.tolist())) == sorted(map(tuple, one_change(paths, num_ops).tolist()))


def test_equal_accuracies_and_very_many_paths_can_be_fitted():
    task = make_task(MACRO, Budget())
    flat = Surrogate.fit(EVERYTHING[:5], np.full(5, 0.7), MACRO.num_ops)
    assert flat.predict(EVERYTHING) == pytest.approx(np.full(len(EVERYTHING), 0.7))
    found = [Found(path, i / 6561, 0) for i, path in enumerate(map(tuple, EVERYTHING.tolist()))]
    paths, values = model._fitted(found)
    assert 0.9 * model.MOST_FITTED <= len(paths) <= model.MOST_FITTED
    assert (np.sort(values)[-1000:] == np.arange(5561, 6561) / 6561).all()
    assert values.min() < 0.01
    assert task.neighbours((0,) * 8) == [
        tuple(op if i == layer else 0 for i in range(8)) for layer in range(8) for op in (1, 2)
    ]


@pytest.mark.timed
def test_a_round_of_50_candidates_in_mobilenet_takes_under_a_second():
    space, budget = load_space("mobilenet"), Budget(max_macs=330_000_000)
    task, truth = make_task(space, budget), Truth(space.num_ops, 0, 0.1)
    paths = task.new_random_paths(950, set(), np.random.default_rng(0))
    found = [Found(path, value, 0) for path, value in zip(paths, truth(paths).tolist(), strict=True)]
    gc.collect()  # the garbage of other tests
    start = time.perf_counter()
    proposed = model.best_predicted(task, Surrogate.fit(*model._fitted(found), space.num_ops), found, 50)
    assert time.perf_counter() - start < 1
    new = [path for path in proposed if path not in set(paths)][:50]
    assert len(new) == 50
    assert task.feasible(np.array(new)).all()
    assert truth(new).min() > truth(paths).max()
