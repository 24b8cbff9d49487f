"""Spaces that choose among image sizes: costs of paths, and draws of paths within limits."""

import itertools

import numpy as np
import pytest
from scipy import stats

from greedynas import Budget, Fixed, GreedyNASError, Space, Stage
from greedynas.spaces.costs import CostTable, SizedCostTable
from greedynas.spaces.feasible import FeasiblePaths, feasible_paths, sample_feasible, within
from greedynas.spaces.paths import compact, op_names, parse_path, pretty
from tests.helpers.bases import small_space, whole_path

AROUND = small_space()


def tiny(sizes=(8, 12, 16)):
    """Return a space of 3 image sizes and 27 paths for each."""
    return Space(
        name="tiny",
        ops=["ID", "MB3_K3", "MB6_K5"],
        stem=[Fixed(op="CONV_K3", channels=4, stride=2)],
        stages=[Stage(channels=4), Stage(channels=6, stride=2, repeat=2)],
        head=[Fixed(op="CONV_K1", channels=12)],
        image_size=sizes[-1],
        sizes=sizes,
        num_classes=3,
    )


TINY = tiny()
EVERY = np.array(list(itertools.product(*map(range, TINY.num_ops))))


@pytest.mark.parametrize("space", [TINY, AROUND], ids=["tiny", "around a base"])
def test_a_path_costs_what_it_costs_at_its_image_size(space):
    paths = np.unique(space.sample(200, np.random.default_rng(0)), axis=0)
    costs = space.costs(paths)
    for path, macs, params in zip(paths, costs.macs, costs.params, strict=True):
        settled, rest = space.settle(path)
        assert (settled.image_size, settled.sizes) == (space.sizes[path[0]], ())
        alone = settled.costs([rest])
        assert (macs, params) == (alone.macs[0], alone.params[0])
        assert op_names(path, space) == [f"PX{settled.image_size}", *op_names(rest, settled)]
    assert len(set(paths[:, 0])) == 3


def test_range_and_mean_are_those_of_all_paths():
    for cost in ("macs", "params"):
        table, all_costs = TINY.cost_tables[cost], getattr(TINY.costs(EVERY), cost)
        assert table.range == table.whole_range == (all_costs.min(), all_costs.max())
        assert table.mean == pytest.approx(all_costs.mean())
    assert whole_path(TINY) == tuple(EVERY[TINY.costs(EVERY).macs.argmax()])


def test_a_space_without_a_choice_is_settled_already():
    space = TINY.adapt(image_size=12)
    assert (space.sizes, space.image_size, space.layers[0].where) == ((), 12, "stage 1")
    assert space.settle((0, 1, 2)) == (space, (0, 1, 2))


def test_paths_with_an_image_size_are_written_and_read():
    path = (1, 0, 2, 1)
    assert pretty(path, TINY) == "PX12 | ID | MB6_K5 MB3_K3"
    assert [parse_path(text, TINY) for text in (compact(path, TINY), "PX12 ID MB6_K5 MB3_K3")] == [path] * 2
    with pytest.raises(GreedyNASError, match="op PX10 is not in layer 0 of tiny, which has PX8 PX12 PX16"):
        parse_path("PX10 ID MB6_K5 MB3_K3", TINY)


def feasible(limits):
    costs = TINY.costs(EVERY)
    kept = np.ones(len(EVERY), dtype=bool)
    for cost, (low, high) in limits.items():
        kept &= (getattr(costs, cost) >= (low or 0)) & (getattr(costs, cost) <= (high or np.inf))
    return EVERY[kept]


