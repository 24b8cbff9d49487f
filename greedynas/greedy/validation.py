"""Paths on the validation images of a run: their losses for a filtering, their accuracies for a search."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greedynas.data.class_weights import balanced_weights, image_weights
from greedynas.data.datasets import Data
from greedynas.greedy.evaluation import Evaluation, evaluate_batches, evaluate_paths, interleaved
from greedynas.greedy.recorder import diverged
from greedynas.greedy.searchers.task import Accuracies
from greedynas.greedy.settings import SearchSettings, TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.models.batchnorm import calibrates
from greedynas.models.supernet import Supernet
from greedynas.runtime.parallel import ranks
from greedynas.runtime.registry import Registry
from greedynas.runtime.rng import stream
from greedynas.spaces.paths import OpPath

# What a search takes for the accuracy of a path: made of (net, data, settings, seed, precision), called with paths.
EVALUATORS: "Registry[Callable[..., Accuracies]]" = Registry(
    "evaluator", {"supernet": "greedynas.greedy.validation:SupernetAccuracies"}
)


def calibration_images(data: Data, count: int, rng: np.random.Generator) -> Tensor:
    """Return training images without augmentation, for the statistics of recalibrated BatchNorm."""
    images, _ = data.train.eval_batch(rng.choice(len(data.train), min(count, len(data.train)), replace=False))
    return images


class FilterLosses:
    """The losses of paths on one batch of validation images: class-balanced, and new for every filtering (Algorithm 1).

    Images are drawn when they are first needed, from the stream of this draw.
    """

    def __init__(
        self, net: Supernet, data: Data, settings: TrainSettings, seed: int, state: TrainState, precision: str
    ):
        self.net, self.data, self.settings, self.precision = net, data, settings, precision
        self.seed, self.draw, self.step = seed, state.draws, state.step
        self.images = 0  # evaluated so far: distinct paths times images

    def __call__(self, paths: Sequence[OpPath]) -> list[float]:
        """Return the loss of each path. One that is not a number is infinite: such a path is the worst of all."""
        settings, calibration = self.settings, None
        chosen = self.data.val.balanced(settings.filter_images, stream(self.seed, "filter images", self.draw))
        images, labels = self.data.val.eval_batch(chosen)
        if calibrates(settings.bn):
            rng = stream(self.seed, "calibration images", self.draw)
            calibration = calibration_images(self.data, settings.calibration_images, rng)
        result = evaluate_paths(
            self.net,
            paths,
            images,
            labels,
            settings.bn,
            bn_images=settings.bn_images,
            calibration=calibration,
            precision=self.precision,
            balanced=self.data.balanced,
        )
        self.images += len(set(paths)) * (len(images) + (0 if calibration is None else len(calibration)))
        losses = np.nan_to_num(result.losses, nan=np.inf)
        if np.isinf(losses).all():  # the weights are broken
            raise diverged(self.step, paths[0], self.net.space)
        return losses.tolist()


class SupernetAccuracies:
    """The accuracies of paths on the whole validation set, each path once however many searches ask.

    Accuracies are averaged over classes where the data weighs these alike.
    """

    supernets = 1  # of how many each accuracy is the mean

    def __init__(self, net: Supernet, data: Data, settings: SearchSettings, seed: int, precision: str):
        self.net, self.data, self.settings, self.precision = net, data, settings, precision
        self.known: dict[OpPath, float] = {}
        self.calibration = self._draw_calibration(seed)

    def with_settings(self, settings: SearchSettings, seed: int) -> Self:
        """Return the same evaluation with other settings, which knows no accuracies yet."""
        other = copy(self)
        other.settings, other.known = settings, {}
        other.calibration = other._draw_calibration(seed)
        return other

    def _draw_calibration(self, seed: int) -> Tensor | None:
        if not calibrates(self.settings.bn):
            return None
        rng = stream(seed, "calibration images of the search")
        return calibration_images(self.data, self.settings.calibration_images, rng)

    @property
    def images(self) -> float:
        """The number of images behind every accuracy; where classes are balanced, the effective number.

        A weighted mean is as uncertain as a plain one over (sum of weights)² / (sum of squared weights) images.
        """
        if not self.data.balanced:
            return float(len(self.data.val))
        labels = self.data.val.labels
        weights = image_weights(labels, balanced_weights(labels, self.net.space.num_classes)).double()
        return float(weights.sum() ** 2 / weights.square().sum())

    def __call__(self, paths: Sequence[OpPath]) -> list[float]:
        """Return the accuracy of each path."""
        new = [tuple(path) for path in ranks.broadcast([path for path in paths if path not in self.known])]
        if new:
            self.known.update(zip(new, self.evaluate(new).accuracies.tolist(), strict=True))
        return [self.known[path] for path in paths]

    def evaluate(self, paths: Sequence[OpPath], images: NDArray[np.int64] | None = None) -> Evaluation:
        """Evaluate paths on the validation images, or on some of them by their rows."""
        return evaluate_on_validation(
            self.net,
            paths,
            self.data,
            self.settings,
            calibration=self.calibration,
            precision=self.precision,
            images=images,
        )


def evaluate_on_validation(
    net: Supernet,
    paths: Sequence[OpPath],
    data: Data,
    settings: SearchSettings,
    *,
    calibration: Tensor | None = None,
    precision: str = "fp32",
    images: NDArray[np.int64] | None = None,
) -> Evaluation:
    """Evaluate paths on all validation images, or on those of some rows, in interleaved chunks of `settings.bn_images`."""
    chosen = np.arange(len(data.val)) if images is None else images
    class_weights = (
        balanced_weights(data.val.labels[chosen], net.space.num_classes, torch.float64) if data.balanced else None
    )
    batches = (data.val.eval_batch(chosen[chunk]) for chunk in interleaved(len(chosen), settings.bn_images))
    return evaluate_batches(
        net, paths, batches, settings.bn, calibration=calibration, precision=precision, class_weights=class_weights
    )
