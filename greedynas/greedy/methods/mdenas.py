"""MdeNAS: Zheng et al., Multinomial Distribution Learning for Effective Neural Architecture Search, ICCV 2019.

The ops of each layer have a multinomial distribution, from which paths are sampled and trained. Of every op, the number of
its updates H_e and the accuracy H_a of the last path with it are kept. An op that is more accurate after fewer updates than
another one of its layer gains probability, and one that is less accurate after more updates loses some (equation 6):

    p_i += rate · (#{j: H_e_i < H_e_j, H_a_i > H_a_j} - #{j: H_e_i > H_e_j, H_a_i < H_a_j})

The gains and losses of a layer cancel; what falls below zero is set to zero, and the layer is normalised. There are no
gradients, so a cost below a target is reached by the derivation alone. The paper trains a path for an epoch before its
accuracy is measured. Here k paths are trained for one update each, and measured before the next k are drawn.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from greedynas.greedy.methods.method import Method
from greedynas.greedy.samplers.learning import Learning
from greedynas.greedy.samplers.sampler import Draw
from greedynas.greedy.settings import TrainSettings
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class MdeNAS(Method):
    """Trains paths sampled from a distribution, which follows the ranks of accuracies and numbers of updates."""

    learning_rate, paper_updates = 0.01, 100
    filters, fills_pool, aims = True, False, False

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[OpPath] = []  # since the last draw
        self.updates: list[Integers] = []  # H_e, by layer and op
        self.accuracies: list[Floats] = []  # H_a

    def evaluates(self, settings: TrainSettings) -> int:
        return settings.k

    def initial(self, space: Space) -> list[Floats]:
        return [np.full(count, 1 / count) for count in space.num_ops]

    def probabilities(self) -> list[Floats]:
        return [layer.detach().numpy() for layer in self.alpha]

    def learn(self, draw: Draw, learning: Learning) -> None:
        measured = list(dict.fromkeys(self.trained))
        found = dict(zip(measured, draw.accuracies(measured), strict=True)) if measured else {}
        for path in self.trained:
            for layer, op in enumerate(path):
                self.accuracies[layer][op] = found[path]
        self.trained = []
        rate = self.rate(draw, learning)
        for layer, (updates, accuracies) in enumerate(zip(self.updates, self.accuracies, strict=True)):
            moved = moved_probabilities(self.probabilities()[layer], updates, accuracies, rate)
            self.alpha[layer] = nn.Parameter(self.alpha[layer].new_tensor(moved))

    def choose(self, draw: Draw, learning: Learning) -> list[list[Any]]:
        self.trained = [self.sampled(draw.rng) for _ in range(draw.settings.k if learning.warm else 1)]
        for path in self.trained:
            for layer, op in enumerate(path):
                self.updates[layer][op] += 1
        return [[path] for path in self.trained]

    def more_memory(self) -> dict[str, Any]:
        return {
            "trained": [list(path) for path in self.trained],
            "updates": [layer.tolist() for layer in self.updates],
            "accuracies": [layer.tolist() for layer in self.accuracies],
        }

    def recall(self, memory: dict[str, Any]) -> None:
        shape = [len(layer) for layer in self.alpha]
        self.updates = [np.array(layer) for layer in memory.get("updates", [[0] * count for count in shape])]
        self.accuracies = [np.array(layer) for layer in memory.get("accuracies", [[0.0] * count for count in shape])]
        self.trained = [tuple(path) for path in memory.get("trained", [])]
        if any([len(layer) for layer in found] != shape for found in (self.updates, self.accuracies)):
            raise GreedyNASError("the architecture parameters in the checkpoint do not fit this run")


def moved_probabilities(probabilities: Floats, updates: Integers, accuracies: Floats, rate: float) -> Floats:
    """Return the probabilities of a layer's ops after one update by the ranks of its ops."""
    fewer, better = updates[:, None] < updates, accuracies[:, None] > accuracies
    gains, losses = (fewer & better).sum(1), (fewer.T & better.T).sum(1)
    moved = np.maximum(probabilities + rate * (gains - losses), 0)
    result: Floats = moved / moved.sum()
    return result