MACS = np.sort(TINY.costs(EVERY).macs)
SMALLEST = np.sort(TINY.costs(EVERY[EVERY[:, 0] == 0]).macs)
PARAMS = np.sort(TINY.costs(EVERY).params)


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"macs": (None, int(MACS[30]))}, 3),  # a limit that a path meets exactly
        ({"macs": (None, int(SMALLEST[2]))}, 1),
        ({"macs": (int(MACS[-4]), None)}, 1),
        ({"macs": (int(MACS[30]), int(MACS[60]))}, 3),
        ({"params": (None, int(PARAMS[40]))}, 3),
        ({"macs": (None, int(MACS[55])), "params": (int(PARAMS[20]), None)}, 3),
    ],
)
def test_each_size_is_equally_likely_and_so_is_each_path_of_a_size(limits, sizes):
    expected = feasible(limits)
    paths = FeasiblePaths(TINY.cost_tables, limits).sample(6000, np.random.default_rng(1))
    assert {tuple(path) for path in paths.tolist()} == {tuple(path) for path in expected.tolist()}
    found, by_size = np.unique(paths[:, 0], return_counts=True)
    assert len(found) == len(set(expected[:, 0])) == sizes
    assert len(found) == 1 or stats.chisquare(by_size).pvalue > 0.001
    for size in found:
        _, counts = np.unique(paths[paths[:, 0] == size], axis=0, return_counts=True)
        assert len(counts) == 1 or stats.chisquare(counts).pvalue > 0.001
    order = stats.spearmanr(np.arange(6000), paths[:, 0]).statistic if sizes > 1 else 0
    assert abs(order) < 0.06  # the sizes come in no order


def test_no_path_around_a_base_is_above_a_limit():
    low, high = AROUND.cost_tables["macs"].range
    for share in (0.01, 0.2, 0.6):
        budget = Budget(max_macs=int(low + share * (high - low)))
        paths = feasible_paths(AROUND, budget).sample(500, np.random.default_rng(0))
        assert AROUND.costs(paths).macs.max() <= budget.max_macs
        assert within(AROUND.cost_tables, budget.limits(), paths).all()
        cheapest = [AROUND.adapt(image_size=size).cost_tables["macs"].range[0] for size in AROUND.sizes]
        assert set(paths[:, 0]) == {i for i, least in enumerate(cheapest) if least <= budget.max_macs}
    assert set(paths[:, 0]) == {0, 1, 2}
    assert feasible_paths(AROUND, None) is feasible_paths(AROUND, Budget()) is None


def test_the_same_generator_gives_the_same_paths():
    limits = {"macs": (None, int(MACS[40]))}
    first, second = (sample_feasible(TINY.cost_tables, limits, 50, np.random.default_rng(3)) for _ in range(2))
    assert (first == second).all()
    assert (first.shape, first.dtype) == ((50, 4), np.int64)
    assert FeasiblePaths(TINY.cost_tables, limits).sample(0, np.random.default_rng(3)).shape == (0, 4)


def test_a_size_whose_paths_all_miss_the_limits_by_less_than_a_bin_is_left_out():
    """Check a size that counting in bins admits, and that has no path between the limits."""
    gap, fits = (CostTable(np.array([[0, 1_000_000], [0, 3 - change]]), 0, (2, 2)) for change in (0, 1))
    limits = {"macs": (1_000_001, 1_000_002)}
    paths = FeasiblePaths({"macs": SizedCostTable.of([gap, fits])}, limits).sample(20, np.random.default_rng(0))
    assert paths.tolist() == [[1, 1, 1]] * 20
    with pytest.raises(GreedyNASError, match="no path is within macs from 1,000,001 to 1,000,002"):
        FeasiblePaths({"macs": SizedCostTable.of([gap, gap])}, limits)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(max_macs=int(MACS[0]) - 1), f"the cheapest has {MACS[0]:,}, the most expensive {MACS[-1]:,}"),
        (Budget(min_macs=int(MACS[-1]) + 1), "no path is within macs"),
        (Budget(max_macs=int(MACS[0]), min_params=int(PARAMS[-1])), "no path is within all limits at once"),
    ],
)
def test_limits_that_no_size_keeps_are_one_line(budget, message):
    with pytest.raises(GreedyNASError, match=message) as error:
        TINY.sample(1, np.random.default_rng(0), budget)
    assert "\n" not in str(error.value)
