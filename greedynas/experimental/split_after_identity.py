"""A supernet in which a layer has separate weights for paths with an identity in the previous layer. Not in the paper.

A block that follows an identity replaces the previous layer, which is a different task from continuing its output. With
the split, each op of a layer whose predecessor may be an identity exists twice. The record that justifies it is the
tuning of uniform and fair sampling on NAS-Bench-Macro (benchmarks/README.md), where it ranked better; for greedy
sampling it did not.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from greedynas.models.supernet import Supernet
from greedynas.runtime.errors import GreedyNASError
from greedynas.settings.experiments import Hooks
from greedynas.spaces.paths import OpPath


def split_after_identity(on: Any, hooks: Hooks) -> Hooks:
    """Return the hooks with a `SplitSupernet` if the setting is on."""
    if not isinstance(on, bool):
        raise GreedyNASError(f"experimental.split_after_identity must be true or false, got {on!r:.80}")
    return replace(hooks, supernet=SplitSupernet) if on else hooks


class SplitSupernet(Supernet):
    """A supernet with a second block for each op that may follow an identity."""

    def layer_blocks(self, layer: int) -> list[nn.Module]:
        copies = 2 if self._identities(layer) else 1
        return [block for _ in range(copies) for block in super(SplitSupernet, self).layer_blocks(layer)]

    def places(self, path: OpPath) -> OpPath:
        return tuple(self.place(i, op, path[i - 1]) for i, op in enumerate(path))

    def place(self, layer: int, op: int, before: int) -> int:
        return op + self.space.num_ops[layer] if before in self._identities(layer) else op

    def _identities(self, layer: int) -> set[int]:
        """Return the indices of the previous layer's ops that are identities."""
        layer %= len(self.space.layers)
        return {i for i, op in enumerate(self.space.layers[layer - 1].ops) if op == "ID"} if layer else set()
