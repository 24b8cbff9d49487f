"""Limits on latencies, compared with exact decimal arithmetic over all paths."""

import itertools
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from greedynas import Budget, GreedyNASError, load_space, search
from greedynas.greedy.searchers.evolution import initial_population
from greedynas.greedy.searchers.task import make_task
from greedynas.spaces.budget import parse_latency
from greedynas.spaces.costs import CostTable
from greedynas.spaces.feasible import sample_feasible, within

MACRO = load_space("macro")


def priced(cells, fixed):
    """Return the cost table of decimals (None: no timing), all its paths, and the exact cost of each of them."""
    entries = np.full((len(cells), max(map(len, cells))), np.nan)
    for layer, row in enumerate(cells):
        entries[layer, : len(row)] = [np.nan if cell is None else float(cell) for cell in row]
    paths = list(itertools.product(*(range(len(row)) for row in cells)))
    chosen = ([row[op] for row, op in zip(cells, path, strict=True)] for path in paths)
    costs = [None if None in cost else fixed + sum(cost) for cost in chosen]
    return CostTable(entries, float(fixed), tuple(map(len, cells))), np.array(paths), costs


@st.composite
def limited(draw):
    """Draw a table of decimal latencies, and limits that equal costs of some paths, or differ by one digit."""
    digit = Decimal(1).scaleb(-draw(st.integers(0, 9)))
    cell = st.integers(0, draw(st.sampled_from([3, 40, 10**6]))).map(lambda number: number * digit)
    row = st.lists(cell, min_size=1, max_size=3).flatmap(
        lambda cells: st.permutations([*cells, *draw(st.sampled_from([(), (None,)]))])
    )
    cells = draw(st.lists(row, min_size=1, max_size=5))
    table, paths, costs = priced(cells, draw(cell))
    step = st.sampled_from([-digit, Decimal(0), Decimal(0), digit])
    limit = st.tuples(st.sampled_from([cost for cost in costs if cost is not None]), step).map(sum)
    low, high = draw(st.tuples(st.none() | limit, st.none() | limit).filter(any))
    if low is not None and high is not None:
        low, high = sorted((low, high))
    return table, paths, costs, low, high


TENTHS = [[Decimal("0.1"), Decimal("0.3")]] * 8


@given(limited())
@example((*priced(TENTHS, Decimal(0)), None, Decimal("0.8")))
@example((*priced(TENTHS, Decimal(0)), Decimal("1.0"), Decimal("1.0")))
@example((*priced(TENTHS, Decimal("0.2")), Decimal("2.6"), None))
@example(
    (*priced([[Decimal("1.001"), Decimal("1.002")]], Decimal(0)), None, Decimal("1.001"))
)  # 1.001 * 1e9 < 1001000000
@example(
    (*priced([[Decimal("0.067"), Decimal("0.066")]], Decimal(0)), Decimal("0.067"), None)
)  # 0.067 * 1e9 > 67000000
def test_a_path_exactly_at_a_latency_limit_is_within_it(case):
    table, paths, costs, low, high = case
    exact = [cost is not None and (low is None or cost >= low) and (high is None or cost <= high) for cost in costs]
    limits = {"latency_ms": tuple(None if limit is None else float(limit) for limit in (low, high))}
    tables = {"latency_ms": table}
    assert within(tables, limits, paths).tolist() == exact
    shown = table(paths)  # the same numbers as those that are compared, whatever the order of the layers
    assert [None if np.isnan(cost) else cost for cost in shown] == [
        None if cost is None else float(cost) for cost in costs
    ]
    expected = {tuple(path) for path in paths[exact].tolist()}
    if not expected:
        with pytest.raises(GreedyNASError, match="no path"):
            sample_feasible(tables, limits, 1, np.random.default_rng(0))
        return
    drawn = sample_feasible(tables, limits, 40 * len(expected), np.random.default_rng(0))
    assert {tuple(path) for path in drawn.tolist()} == expected  # missing one has a chance of e^-40


