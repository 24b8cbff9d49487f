"""Costs of paths: a table indexed by (layer, op), summed over the layers.

The same table prices multiply-adds, parameters (integers) and latency (milliseconds, NaN where an entry is missing).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
CHUNK = 8192  # rows priced at once: a chunk of paths and its gathered costs stay in the cache


@dataclass(frozen=True, eq=False)
class CostTable:
    """The cost of every op of every layer, and of what all paths share (stem, head, classifier)."""

    entries: NDArray  # (layers, most ops a layer has); cells of ops that a layer lacks are never read
    fixed: int | float
    num_ops: tuple[int, ...]  # ops of each layer

    def __call__(self, paths: IntArray) -> NDArray:
        """Costs of an array of paths (n, layers) -> (n,), in the table's own type."""
        columns = self.entries.shape[1]
        offsets = np.arange(len(self.entries)) * columns
        flat = self.entries.ravel()
        total = np.empty(len(paths), dtype=self.entries.dtype)
        for start in range(0, len(paths), CHUNK):
            chunk = paths[start : start + CHUNK]
            total[start : start + CHUNK] = flat.take(chunk + offsets).sum(axis=1)
        return total + self.fixed

    def cells(self, layer: int) -> NDArray:
        """Costs of the ops that this layer really has."""
        return self.entries[layer, : self.num_ops[layer]]

    @property
    def range(self) -> tuple[float, float]:
        """The cheapest and the dearest path."""
        layers = range(len(self.entries))
        low = self.fixed + sum(np.nanmin(self.cells(layer)).item() for layer in layers)
        high = self.fixed + sum(np.nanmax(self.cells(layer)).item() for layer in layers)
        return low, high

    @property
    def mean(self) -> float:
        """Of all paths."""
        return float(self.fixed + sum(np.nanmean(self.cells(layer)) for layer in range(len(self.entries))))


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
