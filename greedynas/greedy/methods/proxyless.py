"""ProxylessNAS: Cai, Zhu and Han, Direct Neural Architecture Search on Target Task and Hardware, ICLR 2019.

The weights are trained one path at a time, sampled from p = softmax(α) (binary gates: one op of a layer is on). For a step
on α, two ops of each layer are sampled. One of them is on and both are run, which needs the memory of two paths, however
many ops there are. With q, the softmax over the α of the two, and the gradient with respect to their gates g,

    ∂L/∂α_i = Σ_j ∂L/∂g_j · q_j (δ_ij - q_i)        (equation 4 for two ops)

and after the step both α are shifted, so that the probabilities of the other ops stay as they were. The expected cost is
added to the loss (equation 7). `ProxylessReinforce` is the paper's variant for objectives without a gradient: α follows
(R - baseline) ∇log p of the sampled paths, where the reward R is the accuracy divided by a power of the cost.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from greedynas.greedy.methods.method import Method, chained, refuse_image_sizes
from greedynas.greedy.samplers.learning import Learning
from greedynas.greedy.samplers.sampler import Draw
from greedynas.models.supernet import Mixture
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space

Pair = tuple[int, ...]  # the op that is on, and the other one, if the layer has several


class Proxyless(Method):
    """Trains sampled paths, and learns α from two ops of each layer at a time."""

    learning_rate, paper_updates, betas = 0.006, 19_500, (0.0, 0.999)
    mixes = True

    def check(self, space: Space) -> None:
        refuse_image_sizes(space)

    def learning_paths(self, space: Space) -> int:
        return 2

    def learn(self, draw: Draw, learning: Learning) -> None:
        pairs = self.two_ops(draw.rng)
        gates = [torch.eye(len(pair), dtype=torch.float64)[0].requires_grad_() for pair in pairs]
        shares = [dict(zip(pair, gate.unbind(), strict=True)) for pair, gate in zip(pairs, gates, strict=True)]
        path = tuple(pair[0] for pair in pairs)
        loss, by_gate = learning.gradient(Mixture(path, shares), gates, paths=2)
        inner = [gate_gradient(*layer) for layer in zip(self.alpha, pairs, by_gate, strict=True)]
        loss = loss.double().cpu().requires_grad_()
        objective = loss + self.weight_of_cost(draw) * self.target.excess([layer.softmax(0) for layer in self.alpha])
        before = [layer.detach().clone() for layer in self.alpha]
        self.descend(chained(objective, loss, inner, self.alpha, self.alpha))
        for layer, old, pair in zip(self.alpha, before, pairs, strict=True):
            keep_their_share(layer, old, pair)

    def choose(self, draw: Draw, learning: Learning) -> list[list[Any]]:
        return [[self.sampled(draw.rng)]]

    def two_ops(self, rng: np.random.Generator) -> list[Pair]:
        """Return two ops of each layer, sampled by their probabilities; the first of them is on."""
        pairs = []
        for layer in self.probabilities():
            both = rng.choice(len(layer), min(2, len(layer)), replace=False, p=layer / layer.sum())
            chances = layer[both] / layer[both].sum()
            on = int(rng.choice(len(both), p=chances))
            pairs.append((int(both[on]), *(int(op) for op in np.delete(both, on))))
        return pairs


class ProxylessReinforce(Method):
    """Trains sampled paths, and learns α by REINFORCE from the accuracies of m sampled paths for every k updates."""

    learning_rate, paper_updates, betas = 0.006, 19_500, (0.0, 0.999)
    cost_weight = 0.07
    filters, fills_pool = True, False  # it evaluates m paths for k updates, as the greedy sampler does

    def __init__(self) -> None:
        super().__init__()
        self.baseline: float | None = None

    def learn(self, draw: Draw, learning: Learning) -> None:
        paths = [self.sampled(draw.rng) for _ in range(draw.settings.m)]
        distinct = list(dict.fromkeys(paths))
        accuracies = dict(zip(distinct, draw.accuracies(distinct), strict=True))
        weight = self.weight_of_cost(draw)
        rewards = np.array([accuracies[path] * np.exp(-weight * self.target.excess_of(path)) for path in paths])
        mean = float(rewards.mean())
        baseline = mean if self.baseline is None else self.baseline
        self.descend(reinforce_gradient(self.alpha, paths, rewards - baseline))
        self.baseline = 0.9 * baseline + 0.1 * mean

    def choose(self, draw: Draw, learning: Learning) -> list[list[Any]]:
        return [[self.sampled(draw.rng)] for _ in range(draw.settings.k if learning.warm else 1)]

    def more_memory(self) -> dict[str, Any]:
        return {"baseline": self.baseline}

    def recall(self, memory: dict[str, Any]) -> None:
        self.baseline = memory.get("baseline")


def gate_gradient(alpha: Tensor, pair: Pair, by_gate: Tensor) -> Tensor:
    """Return the gradient with respect to α of a layer from that with respect to the gates of its sampled ops."""
    chosen = list(pair)
    q = alpha.detach()[chosen].softmax(0)
    gradient = torch.zeros_like(alpha)
    gradient[chosen] = q * (by_gate - (q * by_gate).sum())
    return gradient


@torch.no_grad()
def keep_their_share(alpha: Tensor, before: Tensor, pair: Pair) -> None:
    """Shift the α of the sampled ops so that together they are as probable as before the step."""
    chosen = list(pair)
    alpha[chosen] -= alpha[chosen].logsumexp(0) - before[chosen].logsumexp(0)


def reinforce_gradient(alpha: list[Any], paths: list[OpPath], advantages: np.ndarray[Any, Any]) -> list[Tensor]:
    """Return the gradient of minus the expected reward: -mean of (R - baseline) ∇log p(path)."""
    gradients = []
    for i, layer in enumerate(alpha):
        chosen = torch.eye(len(layer), dtype=torch.float64)[[path[i] for path in paths]]
        rises = chosen - layer.detach().softmax(0)
        gradients.append(-(torch.from_numpy(advantages)[:, None] * rises).mean(0))
    return gradients