@pytest.mark.parametrize("seed", range(4))
def test_a_search_finds_the_path_with_exactly_the_allowed_latency(seed):
    rng = np.random.default_rng(seed)
    tenths = rng.integers(1, 9, (8, 3))
    latency = CostTable(tenths / 10, 0.3, MACRO.num_ops)
    dearest = tuple(tenths.argmax(1).tolist())
    most = int(tenths.max(1).sum()) + 3
    budget = Budget(max_latency_ms=most / 10, min_latency_ms=(most - 3) / 10)
    every = np.array(list(itertools.product(range(3), repeat=8)))
    costs = tenths[np.arange(8), every].sum(1) + 3
    feasible = {tuple(path) for path in every[costs >= most - 3].tolist()}
    task = make_task(MACRO, budget, latency=latency)
    assert initial_population(task, [dearest], 1, rng) == ([dearest], 1)
    result = search(MACRO, lambda paths: [0.5] * len(paths), budget, latency=latency, generations=60)
    assert {entry.path for entry in result.found} == feasible
    latencies = task.tables["latency_ms"](np.array([entry.path for entry in result.found]))
    assert latencies.max() == budget.max_latency_ms
    assert latencies.min() == min(costs[costs >= most - 3]) / 10 >= budget.min_latency_ms


def test_a_limit_is_a_whole_number_of_picoseconds_like_the_latencies():
    assert (0.1 * 3 > 0.3, 0.0041 * 1e3 > 4.1) == (True, True)
    assert Budget(max_latency_ms=0.1 * 3).max_latency_ms == 0.3
    assert Budget(max_latency_ms=parse_latency("0.0041s")) == Budget(max_latency_ms=4.1)
    assert Budget(max_latency_ms=1e-12).max_latency_ms > 0
    assert Budget(max_latency_ms=123.456789012345).max_latency_ms == 123.456789012


@pytest.mark.parametrize("n", [0, 1, 2, 100, 1000])
def test_the_number_of_paths_is_the_requested_one(n):
    limits = {"macs": (None, 40e6), "params": (None, 2.5e6)}
    paths = sample_feasible(MACRO.cost_tables, limits, n, np.random.default_rng(0))
    assert (paths.shape, paths.dtype) == ((n, 8), np.int64)
    assert within(MACRO.cost_tables, limits, paths).all()


@pytest.mark.parametrize("cost", ["macs", "params"])
@pytest.mark.parametrize("end", ["cheapest", "most expensive"])
def test_the_few_paths_at_the_ends_of_a_large_space_are_found(cost, end):
    """Check ends with one path in billions, which a sampler that draws from more paths would not find."""
    space = load_space("mobilenet")
    low, high = space.cost_tables[cost].range
    margin = 0.02 * (high - low)
    limits = {cost: (None, low + margin) if end == "cheapest" else (high - margin, None)}
    paths = sample_feasible(space.cost_tables, limits, 30, np.random.default_rng(0))
    assert len(np.unique(paths, axis=0)) > 20
    assert within(space.cost_tables, limits, paths).all()


def test_limits_between_the_costs_of_two_paths_are_refused():
    """Check limits that bins are too coarse for, so that paths are drawn for a while before none is found."""
    table = CostTable(np.array([[0, 1_000_000], [0, 3]]), 0, (2, 2))
    with pytest.raises(GreedyNASError, match="no path is within all limits at once: macs from 1,000,001 to 1,000,002"):
        sample_feasible({"macs": table}, {"macs": (1_000_001, 1_000_002)}, 1, np.random.default_rng(0))
    for limit, path in ((1_000_000, [1, 0]), (1_000_003, [1, 1])):
        found = sample_feasible({"macs": table}, {"macs": (limit, limit)}, 2, np.random.default_rng(0))
        assert found.tolist() == [path] * 2


def test_no_paths_can_be_requested():
    paths = sample_feasible(MACRO.cost_tables, {"macs": (None, 40e6)}, 0, np.random.default_rng(0))
    assert (paths.shape, paths.dtype) == ((0, 8), np.int64)


@pytest.mark.parametrize("limit", [(None, 9.0), (0.1, None), (0.1, 9.0), (None, None)])
def test_a_path_without_a_price_is_within_no_limit(limit):
    table = CostTable(np.array([[1.0, np.nan], [1.0, 2.0]]), 0.5, (2, 2))
    paths = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    assert within({"latency_ms": table}, {"latency_ms": limit}, paths).tolist() == [True, True, False, False]
