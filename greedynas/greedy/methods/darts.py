"""DARTS: Liu, Simonyan and Yang, Differentiable Architecture Search, ICLR 2019.

Every layer is the mean of all of its ops, weighted by softmax(α). Steps on α with validation images and steps on the
weights with training images take turns: the bi-level problem in first order, where the weights are held fixed for the
step on α. The expected cost can be added to the loss; the paper has no cost.
"""

from typing import Any

from greedynas.greedy.methods.method import MixingMethod, chained
from greedynas.greedy.samplers.learning import Learning
from greedynas.greedy.samplers.sampler import Draw


class Darts(MixingMethod):
    """Trains the mixture of all ops of every layer, with shares softmax(α)."""

    learning_rate, paper_updates, betas, weight_decay = 3e-4, 19_500, (0.5, 0.999), 1e-3  # 50 epochs of 390 batches

    def learn(self, draw: Draw, learning: Learning) -> None:
        shares = [layer.softmax(0) for layer in self.alpha]
        loss, inner = learning.gradient(self.mixed(shares), shares, paths=self.paths_per_update(draw.space))
        loss = loss.double().cpu().requires_grad_()
        objective = loss + self.weight_of_cost(draw) * self.target.excess(shares)
        self.descend(chained(objective, loss, inner, shares, self.alpha))

    def choose(self, draw: Draw, learning: Learning) -> list[list[Any]]:
        learning.trains(self.paths_per_update(draw.space))
        return [[self.mixed([layer.detach().softmax(0) for layer in self.alpha])]]
