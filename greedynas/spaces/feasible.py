"""Uniform samples of the paths within limits, even if only a few paths are.

Costs are sums over layers, so the paths that fit can be counted by dynamic programming over the remaining budget, and
drawn layer by layer in proportion to those counts. For counting, costs are rounded down to bins, which admits a few
paths too many and loses none; those are rejected by their exact costs, so the accepted paths are exactly uniform. All
arithmetic uses whole numbers (`CostTable.whole`), so that a path exactly at a limit is always within it.

The peak of memory is not a sum but the largest value of a path's layers (`PeakTable`). A limit on it forbids the ops
above it, each by itself, so the same counting over the remaining ops stays exact.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.budget import Budget
from greedynas.spaces.costs import CostTable, IntArray, PeakTable, SizedCostTable
from greedynas.spaces.memory import cost_tables_for
from greedynas.spaces.ranked import MAX_STEPS, ranked_paths, whole_values

BINS = {
    1: 8192,
    2: 512,
    3: 64,
    4: 24,
}  # by the number of limited sums (the grid has bins ** sums cells)
RANKED_BINS = {1: 8192, 2: 384, 3: 32, 4: 14}  # of the bounds of `ranked`, which need not be as tight as counts
MAX_EMPTY_ROUNDS = 100

Limits = Mapping[str, tuple[float | None, float | None]]


def sample_feasible(tables: Mapping[str, CostTable], limits: Limits, n: int, rng: np.random.Generator) -> IntArray:
    """Return n paths drawn i.i.d. and uniformly from those within the limits; `limits` must name at least one cost."""
    return FeasiblePaths(tables, limits).sample(n, rng)


def feasible_paths(space: Any, budget: Budget | None) -> "FeasiblePaths | None":
    """Return the paths of a space within a budget on costs that need no latency table; None where nothing is limited."""
    limits = {} if budget is None else budget.limits()
    return FeasiblePaths(cost_tables_for(space, limits), limits) if limits else None


class FeasiblePaths:
    """All paths within some limits, to draw from. The counting is done once, for any number of draws.

    Where a space chooses among image sizes, each size that keeps the limits is equally likely, and so is each path of that
    size: a small size keeps a limit with many more paths, and would otherwise be drawn alone.
    """

    def __init__(self, tables: Mapping[str, CostTable], limits: Limits):
        limited = {cost: tables[cost] for cost in limits}
        self.layers = len(next(iter(limited.values())).num_ops)
        self.branches = _branches(limited, limits)

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        """Return n i.i.d. draws."""
        if n == 0:
            return np.empty((0, self.layers), dtype=np.int64)
        if len(self.branches) == 1:
            return self.branches[0].sample(n, rng)
        counts = rng.multinomial(n, [1 / len(self.branches)] * len(self.branches))
        parts = [branch.sample(count, rng) for branch, count in zip(self.branches, counts, strict=True) if count]
        paths: IntArray = np.concatenate(parts)
        return paths[rng.permutation(n)]

    def ranked(self, values: Sequence[NDArray[np.float64]], steps: int = MAX_STEPS) -> Iterator[tuple[int, ...]]:
        """Yield paths in descending order of the sum of `values[layer][op]`, as far as a limited effort gets."""
        ranked = [branch.ranked(whole_values(values), steps) for branch in self.branches]
        for _, path in heapq.merge(*ranked, key=lambda entry: -entry[0]):
            yield path


class _Branch:
    """Paths whose costs are sums over layers: all of a space, or those of one image size."""

    def __init__(self, tables: Mapping[str, CostTable], limits: Limits, size: int | None = None):
        self.tables, self.limits, self.size = tables, limits, size
        self.grids = _grids(tables, limits, BINS)
        self.counts = _count_suffixes(self.grids)
        if not self.counts[0][tuple(grid.bins for grid in self.grids)] > 0:
            raise _no_path(limits)

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        accepted: list[IntArray] = []
        missing, empty_rounds = n, 0
        while missing > 0:
            paths = _draw(self.grids, self.counts, missing + missing // 8 + 64, rng)
            paths = paths[within(self.tables, self.limits, paths)][:missing]
            empty_rounds = 0 if len(paths) else empty_rounds + 1
            if empty_rounds == MAX_EMPTY_ROUNDS:
                raise _no_path(self.limits)
            accepted.append(paths)
            missing -= len(paths)
        found = np.concatenate(accepted)
        return found if self.size is None else np.insert(found, 0, self.size, axis=1)

    @cached_property
    def _ranked_grids(self) -> "list[_Grid]":
        return _grids(self.tables, self.limits, RANKED_BINS)

    def ranked(
        self, values: Sequence[NDArray[np.float64]], steps: int = MAX_STEPS
    ) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield (sum, path), best first; the value of an image size counts like that of an op."""
        if self.size is None:
            yield from ranked_paths(values, self._ranked_grids, steps)
            return
        own = float(values[0][self.size])
        for value, path in ranked_paths(values[1:], self._ranked_grids, steps):
            yield own + value, (self.size, *path)


