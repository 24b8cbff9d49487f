"""The evaluation of paths on the validation images of a run: losses for a filtering, accuracies for a search."""

from collections.abc import Sequence
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
from greedynas.greedy.settings import SearchSettings, TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.models.batchnorm import calibrates
from greedynas.models.supernet import Supernet
from greedynas.runtime.parallel import ranks
from greedynas.runtime.rng import stream
from greedynas.spaces.paths import OpPath, most_expensive

BEST, LARGEST = "best path of the pool", "most expensive path"


def calibration_images(data: Data, count: int, rng: np.random.Generator) -> Tensor:
    """Return random training images without augmentation, which give recalibrated BatchNorm its statistics."""
    images, _ = data.train.eval_batch(rng.choice(len(data.train), min(count, len(data.train)), replace=False))
    return images


class FilterLosses:
    """The losses of paths on a class-balanced batch of validation images, new for every filtering (Algorithm 1).

    The images are drawn from the random stream of the filtering when paths are evaluated.
    """

    def __init__(
        self, net: Supernet, data: Data, settings: TrainSettings, seed: int, state: TrainState, precision: str
    ):
        self.net, self.data, self.settings, self.precision = net, data, settings, precision
        self.seed, self.draw, self.step = seed, state.draws, state.step
        self.images = 0  # evaluated so far: distinct paths times images

    def __call__(self, paths: Sequence[OpPath]) -> list[float]:
        """Return the loss of each path. A loss that is not a number becomes infinite, so that its path ranks last."""
        losses = np.nan_to_num(self._evaluated(paths).losses, nan=np.inf)
        if np.isinf(losses).all():  # the weights are broken
            raise diverged(self.step, paths[0], self.net.space)
        return losses.tolist()

    def accuracies(self, paths: Sequence[OpPath]) -> list[float]:
        """Return the accuracy of each path."""
        return self._evaluated(paths).accuracies.tolist()

    def _evaluated(self, paths: Sequence[OpPath]) -> Evaluation:
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
        return result


def watch_accuracy(
    net: Supernet, data: Data, settings: TrainSettings, seed: int, state: TrainState, precision: str
) -> None:
    """Store the validation accuracy of the pool's best path in the state, and count its images as evaluation cost.

    Before the pool has a path, the most expensive path is evaluated. The images are drawn from a random stream of their
    own, so the training is the same without this.
    """
    if not settings.accuracy_images:
        return
    best = state.pool.best(1)
    path, state.accuracy_of = (best[0][0], BEST) if best else (most_expensive(net.space), LARGEST)
    count = min(settings.accuracy_images, len(data.val))
    chosen = data.val.balanced(count, stream(seed, "accuracy images", state.epoch))
    calibration = None
    if calibrates(settings.bn):
        rng = stream(seed, "calibration images of the accuracy", state.epoch)
        calibration = calibration_images(data, settings.calibration_images, rng)
    # As many images as a training step has fit into memory, and more of them give better statistics.
    together = max(settings.bn_images, settings.batch_size)
    how = SearchSettings(bn=settings.bn, bn_images=together)
    result = evaluate_on_validation(net, [path], data, how, calibration=calibration, precision=precision, images=chosen)
    state.accuracy = float(result.accuracies[0])
    state.evaluation_images += count + (0 if calibration is None else len(calibration))


class SupernetAccuracies:
    """The accuracies of paths on the whole validation set. Each path is evaluated once, also for several searches.

    Accuracies are averaged over classes if the data is balanced.
    """

    supernets = 1  # the number of supernets over which each accuracy is averaged

    def __init__(self, net: Supernet, data: Data, settings: SearchSettings, seed: int, precision: str):
        self.net, self.data, self.settings, self.precision = net, data, settings, precision
        self.known: dict[OpPath, float] = {}
        self.calibration = self._draw_calibration(seed)

    def with_settings(self, settings: SearchSettings, seed: int) -> Self:
        """Return a copy with other settings, which has evaluated nothing yet."""
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
        """The number of images behind every accuracy; for balanced data, the effective number.

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
        """Evaluate paths on the validation images, or on those with the given indices."""
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
    """Evaluate paths on all validation images or those with the given indices, in chunks of `settings.bn_images`."""
    chosen = np.arange(len(data.val)) if images is None else images
    class_weights = (
        balanced_weights(data.val.labels[chosen], net.space.num_classes, torch.float64) if data.balanced else None
    )
    batches = (data.val.eval_batch(chosen[chunk]) for chunk in interleaved(len(chosen), settings.bn_images))
    return evaluate_batches(
        net, paths, batches, settings.bn, calibration=calibration, precision=precision, class_weights=class_weights
    )
