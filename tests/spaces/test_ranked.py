"""Tests of the paths that are listed by an additive value within limits, against a sorted list of all paths."""

import itertools
from itertools import islice

import numpy as np
import pytest

from greedynas.spaces.costs import CostTable, SizedCostTable
from greedynas.spaces.feasible import FeasiblePaths, within
from greedynas.spaces.ranked import ranked_paths, whole_values


def table_of(rng, num_ops, high=1000, missing=False):
    entries = rng.integers(0, high, (len(num_ops), max(num_ops)))
    if missing:
        entries = entries / 7
        entries[1, 0] = np.nan
    return CostTable(entries, 5, num_ops)


def values_of(rng, num_ops, ties=False):
    return [rng.integers(-2, 3, ops).astype(float) if ties else rng.normal(size=ops) for ops in num_ops]


def by_brute_force(tables, limits, values):
    """Return the sums of all paths within the limits, best first."""
    paths = np.array(list(itertools.product(*(range(len(ops)) for ops in values))))
    paths = paths[within(tables, limits, paths)]
    return paths, np.sort(sum(values[i][paths[:, i]] for i in range(len(values))))[::-1]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("lows", [(0.0,), (0.4,), (0.0, 0.0), (0.3, 0.2), (0.2, 0.1, 0.3)])
@pytest.mark.parametrize("missing", [False, True])
def test_all_paths_within_limits_are_listed_once_in_order(lows, ties, missing):
    rng, num_ops = np.random.default_rng(len(lows)), (3, 2, 4, 3, 3)
    names = ("macs", "params", "latency_ms")[: len(lows)]
    tables = {name: table_of(rng, num_ops, missing=missing and i == 0) for i, name in enumerate(names)}
    limits = {}
    for name, low in zip(names, lows, strict=True):
        least, most = tables[name].range
        limits[name] = (least + low * (most - least) if low else None, least + 0.7 * (most - least))
    values = values_of(rng, num_ops, ties)
    expected, sums = by_brute_force(tables, limits, values)
    assert 0 < len(expected) < 216
    listed = list(FeasiblePaths(tables, limits).ranked(values))
    assert len(set(listed)) == len(listed)
    assert set(listed) == set(map(tuple, expected.tolist()))
    found = [sum(values[i][op] for i, op in enumerate(path)) for path in listed]
    assert found == pytest.approx(sums.tolist(), abs=1e-6)


def test_a_path_exactly_at_a_limit_is_listed():
    rng, num_ops = np.random.default_rng(0), (4,) * 6
    table = CostTable(rng.integers(10**6, 10**7, (6, 4)), 3, num_ops)
    values = [table.cells(layer).astype(float) for layer in range(6)]  # the best is the most expensive
    limit = int(table(np.array([(1, 2, 3, 0, 1, 2)]))[0])
    for limits in ({"macs": (None, limit)}, {"macs": (limit, limit)}):
        best = next(FeasiblePaths({"macs": table}, limits).ranked(values))
        assert table(np.array([best]))[0] == limit


def test_image_sizes_are_merged():
    rng, num_ops = np.random.default_rng(3), (3, 3, 2)
    at_size = [table_of(rng, num_ops) for _ in range(3)]
    table = SizedCostTable.of(at_size)
    limits = {"macs": (None, float(np.median([one.mean for one in at_size])))}
    values = values_of(rng, (3, *num_ops))
    expected, sums = by_brute_force({"macs": table}, limits, values)
    listed = list(FeasiblePaths({"macs": table}, limits).ranked(values))
    assert set(listed) == set(map(tuple, expected.tolist()))
    assert len({path[0] for path in listed}) > 1
    assert [sum(values[i][op] for i, op in enumerate(path)) for path in listed] == pytest.approx(sums, abs=1e-6)


def test_the_best_of_a_very_large_space_come_at_once_even_if_all_are_equal():
    rng = np.random.default_rng(0)
    assert len(set(islice(ranked_paths(whole_values([np.full(13, 0.1)] * 21), ()), 200))) == 200
    values = whole_values([rng.normal(size=13) for _ in range(21)])
    first = next(ranked_paths(values, ()))[1]
    assert first == tuple(int(layer.argmax()) for layer in values)
