"""Costs of paths: a table indexed by (layer, op), summed over the layers.

The same table prices multiply-adds, parameters (integers) and latency (milliseconds, NaN where an entry is missing).
Sums are exact: integers are added as they are, latencies as whole numbers of picoseconds. Added up as they are, twelve
times 0.1 ms would be more or less than 1.2 ms, depending on the order, and a path exactly at a limit would be lost.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
DECIMALS = 9  # of a latency in milliseconds: picoseconds, far below what any clock can tell
CHUNK = 8192  # rows priced at once: a chunk of paths and its gathered costs stay in the cache


@dataclass(frozen=True, eq=False)
class CostTable:
    """The cost of every op of every layer, and of what all paths share (stem, head, classifier)."""

    entries: NDArray  # (layers, most ops a layer has); cells of ops that a layer lacks are never read
    fixed: int | float
    num_ops: tuple[int, ...]  # ops of each layer

    def __call__(self, paths: IntArray) -> NDArray:
        """Return the costs of an array of paths (n, layers) -> (n,), in the table's own type."""
        whole = self.whole(paths)
        return whole if self._scale == 1 else whole / self._scale

    def whole(self, paths: IntArray) -> NDArray:
        """Return the same costs as whole numbers, of picoseconds where the table is in milliseconds: what limits are about.

        Latencies are floats here too, because of the NaN; whole numbers below 2^53 (2.5 hours) are exact in them.
        """
        columns = self.entries.shape[1]
        offsets = np.arange(len(self.entries)) * columns
        flat = self._whole_entries.ravel()
        total = np.empty(len(paths), dtype=self.entries.dtype)
        for start in range(0, len(paths), CHUNK):
            chunk = paths[start : start + CHUNK]
            total[start : start + CHUNK] = flat.take(chunk + offsets).sum(axis=1)
        return total + self._whole_fixed

    def whole_limit(self, limit: float) -> float:
        """Return a limit in the unit of `whole`."""
        return limit if self._scale == 1 else float(np.rint(limit * self._scale))

    def whole_cells(self, layer: int) -> NDArray:
        """Return the costs of the ops that this layer really has in the unit of `whole`."""
        return self._whole_entries[layer, : self.num_ops[layer]]

    @property
    def whole_range(self) -> tuple[int, int]:
        """The cheapest and the most expensive path in the unit of `whole`."""
        layers = [self.whole_cells(layer) for layer in range(len(self.entries))]
        ends = (sum(int(end(cells)) for cells in layers) for end in (np.nanmin, np.nanmax))
        low, high = (int(self._whole_fixed) + end for end in ends)
        return low, high

    @property
    def _scale(self) -> int:
        """How many of the unit of `whole` the table's own unit has."""
        return 1 if np.issubdtype(self.entries.dtype, np.integer) else 10**DECIMALS

    @cached_property
    def _whole_entries(self) -> NDArray:
        return self.entries if self._scale == 1 else np.rint(self.entries * self._scale)

    @cached_property
    def _whole_fixed(self) -> float:
        return self.fixed if self._scale == 1 else float(np.rint(self.fixed * self._scale))

    def cells(self, layer: int) -> NDArray:
        """Costs of the ops that this layer really has."""
        return self.entries[layer, : self.num_ops[layer]]

    @property
    def range(self) -> tuple[float, float]:
        """The cheapest and the most expensive path."""
        low, high = self.whole_range
        return (low, high) if self._scale == 1 else (low / self._scale, high / self._scale)

    @property
    def mean(self) -> float:
        """Of all paths."""
        return float(self.fixed + sum(np.nanmean(self.cells(layer)) for layer in range(len(self.entries))))


class PricesPaths(Protocol):
    """Something that can price the paths of a space, such as a latency table."""

    def cost_table(self, space: Any) -> CostTable:
        """Return the costs of every op of every layer of a space."""
        ...


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of n paths, each an array (n,)."""

    macs: IntArray
    params: IntArray


def tree_cost(table: CostTable, stem: int, paths: IntArray) -> int:
    """The cost of paths that are evaluated together: each shared prefix once, and for each path what comes after."""
    total = stem + len(paths) * (table.fixed - stem)
    for layer in range(paths.shape[1]):
        total += table.entries[layer, np.unique(paths[:, : layer + 1], axis=0)[:, -1]].sum()
    return int(total)
