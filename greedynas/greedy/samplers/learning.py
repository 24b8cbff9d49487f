"""Validation batches and memory, with which a sampler can learn from draw to draw."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from greedynas.data.datasets import Data
from greedynas.greedy.settings import TrainSettings
from greedynas.models.batchnorm import bn_mode
from greedynas.models.losses import classification_loss
from greedynas.models.supernet import Supernet
from greedynas.runtime.devices import autocast, full_precision
from greedynas.runtime.parallel import ranks
from greedynas.runtime.parallel.reduction import share_of_batch_loss, sum_over_ranks
from greedynas.runtime.rng import stream


@dataclass
class Learning:
    """What a method needs besides paths: the supernet, validation batches, and a memory that checkpoints keep.

    Attributes:
        net: The supernet.
        data: The images of the run; architecture parameters are learned from the validation images.
        settings: The settings of the training.
        seed: The seed of all random draws.
        number: The number of this draw.
        memory: What the sampler remembers from draw to draw, as JSON. It is part of every checkpoint.
        warm: Whether warm-up is over, so that the sampler may learn.
        progress: How much of the training after warm-up is done, from 0 to 1.
        updates: The number of updates of the weights after warm-up.
        precision: The precision of training.
        optimization_images: The images that went through a training step besides those of the update.

    Example:
        >>> import greedynas
        >>> @greedynas.register_sampler("doctest-remembers")
        ... def remembers(draw):  # what it stores in the memory is part of every checkpoint
        ...     draw.learning.memory["draws"] = draw.learning.memory.get("draws", 0) + 1
        ...     return draw.uniform()
        >>> space = greedynas.load_space("tiny.yaml")
        >>> net, data = greedynas.Supernet(space), greedynas.open_data("photos/", space=space)
        >>> settings = greedynas.TrainSettings(sampler="doctest-remembers", max_epochs=1, batch_size=14)
        >>> greedynas.train_supernet(net, data, settings).memory
        {'draws': 3}
    """

    net: Supernet
    data: Data
    settings: TrainSettings
    seed: int
    number: int
    memory: dict[str, Any] = field(default_factory=dict)
    warm: bool = True
    progress: float = 0.0
    updates: int = 1
    precision: str = "fp32"
    optimization_images: int = 0

    def gradient(self, path: Any, wanted: Sequence[Tensor], paths: int = 1) -> tuple[Tensor, list[Tensor]]:
        """Return the loss on a new validation batch and its gradient with respect to some tensors.

        The weights of the supernet get no gradient, and its running statistics stay as they are. With several ranks, each
        works on its share of the batch, and all get the same result.

        Args:
            path: A path, or a mixture of paths whose shares the gradient goes through.
            wanted: The tensors.
            paths: How many paths this costs as much as.
        """
        images, labels = self._validation_batch()
        with bn_mode(self.net, "batch"):
            with autocast(images.device, self.precision):
                logits = self.net(images, path)
            loss = classification_loss(
                full_precision(logits), labels, self.data.class_weights, self.settings.label_smoothing
            )
            loss = share_of_batch_loss(loss, len(labels))
            gradients = torch.autograd.grad(loss, list(wanted), allow_unused=True)
        self.optimization_images += paths * self.batch_size
        found = [
            torch.zeros_like(one) if gradient is None else gradient
            for one, gradient in zip(wanted, gradients, strict=True)
        ]
        return sum_over_ranks(loss.detach()), _summed(found, loss)

    @property
    def batch_size(self) -> int:
        """The number of validation images in a batch."""
        return min(self.settings.batch_size, len(self.data.val))

    def trains(self, paths: int) -> None:
        """Count that the next update costs as much as training this number of paths, not one."""
        self.optimization_images += (paths - 1) * min(self.settings.batch_size, len(self.data.train))

    def _validation_batch(self) -> tuple[Tensor, Tensor]:
        """Return this rank's share of a random batch of validation images."""
        rng = stream(self.seed, "architecture images", self.number)
        chosen = rng.choice(len(self.data.val), self.batch_size, replace=False)
        return self.data.val.eval_batch(ranks.share_of_batch(np.asarray(chosen, dtype=np.int64)))


def _summed(gradients: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return the sums of small tensors over all ranks, which exchange tensors on the device of the supernet."""
    if ranks.size() == 1:
        return list(gradients)
    flat = sum_over_ranks(torch.cat([one.flatten() for one in gradients]).to(like.device)).to(gradients[0].device)
    parts = flat.split([one.numel() for one in gradients])
    return [part.view(one.shape) for part, one in zip(parts, gradients, strict=True)]


def probabilities_in(memory: dict[str, Any], num_ops: Sequence[int]) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the probabilities of the ops of each layer that a method has learned; none for other samplers.

    Raises a ValueError if they do not fit the space: a checkpoint may be untrusted.
    """
    if "probabilities" not in memory:
        return []
    found = [np.asarray(layer, dtype=np.float64) for layer in memory["probabilities"]]
    if [layer.shape for layer in found] != [(count,) for count in num_ops]:
        raise ValueError("the architecture parameters have other layers than the space")
    if not all(np.isfinite(layer).all() and (layer >= 0).all() and layer.sum() > 0 for layer in found):
        raise ValueError("the architecture parameters are not probabilities")
    return found
