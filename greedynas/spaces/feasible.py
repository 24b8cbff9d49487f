"""Uniform samples of the paths within limits, however few of them there are.

Costs are sums over layers, so the paths that fit can be counted by dynamic programming over "budget left", and drawn
layer by layer in proportion to those counts. Costs are rounded down to bins for the counting, which admits a few paths
too many and loses none; those are rejected by their exact costs, so what remains is exactly uniform. All of it is done in
whole numbers (`CostTable.whole`): a path exactly at a limit keeps it, whatever floats make of its sum.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.costs import CostTable, IntArray

BINS = {
    1: 8192,
    2: 512,
    3: 64,
}  # by the number of limited costs (the grid has bins ** costs cells)
MAX_EMPTY_ROUNDS = 100

Limits = Mapping[str, tuple[float | None, float | None]]


def sample_feasible(tables: Mapping[str, CostTable], limits: Limits, n: int, rng: np.random.Generator) -> IntArray:
    """n i.i.d. draws, each path within the limits equally likely. `limits` must name at least one cost."""
    grids = [_Grid(cost, tables[cost], *limits[cost], bins=BINS[len(limits)]) for cost in limits]
    counts = _count_suffixes(grids)
    if not counts[0][tuple(grid.bins for grid in grids)] > 0:
        raise _no_path(limits)
    accepted: list[IntArray] = []
    missing, empty_rounds = n, 0
    while missing > 0:
        paths = _draw(grids, counts, missing + missing // 8 + 64, rng)
        paths = paths[within(tables, limits, paths)][:missing]
        empty_rounds = 0 if len(paths) else empty_rounds + 1
        if empty_rounds == MAX_EMPTY_ROUNDS:
            raise _no_path(limits)
        accepted.append(paths)
        missing -= len(paths)
    return np.concatenate(accepted) if accepted else np.empty((0, len(grids[0].num_ops)), dtype=np.int64)


def within(tables: Mapping[str, CostTable], limits: Limits, paths: IntArray) -> NDArray[np.bool_]:
    """Which paths keep every limit. A path that cannot be priced (NaN) keeps none."""
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
    """One limited cost in bins: what each op costs above the cheapest of its layer, as a number of bins."""

    def __init__(self, cost: str, table: CostTable, low: float | None, high: float | None, bins: int):
        cheapest, dearest = table.whole_range
        least, most = (None if limit is None else table.whole_limit(limit) for limit in (low, high))
        if most is not None and most < cheapest:
            raise GreedyNASError(f"no path has {cost} of at most {high:,}: the cheapest has {table.range[0]:,}")
        if least is not None and least > dearest:
            raise GreedyNASError(f"no path has {cost} of at least {low:,}: the dearest has {table.range[1]:,}")
        self.num_ops = table.num_ops
        room = (dearest if most is None else int(min(most, dearest))) - cheapest
        self.bins = min(room, bins)  # finer than one is exact already

        def floor(amount: int) -> int:
            """Return the whole bins in an amount, in exact integers."""
            return amount * self.bins // room if room else amount

        self.steps: list[
            list[int | None]
        ] = []  # by layer and op; None: the op alone is beyond the limit, or has no price
        for layer in range(len(table.num_ops)):
            above = table.whole_cells(layer) - np.nanmin(table.whole_cells(layer))
            self.steps.append([floor(int(x)) if x <= room else None for x in above.tolist()])
        # Rounding down loses less than one bin a layer, so a path that reaches `low` has at least this many bins.
        self.fewest = 0 if least is None else max(0, floor(int(np.ceil(least)) - cheapest) - len(table.num_ops))


def _step(grids: list[_Grid], layer: int, op: int) -> tuple[int, ...] | None:
    """Bins that this op takes of each cost."""
    steps = [grid.steps[layer][op] for grid in grids]
    return None if None in steps else tuple(step for step in steps if step is not None)


def _count_suffixes(grids: list[_Grid]) -> list[NDArray[np.float64]]:
    """counts[layer][left, ...]: how many ways to choose the ops from `layer` on with `left` bins of each cost to spend."""
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
    """Walk the layers of n paths at once, choosing each op in proportion to the number of its completions."""
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
    told = ", ".join(
        f"{cost} from {low or 0:,} to {'any' if high is None else f'{high:,}'}" for cost, (low, high) in limits.items()
    )
    return GreedyNASError(f"no path keeps all limits at once: {told}; widen one of them")
