"""The search by reinforcement learning."""

import numpy as np
import pytest

from greedynas import Budget, load_space, search
from greedynas.greedy.search import search_steps
from greedynas.greedy.searchers.reinforce import Policy
from greedynas.greedy.searchers.task import Found, Plan, make_task
from tests.helpers.training import tiny_space

MACRO = load_space("macro")
BUDGET = Budget(max_macs=50_000_000)


def additive(seed):
    table = np.random.default_rng(seed).normal(size=(8, 3))
    return lambda paths: [float(table[np.arange(8), list(path)].sum()) for path in paths]


def test_it_finds_better_paths_than_random_search():
    gains = []
    for seed in range(3):
        best = {
            name: search(MACRO, additive(seed), BUDGET, searcher=name, generations=8, seed=seed).best.accuracy
            for name in ("reinforce", "random")
        }
        gains.append(best["reinforce"] - best["random"])
    assert np.mean(gains) > 0.3
    assert min(gains) >= 0


def test_every_proposed_path_is_new_and_feasible():
    result = search(MACRO, additive(0), BUDGET, searcher="reinforce", generations=4)
    paths = np.array([entry.path for entry in result.found])
    assert len(paths) == len(np.unique(paths, axis=0)) == 200
    assert (MACRO.costs(paths).macs <= 50_000_000).all()
    assert result.rejected > 0


def test_a_resumed_search_is_the_uninterrupted_one():
    plan, evaluate = Plan(make_task(MACRO, BUDGET), (), 20, 5), additive(1)
    *_, whole = search_steps(plan, evaluate, "reinforce")
    asked = []
    *_, resumed = search_steps(
        plan, lambda paths: asked.extend(paths) or evaluate(paths), "reinforce", whole.found[:40]
    )
    assert resumed.found == whole.found
    assert asked == [entry.path for entry in whole.found[40:]]


def test_the_policy_follows_the_advantages():
    policy = Policy((2, 3))
    policy.learn([Found((0, 0), 0.9, 0), Found((1, 1), 0.1, 0), Found((0, 1), 0.8, 0), Found((1, 2), 0.2, 0)])
    chances = [layer.detach().softmax(0).tolist() for layer in policy.logits]
    assert chances[0][0] > 0.5 > chances[0][1]
    assert chances[1][0] > chances[1][2]
    before = [layer.detach().clone() for layer in policy.logits]
    policy.learn([Found((0, 0), 0.5, 0), Found((1, 1), 0.5, 0)])  # equal accuracies say nothing
    assert all((layer == old).all() for layer, old in zip(policy.logits, before, strict=True))


def test_small_spaces_end_when_every_path_is_known():
    space = tiny_space()
    result = search(space, lambda paths: [sum(path) / 8 for path in paths], searcher="reinforce")
    assert len(result.found) == space.size
    assert result.best.accuracy == pytest.approx(1)
