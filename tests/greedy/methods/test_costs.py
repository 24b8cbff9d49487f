"""Expected costs against sums over all paths, and targets."""

import itertools
import math

import numpy as np
import pytest
import torch

from greedynas import GreedyNASError
from greedynas.greedy.methods.costs import Target
from greedynas.greedy.settings import TrainSettings
from tests.helpers.latency import made_up
from tests.helpers.method_references import space_of

SPACE = space_of()
PATHS = np.array(list(itertools.product(*map(range, SPACE.num_ops))))


def shares_of(seed=0):
    rng = np.random.default_rng(seed)
    return [torch.tensor(rng.dirichlet(np.ones(count)), requires_grad=True) for count in SPACE.num_ops]


def target(tmp_path=None, **limits):
    file = None
    if tmp_path is not None:
        made_up(SPACE).save(tmp_path / "latency.json")
        file = str(tmp_path / "latency.json")
    return Target.of(SPACE, TrainSettings(target=limits or None, latency_table=file))


def mean_cost(shares, costs):
    """Return the mean cost of all 81 paths, each weighted by its probability."""
    chances = np.array([math.prod(float(shares[i][op]) for i, op in enumerate(path)) for path in PATHS])
    assert chances.sum() == pytest.approx(1)
    return float((chances * costs).sum())


def test_expected_costs_are_the_means_over_all_paths(tmp_path):
    shares = [layer.detach() for layer in shares_of()]
    macs = mean_cost(shares, SPACE.costs(PATHS).macs)
    latency = mean_cost(shares, made_up(SPACE).cost_table(SPACE)(PATHS))
    found = target(tmp_path, max_macs=28_000, max_latency_ms=latency / 1.1).excess(shares)
    assert float(found) == pytest.approx(math.log(macs / 28_000) + math.log(1.1), rel=1e-6)
    assert float(target(tmp_path, max_latency_ms=2 * latency).excess(shares)) == 0


def test_the_excess_of_a_path_is_that_of_its_certain_distribution():
    goal = target(max_macs=28_000, max_params=1_000)
    for path in PATHS[::7].tolist():
        certain = [torch.eye(3, dtype=torch.float64)[op] for op in path]
        assert goal.excess_of(tuple(path)) == pytest.approx(float(goal.excess(certain)))
    assert target().excess_of((0, 0, 0, 0)) == 0


def test_the_gradient_is_that_of_finite_differences():
    goal, shares = target(max_macs=28_000), shares_of()
    gradients = torch.autograd.grad(goal.excess(shares), shares)
    for layer in range(4):
        for op in range(3):
            moved = [one.detach().clone() for one in shares]
            moved[layer][op] += 1e-6
            slope = (float(goal.excess(moved)) - float(goal.excess([one.detach() for one in shares]))) / 1e-6
            assert float(gradients[layer][op]) == pytest.approx(slope, rel=1e-4)


def test_a_latency_table_that_lacks_ops_is_refused(tmp_path):
    table = made_up(SPACE)
    table.save(tmp_path / "latency.json")
    other = space_of(("ID", "MB2_K3", "MB6_K7"))
    with pytest.raises(GreedyNASError, match=r"latency"):
        Target.of(other, TrainSettings(target={"max_latency_ms": 50}, latency_table=str(tmp_path / "latency.json")))
