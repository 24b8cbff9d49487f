"""Derivation: the most probable path within hard limits, against an enumeration of small spaces."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedynas import Budget, GreedyNASError, load_space, search
from greedynas.greedy.searchers import derivation
from greedynas.greedy.searchers.derivation import most_probable
from greedynas.greedy.searchers.task import make_task
from tests.helpers.training import tiny_space

SPACE = tiny_space()
PATHS = np.array(list(itertools.product(*map(range, SPACE.num_ops))))


def log_p(paths, probabilities):
    return sum(np.log(np.maximum(layer, 1e-12))[paths[:, i]] for i, layer in enumerate(probabilities))


def some_probabilities(space, seed, sharp=1.0):
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(count, sharp)) for count in space.num_ops]


@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["macs", "params", "both"]))
def test_no_feasible_path_is_more_probable(seed, share, other, cost):
    """All 81 paths are listed, for limits anywhere between the cheapest and the most expensive path."""
    probabilities = some_probabilities(SPACE, seed, 0.3)
    limits = {}
    for name, part in (("macs", share), ("params", other)):
        low, high = SPACE.cost_tables[name].range
        if cost in (name, "both"):
            limits[f"max_{name}"] = int(low + part * (high - low))
    task = make_task(SPACE, Budget(**limits))
    feasible = PATHS[task.feasible(PATHS)]
    best = log_p(feasible, probabilities).max()
    found = most_probable(task, probabilities, np.random.default_rng(0))
    assert task.feasible(np.array([found])).all()
    assert log_p(np.array([found]), probabilities)[0] == pytest.approx(best, abs=1e-6)


def test_without_limits_it_is_the_most_probable_op_of_every_layer():
    space = load_space("mobilenet")
    probabilities = some_probabilities(space, 0)
    found = search(space, lambda paths: [0.5] * len(paths), searcher="derivation", probabilities=probabilities)
    assert [entry.path for entry in found.found] == [tuple(int(layer.argmax()) for layer in probabilities)]


@pytest.mark.parametrize("limits", [{"max_macs": 200_000_000}, {"max_macs": 330_000_000, "max_params": 4_500_000}])
@pytest.mark.parametrize("sharp", [0.1, 1.0, 1000.0])
def test_a_large_space_within_tight_limits(limits, sharp):
    """Of the changes of one or two ops, none leads to a feasible path that is more probable."""
    space = load_space("mobilenet")
    probabilities, task = some_probabilities(space, 3, sharp), make_task(space, Budget(**limits))
    found = most_probable(task, probabilities, np.random.default_rng(0))
    best = log_p(np.array([found]), probabilities)[0]
    assert task.feasible(np.array([found])).all()
    cells = [(layer, op) for layer, count in enumerate(space.num_ops) for op in range(count)]
    changed = []
    for (i, a), (j, b) in itertools.combinations(cells, 2):
        path = list(found)
        path[i], path[j] = a, b
        changed.append(path)
    changed = np.array(changed)
    assert log_p(changed[task.feasible(changed)], probabilities).max() <= best + 1e-6
    random = np.array(task.sample(20_000, np.random.default_rng(1)))
    assert log_p(random, probabilities).max() <= best + 1e-6


def test_equally_probable_ops_and_impossible_ones():
    task = make_task(SPACE, Budget(max_macs=30_000))
    even = [np.full(3, 1 / 3)] * 4
    assert task.feasible(np.array([most_probable(task, even, np.random.default_rng(0))])).all()
    certain = [np.array([0.0, 0.0, 1.0])] * 4  # every op with a probability is too expensive
    assert task.feasible(np.array([most_probable(task, certain, np.random.default_rng(0))])).all()


def test_an_effort_that_is_too_small_still_ends_within_the_limits(monkeypatch, caplog):
    monkeypatch.setattr(derivation, "MOST_STEPS", 2)
    task = make_task(SPACE, Budget(max_macs=30_000))
    found = most_probable(task, some_probabilities(SPACE, 0), np.random.default_rng(0))
    assert task.feasible(np.array([found])).all()
    assert "not certain" in caplog.text


def test_a_supernet_without_probabilities_is_refused():
    with pytest.raises(GreedyNASError, match=r"'derivation' takes the path that a method .* has learned"):
        search(SPACE, lambda paths: [0.5] * len(paths), searcher="derivation")
