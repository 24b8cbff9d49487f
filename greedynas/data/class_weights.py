"""Weights that balance classes, and accuracies averaged over classes."""

import torch
from torch import Tensor


def macro_accuracy(correct: Tensor, labels: Tensor, num_classes: int) -> float:
    """Return the mean over the accuracies of all classes that are present."""
    counts = torch.bincount(labels, minlength=num_classes)
    hits = torch.bincount(labels[correct.bool()], minlength=num_classes)
    present = counts > 0
    return float((hits[present] / counts[present]).mean())


def image_weights(targets: Tensor, class_weights: Tensor) -> Tensor:
    """Return the weight of each image: that of its class, or the mean over its shares of several classes."""
    if targets.is_floating_point():
        return targets @ class_weights.to(targets.dtype)
    return class_weights[targets]


def balanced_weights(labels: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a weight for each class, such that all classes that are present contribute equally.

    Over the images with these labels, the mean weight is 1, so a weighted mean is a mean over classes. A class without
    images has the weight 0. Accuracies that are compared need float64: in float32, three images of a class of three and
    seven images of a class of seven do not contribute exactly equally.
    """
    counts = torch.bincount(labels, minlength=num_classes).double()
    return torch.where(counts > 0, len(labels) / ((counts > 0).sum() * counts.clamp(min=1)), 0.0).to(dtype)
