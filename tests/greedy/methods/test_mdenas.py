"""MdeNAS against a computation by hand over a scripted history."""

from dataclasses import replace

import numpy as np
import pytest

from greedynas.greedy.methods.mdenas import MdeNAS, moved_probabilities
from tests.helpers.method_references import double_net, draw_of, space_of

pytestmark = pytest.mark.usefixtures("one_thread")


def by_hand(p, updates, accuracies, rate):
    """Return equation 6 as two loops over the ops."""
    moved = list(p)
    for i in range(len(p)):
        for j in range(len(p)):
            moved[i] += rate * (updates[i] < updates[j] and accuracies[i] > accuracies[j])
            moved[i] -= rate * (updates[i] > updates[j] and accuracies[i] < accuracies[j])
    moved = [max(value, 0) for value in moved]
    return [value / sum(moved) for value in moved]


def test_the_update_of_the_paper():
    found = moved_probabilities(np.array([0.2, 0.3, 0.5]), np.array([1, 4, 2]), np.array([0.7, 0.5, 0.6]), 0.01)
    # Op 0 beats both others with fewer updates, op 2 beats op 1, op 1 loses to both.
    np.testing.assert_allclose(found, [0.22, 0.28, 0.5])
    even = moved_probabilities(np.array([0.2, 0.8]), np.array([3, 3]), np.array([0.7, 0.1]), 0.01)
    np.testing.assert_allclose(even, [0.2, 0.8])
    empty = moved_probabilities(np.array([0.995, 0.005]), np.array([1, 2]), np.array([0.7, 0.1]), 0.01)
    np.testing.assert_allclose(empty, [1, 0])


def test_a_scripted_history(data):
    """Five draws with given accuracies: every number of the method's memory is computed by hand."""
    net = double_net(space_of(repeat=1))
    scripted = iter(np.random.default_rng(3).permutation(40) / 40)
    known, method = {}, MdeNAS()
    updates, accuracies = np.zeros((2, 3), int), np.zeros((2, 3))
    p, trained = np.full((2, 3), 1 / 3), []

    def told(paths):
        known.clear()
        known.update({path: float(next(scripted)) for path in paths})
        return [known[path] for path in paths]

    memory = {}
    for number in range(5):
        draw = replace(draw_of(net, data, "mdenas", seed=number, memory=memory, arch_lr=0.02, k=3), accuracies=told)
        drawn = method.draw(draw)
        for path in trained:
            for layer, op in enumerate(path):
                accuracies[layer][op] = known[path]
        p = np.array([by_hand(p[i], updates[i], accuracies[i], 0.02) for i in range(2)])
        np.testing.assert_allclose(memory["probabilities"], p, rtol=1e-12)
        trained = [path for [path] in drawn.updates]
        assert len(trained) == 3
        for path in trained:
            for layer, op in enumerate(path):
                updates[layer][op] += 1
        assert memory["updates"] == updates.tolist()
    assert not np.allclose(p, 1 / 3)
