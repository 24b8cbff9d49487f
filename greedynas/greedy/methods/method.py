"""The interface of methods with architecture parameters, and their optimizer and memory.

A method is a sampler: at every draw it first takes a step on its architecture parameters, with validation images, and
then decides what the next updates of the weights train, with training images. What it has learned is kept in the memory
of the training, which is part of every checkpoint.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from greedynas.greedy.methods.costs import Target
from greedynas.greedy.samplers.learning import Learning
from greedynas.greedy.samplers.sampler import Draw, Drawn, Sampler
from greedynas.greedy.settings import TrainSettings
from greedynas.models.supernet import Mixture
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space

HIGHEST_RATE = 0.1  # of architecture parameters, however short the training


class Method(Sampler):
    """The base class of methods with architecture parameters α, one vector for each layer.

    A subclass says how many parameters a layer has, what probabilities they stand for, how they are learned, and what the
    next update of the weights trains. Learning rates are those of the papers for as many updates as the papers have; for a
    shorter training they rise, so that α can move as far.

    Example:
        >>> import greedynas
        >>> class Untouched(greedynas.Method):
        ...     def learn(self, draw, learning):
        ...         pass
        ...     def choose(self, draw, learning):
        ...         return [[self.sampled(draw.rng)]]
        >>> _ = greedynas.register_sampler("doctest-untouched", Untouched)
        >>> space = greedynas.load_space("tiny.yaml")
        >>> net, data = greedynas.Supernet(space), greedynas.open_data("photos/", space=space)
        >>> settings = greedynas.TrainSettings(sampler="doctest-untouched", max_epochs=1, batch_size=14)
        >>> state = greedynas.train_supernet(net, data, settings)
        >>> [len(layer) for layer in state.memory["probabilities"]] == list(space.num_ops)
        True
    """

    learning_rate: ClassVar[float] = 1e-3  # of the paper
    paper_updates: ClassVar[int] = 10_000  # of α
    betas: ClassVar[tuple[float, float]] = (0.5, 0.999)  # of Adam
    weight_decay: ClassVar[float] = 0.0
    cost_weight: ClassVar[float] = 1.0
    aims: ClassVar[bool] = True  # whether the expected cost is part of what it learns
    mixes: ClassVar[bool] = False  # whether it runs several ops of a layer together

    def __init__(self) -> None:
        self.alpha: list[nn.Parameter] = []
        self.target = Target()
        self.optimizer: torch.optim.Adam | None = None

    @abstractmethod
    def learn(self, draw: Draw, learning: Learning) -> None:
        """Take a step on the architecture parameters; not called during warm-up."""

    @abstractmethod
    def choose(self, draw: Draw, learning: Learning) -> list[list[Any]]:
        """Return what the next updates train: for each update a list of paths or mixtures."""

    def initial(self, space: Space) -> list[NDArray[np.float64]]:
        """Return the architecture parameters from which a training starts: zeros, all ops equally likely."""
        return [np.zeros(count) for count in space.num_ops]

    def probabilities(self) -> list[NDArray[np.float64]]:
        """Return the probability of every op of every layer."""
        return [layer.detach().softmax(0).numpy() for layer in self.alpha]

    def check_settings(self, space: Space, settings: TrainSettings) -> None:
        if self.aims:
            Target.of(space, settings)
        elif settings.target is not None:
            raise GreedyNASError(
                f"{settings.sampler} learns from accuracies alone: leave train.target out; limits are kept by the derivation"
            )

    def draw(self, draw: Draw) -> Drawn:
        learning = draw.learning
        if learning is None:
            raise GreedyNASError(
                f"the method {draw.settings.sampler!r} learns while it trains a supernet, and cannot draw alone"
            )
        if not self.alpha:
            self._begin(draw, learning)
        if learning.warm:
            self.learn(draw, learning)
        updates = self.choose(draw, learning)
        learning.memory.update(self._remembered(draw))
        return Drawn(updates)

    # For subclasses

    def descend(self, gradients: Sequence[Tensor]) -> None:
        """Take a step of Adam on the architecture parameters."""
        assert self.optimizer is not None
        for layer, gradient in zip(self.alpha, gradients, strict=True):
            layer.grad = gradient.detach().to(layer.dtype)
        self.optimizer.step()

    def rate(self, draw: Draw, learning: Learning) -> float:
        """Return the learning rate of the architecture parameters."""
        scaled = min(HIGHEST_RATE, self.learning_rate * self.paper_updates / max(learning.updates, 1))
        return draw.settings.arch_lr or scaled

    def weight_of_cost(self, draw: Draw) -> float:
        """Return the weight of the cost in the objective."""
        own = draw.settings.cost_weight
        return self.cost_weight if own is None else own

    def most_probable(self) -> OpPath:
        """Return the most probable path, whatever it costs; of equally probable ops the first."""
        return tuple(int(layer.argmax()) for layer in self.probabilities())

    def sampled(self, rng: np.random.Generator) -> OpPath:
        """Return a random path in which every op has its probability."""
        return tuple(int(rng.choice(len(layer), p=layer / layer.sum())) for layer in self.probabilities())

    def mixed(self, shares: Sequence[Tensor]) -> Mixture:
        """Return the mixture of all ops with these shares (layer, op)."""
        return Mixture(self.most_probable(), [dict(enumerate(layer.unbind())) for layer in shares])

    # Memory

    def _begin(self, draw: Draw, learning: Learning) -> None:
        """Prepare the architecture parameters and their optimizer, from the memory if there is one."""
        memory, first = learning.memory, self.initial(draw.space)
        self.target = Target.of(draw.space, draw.settings) if self.aims else Target()
        known = _tensors(memory["alpha"], first) if "alpha" in memory else [torch.from_numpy(layer) for layer in first]
        self.alpha = [nn.Parameter(layer) for layer in known]
        rate = self.rate(draw, learning)
        self.optimizer = torch.optim.Adam(self.alpha, rate, betas=self.betas, weight_decay=self.weight_decay)
        if "adam" in memory:
            steps, *moments = memory["adam"]
            means, squares = (_tensors(moment, first) for moment in moments)
            for layer, mean, square in zip(self.alpha, means, squares, strict=True):
                self.optimizer.state[layer] = {
                    "step": torch.tensor(float(steps)),
                    "exp_avg": mean,
                    "exp_avg_sq": square,
                }
        self.recall(memory)

    def _remembered(self, draw: Draw) -> dict[str, Any]:
        memory: dict[str, Any] = {
            "alpha": [layer.tolist() for layer in self.alpha],
            "probabilities": [layer.tolist() for layer in self.probabilities()],
            **self.more_memory(),
        }
        if not all(math.isfinite(value) for layer in memory["alpha"] for value in layer):
            raise GreedyNASError(
                f"the architecture parameters of {draw.settings.sampler} are no longer finite at step {draw.step}; "
                "the last good checkpoint is kept; lower train.arch_lr or train.lr, in another --out"
            )
        states = [] if self.optimizer is None else [self.optimizer.state.get(layer) for layer in self.alpha]
        known = [state for state in states if state]
        if known and len(known) == len(self.alpha):
            means, squares = ([state[name].tolist() for state in known] for name in ("exp_avg", "exp_avg_sq"))
            memory["adam"] = [float(known[0]["step"]), means, squares]
        return memory

    def more_memory(self) -> dict[str, Any]:
        """Return what else is to be remembered, as JSON."""
        return {}

    def recall(self, memory: dict[str, Any]) -> None:
        """Restore what `more_memory` returned; the memory is empty at the start of a training."""


class MixingMethod(Method):
    """The base class of methods that run all ops of a layer together, and learn their shares by gradients."""

    mixes = True

    def check(self, space: Space) -> None:
        refuse_image_sizes(space)

    def paths_per_update(self, space: Space) -> int:
        return max(space.num_ops)

    def learning_paths(self, space: Space) -> int:
        return max(space.num_ops)


def refuse_image_sizes(space: Space) -> None:
    """Refuse a space whose first layer chooses the size of the images, which cannot be mixed."""
    if space.sizes:
        raise GreedyNASError(
            f"{space.name} chooses among image sizes, which cannot be mixed: use proxyless-reinforce, mdenas or greedy"
        )


def chained(
    objective: Tensor, loss: Tensor, inner: Sequence[Tensor], through: Sequence[Tensor], alpha: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradient with respect to α of an objective that depends on the loss and, by the cost, on α itself.

    `inner` is the gradient of the loss with respect to the tensors `through`, which depend on α. The loss is the sum over
    all ranks, which autograd knows nothing about, so that both parts are chained here.
    """
    (by_loss,) = torch.autograd.grad(objective, loss, retain_graph=True)
    outputs = [(objective, torch.ones_like(objective))]
    outputs += [(one, by_loss * part.to(one.dtype)) for one, part in zip(through, inner, strict=True)]
    found = torch.autograd.grad(
        [one for one, _ in outputs], list(alpha), [part for _, part in outputs], allow_unused=True
    )
    return [torch.zeros_like(layer) if one is None else one for layer, one in zip(alpha, found, strict=True)]


def _tensors(saved: Any, like: Sequence[NDArray[np.float64]]) -> list[Tensor]:
    """Return parameters from the memory of a checkpoint, which may be untrusted."""
    try:
        found = [torch.tensor(layer, dtype=torch.float64) for layer in saved]
    except (TypeError, ValueError, RuntimeError):
        found = []
    if [tuple(layer.shape) for layer in found] != [layer.shape for layer in like]:
        raise GreedyNASError("the architecture parameters in the checkpoint do not fit this run")
    return found
