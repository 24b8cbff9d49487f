"""FBNet: Wu et al., Hardware-Aware Efficient ConvNet Design via Differentiable Neural Architecture Search, CVPR 2019.

The shares of the ops of a layer are a sample of the Gumbel-softmax distribution: softmax((θ + g) / τ) with Gumbel noise g
that is new at every step, and a temperature τ that falls from 5 as in the paper, by exp(-0.045) in each of its 90 epochs. The loss is multiplied by a power of the expected cost: CE · (1 + log(cost / target))^β above the target.
The paper has CE · α log(LAT)^β, in which the unit of latency decides how much it matters.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from greedynas.greedy.methods.method import MixingMethod, chained
from greedynas.greedy.samplers.learning import Learning
from greedynas.greedy.samplers.sampler import Draw

FIRST_TEMPERATURE, COOLING = 5.0, 0.045 * 90


class FBNet(MixingMethod):
    """Trains the mixture of all ops of every layer, with shares from Gumbel-softmax(θ)."""

    learning_rate, paper_updates, betas, weight_decay = 0.01, 9_000, (0.9, 0.999), 5e-4
    cost_weight = 0.6  # β

    def learn(self, draw: Draw, learning: Learning) -> None:
        shares = self.noisy_shares(draw, learning)
        loss, inner = learning.gradient(self.mixed(shares), shares, paths=self.paths_per_update(draw.space))
        loss = loss.double().cpu().requires_grad_()
        objective = loss * (1 + self.target.excess(shares)) ** self.weight_of_cost(draw)
        self.descend(chained(objective, loss, inner, shares, self.alpha))

    def choose(self, draw: Draw, learning: Learning) -> list[list[Any]]:
        learning.trains(self.paths_per_update(draw.space))
        return [[self.mixed([share.detach() for share in self.noisy_shares(draw, learning)])]]

    def noisy_shares(self, draw: Draw, learning: Learning) -> list[Tensor]:
        """Return shares with new noise."""
        heat = temperature(learning.progress)
        return [((layer + torch.from_numpy(gumbel(draw.rng, len(layer)))) / heat).softmax(0) for layer in self.alpha]


def temperature(progress: float) -> float:
    """Return τ at this share of the training."""
    return FIRST_TEMPERATURE * math.exp(-COOLING * progress)


def gumbel(rng: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return standard Gumbel noise."""
    return rng.gumbel(size=count)
