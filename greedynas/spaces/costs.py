"""Costs of paths: a table indexed by (layer, op), summed over the layers.

The same table prices multiply-adds, parameters (integers) and latency (milliseconds, NaN where an entry is missing).
Sums are exact: latencies are added as whole numbers of picoseconds. As floats, twelve times 0.1 ms would be more or
less than 1.2 ms, depending on the order, and a path exactly at a limit would be lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
DECIMALS = 9  # of a latency in milliseconds: picoseconds, far below the resolution of any clock
CHUNK = 8192  # paths priced at once: a chunk and its gathered costs stay in the cache


@dataclass(frozen=True, eq=False)
class CostTable:
    """The cost of every op of every layer, and of the parts that all paths share (stem, head, classifier)."""

    entries: NDArray  # (layers, largest number of ops of a layer); cells of ops that a layer lacks are never read
    fixed: int | float
    num_ops: tuple[int, ...]  # number of ops of each layer

    def __call__(self, paths: IntArray) -> NDArray:
        """Return the costs of an array of paths (n, layers) -> (n,), in the table's own type."""
        whole = self.whole(paths)
        return whole if self._scale == 1 else whole / self._scale

    def whole(self, paths: IntArray) -> NDArray:
        """Return the same costs as whole numbers, of picoseconds for milliseconds. Limits are compared with these.

        Latencies are floats here, too, because of NaN; floats hold whole numbers below 2^53 (2.5 hours) exactly.
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
        """Return the costs of the ops that this layer has, in the unit of `whole`."""
        return self._whole_entries[layer, : self.num_ops[layer]]

    @property
    def whole_range(self) -> tuple[int, int]:
        """The costs of the cheapest and the most expensive path in the unit of `whole`."""
        layers = [self.whole_cells(layer) for layer in range(len(self.entries))]
        ends = (sum(int(end(cells)) for cells in layers) for end in (np.nanmin, np.nanmax))
        low, high = (int(self._whole_fixed) + end for end in ends)
        return low, high

    @property
    def _scale(self) -> int:
        """The factor from the table's unit to the unit of `whole`."""
        return 1 if np.issubdtype(self.entries.dtype, np.integer) else 10**DECIMALS

    @cached_property
    def _whole_entries(self) -> NDArray:
        return self.entries if self._scale == 1 else np.rint(self.entries * self._scale)

    @cached_property
    def _whole_fixed(self) -> float:
        return self.fixed if self._scale == 1 else float(np.rint(self.fixed * self._scale))

    def cells(self, layer: int) -> NDArray:
        """Return the costs of the ops that this layer has."""
        return self.entries[layer, : self.num_ops[layer]]

    def by_layer(self) -> list[NDArray]:
        """Return the costs of the ops of each layer."""
        return [self.cells(layer) for layer in range(len(self.entries))]

    @property
    def range(self) -> tuple[float, float]:
        """The costs of the cheapest and the most expensive path."""
        low, high = self.whole_range
        return (low, high) if self._scale == 1 else (low / self._scale, high / self._scale)

    @property
    def mean(self) -> float:
        """The mean cost over all paths."""
        return float(self.fixed + sum(np.nanmean(self.cells(layer)) for layer in range(len(self.entries))))


@dataclass(frozen=True, eq=False)
class PeakTable(CostTable):
    """A cost that is the largest one of a path's layers instead of their sum, such as the peak of memory."""

    def whole(self, paths: IntArray) -> NDArray:
        """Return the peaks of an array of paths (n, layers) -> (n,)."""
        layers = np.arange(paths.shape[1])
        peaks = np.full(len(paths), self.fixed, dtype=self.entries.dtype)
        for start in range(0, len(paths), CHUNK):
            cells = self.entries[layers, paths[start : start + CHUNK]]
            np.maximum(peaks[start : start + CHUNK], cells.max(axis=1), out=peaks[start : start + CHUNK])
        return peaks

    @property
    def whole_range(self) -> tuple[int, int]:
        layers = [self.cells(layer) for layer in range(len(self.entries))]
        low, high = (max(int(self.fixed), *(int(end(cells)) for cells in layers)) for end in (np.min, np.max))
        return low, high

    @property
    def mean(self) -> float:
        return float(max(self.fixed, *(np.mean(self.cells(layer)) for layer in range(len(self.entries)))))

    def allowed(self, layer: int, limit: float | None) -> NDArray[np.bool_]:
        """Return which ops of a layer stay within an upper limit."""
        return self.cells(layer) <= (np.inf if limit is None else limit)


@dataclass(frozen=True, eq=False)
class SizedCostTable(CostTable):
    """The costs of a space that chooses among image sizes, on which the costs of all other layers depend.

    `entries` and `fixed` are those of the largest size.
    """

    at_size: tuple[CostTable, ...] = ()  # of the layers after the first one, for each of its choices

    @classmethod
    def of(cls, tables: Sequence[CostTable]) -> "SizedCostTable":
        """Return the table of a space from the tables at each of its image sizes, the largest one last."""
        last = tables[-1]
        columns = max(len(tables), last.entries.shape[1])
        entries = np.zeros((len(last.entries) + 1, columns), dtype=last.entries.dtype)
        entries[1:, : last.entries.shape[1]] = last.entries
        return cls(entries, last.fixed, (len(tables), *last.num_ops), tuple(tables))

    def by_layer(self) -> list[NDArray]:
        """Return the costs of the ops of each layer at the largest image size; of a size what everything else costs there."""
        return [np.array([table.mean for table in self.at_size]), *super().by_layer()[1:]]

    def whole(self, paths: IntArray) -> NDArray:
        total = np.empty(len(paths), dtype=self.entries.dtype)
        for size, table in enumerate(self.at_size):
            rows = paths[:, 0] == size
            total[rows] = table.whole(paths[rows, 1:])
        return total

    @property
    def whole_range(self) -> tuple[int, int]:
        ends = [table.whole_range for table in self.at_size]
        return min(low for low, _ in ends), max(high for _, high in ends)

    @property
    def mean(self) -> float:
        return float(np.mean([table.mean for table in self.at_size]))


class PricesPaths(Protocol):
    """An object that can price the paths of a space, such as a latency table."""

    def cost_table(self, space: Any) -> CostTable:
        """Return the costs of every op of every layer of a space."""
        ...


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of n paths, each an array (n,)."""

    macs: IntArray
    params: IntArray


def tree_cost(table: CostTable, stem: int, paths: IntArray) -> int:
    """Return the cost of paths that are evaluated together, where each shared prefix is computed once."""
    total = stem + len(paths) * (table.fixed - stem)
    for layer in range(paths.shape[1]):
        total += table.entries[layer, np.unique(paths[:, : layer + 1], axis=0)[:, -1]].sum()
    return int(total)
