"""Differentiable costs: the expected multiply-adds, parameters and latency of a distribution over ops, against a target.

Costs are sums over layers, so the expectation is the sum of every op's cost times its probability. What is above the
target is measured as log(expected / target), and costs below it count as zero: a network that is cheaper than it has to
be is no better. FBNet multiplies the loss by a power of the logarithm of the latency, ProxylessNAS adds a multiple of the
expected latency to it, and its reward for REINFORCE is divided by a power of the cost. Their formulas have no target, and
depend on the unit in which latency is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from greedynas.greedy.settings import TrainSettings
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.costs import CostTable
from greedynas.spaces.latency import load_latency_table
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space


@dataclass(frozen=True)
class Target:
    """Costs of a space and the limits that they are pulled to; without limits, nothing is pulled."""

    limits: tuple[tuple[CostTable, float], ...] = ()

    @classmethod
    def of(cls, space: Space, settings: TrainSettings) -> "Target":
        """Return the target of a training: `train.target`, or else the upper limits of `train.limits`."""
        budget = settings.target or settings.limits
        highest = (
            {} if budget is None else {cost: high for cost, (_, high) in budget.limits().items() if high is not None}
        )
        if highest and space.sizes:
            raise GreedyNASError(
                f"{space.name} chooses among image sizes, on which all costs depend: train.target cannot be used"
            )
        tables = dict(space.cost_tables)
        if "latency_ms" in highest and settings.latency_table is not None:
            tables["latency_ms"] = load_latency_table(Path(settings.latency_table)).cost_table(space)
        for cost, high in highest.items():
            _refuse(tables[cost], cost, high)
        return cls(tuple((tables[cost], high) for cost, high in highest.items()))

    def excess(self, shares: Sequence[Tensor]) -> Tensor:
        """Return log(expected cost / limit), summed over the limits that are exceeded; `shares[layer][op]` are probabilities."""
        total = shares[0].new_zeros(())
        for table, limit in self.limits:
            cells = [torch.as_tensor(layer, dtype=torch.float64) for layer in table.by_layer()]
            expected = float(table.fixed) + sum((share @ cell for share, cell in zip(shares, cells, strict=True)), 0.0)
            total = total + torch.log(torch.as_tensor(expected) / limit).clamp(min=0)
        return total

    def excess_of(self, path: OpPath) -> float:
        """Return the same for a path."""
        found = 0.0
        for table, limit in self.limits:
            found += max(0.0, float(np.log(table(np.array([path]))[0] / limit)))
        return found


def _refuse(table: CostTable, cost: str, high: float) -> None:
    if any(np.isnan(layer.astype(float)).any() for layer in table.by_layer()):
        raise GreedyNASError("train.latency_table lacks some ops of the space; measure it again with greedynas latency")
    if high < table.range[0]:
        raise GreedyNASError(
            f"train.target: no path has {cost} of at most {high:,}: the cheapest has {table.range[0]:,}"
        )
