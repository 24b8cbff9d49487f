"""Paths in the order of a sum over layers, best first, without listing the space.

A dynamic program over the bins of the limited costs gives an upper bound on what the remaining layers can add. A
best-first search with that bound (A*) then completes paths in the order of their sums. Bins are rounded down, so that
the bound never excludes a path that fits; a completed path is compared with the limits by its exact costs.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAX_STEPS = 10_000  # completed or extended prefixes, after which no more paths are listed
SCALE = 2.0**30  # values as whole numbers of this share of the largest one: their sums are exact, and ties stay ties


class Grid(Protocol):
    """One limited cost in bins; `greedynas.spaces.feasible` builds it."""

    bins: int
    room: int  # the largest cost above that of the cheapest path
    least: int  # the lowest one
    fewest: int  # bins that a path which reaches `least` uses at least
    above: list[list[int | None]]  # by layer and op, in exact units above the cheapest op; None: does not fit
    steps: list[list[int | None]]  # the same in bins

    def floor(self, amount: int) -> int:
        """Return the number of whole bins in an amount."""
        ...


def ranked_paths(
    values: Sequence[Floats], grids: Sequence[Grid], steps: int = MAX_STEPS
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield (sum, path) in descending order of the sum of `values[layer][op]`, only paths within all limits."""
    layers, bounds = len(values), _bounds(values, grids)
    gains = [layer.tolist() for layer in values]
    full = tuple(grid.room for grid in grids)
    order = count()  # breaks ties without comparing paths
    queue: list[tuple[float, int, int, float, tuple[int, ...], tuple[int, ...]]] = [
        (-bounds[0].item(_bins(grids, full)), 0, next(order), 0.0, full, ())
    ]
    for _ in range(steps):
        if not queue or queue[0][0] == np.inf:
            return
        _, depth, _, value, left, path = heapq.heappop(queue)
        layer = -depth
        if layer == layers:
            if all(grid.room - rest >= grid.least for grid, rest in zip(grids, left, strict=True)):
                yield value, path
            continue
        for op, gain in enumerate(gains[layer]):
            rests = _spend(grids, layer, op, left)
            if rests is not None:
                bound = value + gain + bounds[layer + 1].item(_bins(grids, rests))
                if bound > -np.inf:  # deeper prefixes first among equal ones, so that ties do not fill the queue
                    heapq.heappush(queue, (-bound, depth - 1, next(order), value + gain, rests, (*path, op)))


def whole_values(values: Sequence[Floats]) -> list[Floats]:
    """Return values as whole numbers, in the same order of sums up to 2^-30 of the largest one."""
    largest = max(float(np.abs(layer).max()) for layer in values) or 1.0
    return [np.rint(layer / largest * SCALE) for layer in values]


def _bins(grids: Sequence[Grid], left: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([grid.floor(rest) for grid, rest in zip(grids, left, strict=True)])


def _spend(grids: Sequence[Grid], layer: int, op: int, left: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return what is left of each cost after an op, or None if it does not fit."""
    rests = []
    for grid, rest in zip(grids, left, strict=True):
        cost = grid.above[layer][op]
        if cost is None or cost > rest:
            return None
        rests.append(rest - cost)
    return tuple(rests)


def _bounds(values: Sequence[Floats], grids: Sequence[Grid]) -> list[Floats]:
    """Return bounds[layer][left, ...]: the most that the layers from `layer` on can add with `left` bins of each cost."""
    shape = tuple(grid.bins + 1 for grid in grids)
    last = np.zeros(shape)
    for axis, grid in enumerate(grids):
        enough = grid.bins - np.arange(grid.bins + 1) >= grid.fewest
        last = np.where(enough.reshape([-1 if axis == a else 1 for a in range(len(grids))]), last, -np.inf)
    bounds = [last]
    for layer in reversed(range(len(values))):
        here = np.full(shape, -np.inf)
        for op, gain in enumerate(values[layer].tolist()):
            steps = [grid.steps[layer][op] for grid in grids]
            used = [step for step in steps if step is not None]
            if len(used) == len(grids) and all(step < size for step, size in zip(used, shape, strict=True)):
                place = tuple(slice(step, None) for step in used)
                rest = bounds[0][tuple(slice(0, size - step) for step, size in zip(used, shape, strict=True))]
                here[place] = np.maximum(here[place], rest + gain)
        bounds.insert(0, here)
    return bounds