def _grids(tables: Mapping[str, CostTable], limits: Limits, bins: Mapping[int, int]) -> "list[_Grid]":
    """Return a grid for each limited sum, in which the ops that a limited peak forbids do not fit."""
    sums = {cost: table for cost, table in tables.items() if cost in limits and not isinstance(table, PeakTable)}
    peaks = {cost: table for cost, table in tables.items() if cost in limits and isinstance(table, PeakTable)}
    for cost, peak in peaks.items():
        high = limits[cost][1]
        if high is not None and high < peak.whole_range[0]:
            raise GreedyNASError(f"no path has {cost} of at most {high:,}: every path needs {peak.whole_range[0]:,}")
    grids = [_Grid(cost, table, *limits[cost], bins=bins[len(sums)]) for cost, table in sums.items()]
    if not sums:  # a cost that is the same for all paths
        table = next(iter(peaks.values()))
        grids = [_Grid("", CostTable(np.zeros_like(table.entries), 0, table.num_ops), None, None, bins=1)]
    for cost, peak in peaks.items():
        for layer in range(len(peak.num_ops)):
            for op in np.flatnonzero(~peak.allowed(layer, limits[cost][1])).tolist():
                for grid in grids:
                    grid.forbid(layer, op)
    return grids


def _branches(tables: Mapping[str, CostTable], limits: Limits) -> list[_Branch]:
    sized = {cost: table.at_size for cost, table in tables.items() if isinstance(table, SizedCostTable)}
    if not sized:
        return [_Branch(tables, limits)]
    branches: list[_Branch] = []
    for size in range(len(next(iter(sized.values())))):
        try:
            branch = _Branch({cost: at_size[size] for cost, at_size in sized.items()}, limits, size)
            branch.sample(1, np.random.default_rng(0))  # bins alone may admit paths where there are none
            branches.append(branch)
        except GreedyNASError:  # no path of this size
            continue
    if not branches and len(tables) == 1:
        low, high = next(iter(tables.values())).range
        raise GreedyNASError(
            f"no path is within {_ranges(limits)}: the cheapest has {low:,}, the most expensive {high:,}"
        )
    if not branches:
        raise _no_path(limits)
    return branches


def within(tables: Mapping[str, CostTable], limits: Limits, paths: IntArray) -> NDArray[np.bool_]:
    """Return which paths are within every limit. A path that cannot be priced (NaN) is not."""
    kept = np.ones(len(paths), dtype=bool)
    for cost, (low, high) in limits.items():
        table = tables[cost]
        costs = table.whole(paths)
        kept &= ~np.isnan(costs)
        if low is not None:
            kept &= costs >= table.whole_limit(low)
        if high is not None:
            kept &= costs <= table.whole_limit(high)
    return kept


class _Grid:
    """One limited cost in bins: the cost of each op above the cheapest one of its layer, as a number of bins."""

    def __init__(self, cost: str, table: CostTable, low: float | None, high: float | None, bins: int):
        cheapest, most_expensive = table.whole_range
        least, most = (None if limit is None else table.whole_limit(limit) for limit in (low, high))
        if most is not None and most < cheapest:
            raise GreedyNASError(f"no path has {cost} of at most {high:,}: the cheapest path has {table.range[0]:,}")
        if least is not None and least > most_expensive:
            raise GreedyNASError(
                f"no path has {cost} of at least {low:,}: the most expensive path has {table.range[1]:,}"
            )
        self.num_ops = table.num_ops
        self.room = (most_expensive if most is None else int(min(most, most_expensive))) - cheapest
        self.bins = min(self.room, bins)  # one bin per unit is exact already
        self.above: list[
            list[int | None]
        ] = []  # by layer and op; None: the op alone exceeds the limit, or has no price
        for layer in range(len(table.num_ops)):
            above = table.whole_cells(layer) - np.nanmin(table.whole_cells(layer))
            self.above.append([int(x) if x <= self.room else None for x in above.tolist()])
        self.steps = [[None if x is None else self.floor(x) for x in ops] for ops in self.above]
        self.least = 0 if least is None else max(0, int(np.ceil(least)) - cheapest)
        # Rounding down loses less than one bin a layer, so a path that reaches `low` has at least this many bins.
        self.fewest = max(0, self.floor(self.least) - len(table.num_ops))

    def forbid(self, layer: int, op: int) -> None:
        """Exclude the paths that have this op in this layer."""
        self.above[layer][op] = self.steps[layer][op] = None

    def floor(self, amount: int) -> int:
        """Return the number of whole bins in an amount, by exact integer arithmetic."""
        return amount * self.bins // self.room if self.room else amount


def _step(grids: list[_Grid], layer: int, op: int) -> tuple[int, ...] | None:
    """Return the bins of each cost that this op uses, or None if it does not fit."""
    steps = [grid.steps[layer][op] for grid in grids]
    return None if None in steps else tuple(step for step in steps if step is not None)


def _count_suffixes(grids: list[_Grid]) -> list[NDArray[np.float64]]:
    """Return counts[layer][left, ...]: the ways to choose the ops from `layer` on with `left` bins of each cost."""
    shape = tuple(grid.bins + 1 for grid in grids)
    last = np.ones(shape)
    for axis, grid in enumerate(grids):
        spent = grid.bins - np.arange(grid.bins + 1)
        last *= (spent >= grid.fewest).reshape([-1 if axis == a else 1 for a in range(len(grids))])
    counts = [last]
    for layer in reversed(range(len(grids[0].num_ops))):
        here = np.zeros(shape)
        for op in range(grids[0].num_ops[layer]):
            step = _step(grids, layer, op)
            if step is not None and all(s < size for s, size in zip(step, shape, strict=True)):
                here[tuple(slice(s, None) for s in step)] += counts[0][
                    tuple(slice(0, size - s) for s, size in zip(step, shape, strict=True))
                ]
        counts.insert(0, here)
    return counts


def _draw(grids: list[_Grid], counts: list[NDArray[np.float64]], n: int, rng: np.random.Generator) -> IntArray:
    """Return n paths, drawn layer by layer, with each op chosen in proportion to the number of its completions."""
    num_ops = grids[0].num_ops
    paths = np.empty((n, len(num_ops)), dtype=np.int64)
    left = [np.full(n, grid.bins) for grid in grids]
    for layer, ops in enumerate(num_ops):
        steps = np.array([_step(grids, layer, op) or (np.iinfo(np.int32).max,) * len(grids) for op in range(ops)])
        weights = np.zeros((ops, n))
        for op in range(ops):
            after = [bins - step for bins, step in zip(left, steps[op], strict=True)]
            fits = np.logical_and.reduce([bins >= 0 for bins in after])
            weights[op, fits] = counts[layer + 1][tuple(bins[fits] for bins in after)]
        cumulative = weights.cumsum(axis=0)
        chosen = (cumulative <= rng.random(n) * cumulative[-1]).sum(axis=0)
        paths[:, layer] = chosen
        left = [bins - steps[chosen, axis] for axis, bins in enumerate(left)]
    return paths


def _no_path(limits: Limits) -> GreedyNASError:
    return GreedyNASError(f"no path is within all limits at once: {_ranges(limits)}; widen one of them")


def _ranges(limits: Limits) -> str:
    return ", ".join(
        f"{cost} from {low or 0:,} to {'any' if high is None else f'{high:,}'}" for cost, (low, high) in limits.items()
    )
