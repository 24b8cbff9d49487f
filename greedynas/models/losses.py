"""The classification loss of supernets and of single networks, and the weights that balance classes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greedynas.data.class_weights import image_weights
from greedynas.runtime.devices import autocast, full_precision


def classification_loss(
    logits: Tensor, targets: Tensor, class_weights: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy of a batch, with every image weighted by its class.

    Targets are labels (n,), or the shares of each class (n, classes) that mixup makes. A weight says how much an image counts,
    never which answer is right: labels are smoothed without weights. PyTorch's weighted cross-entropy multiplies each smoothed
    share by the weight of its class, so that for an image of a common class the rarest class becomes the best answer.

    The mean is over images, not over weights. The weights have a mean of 1 over the training set (`balanced_weights`), and a
    denominator that followed the batch would cancel most of them: a batch without a rare image would count as much as one
    with it.
    """
    if class_weights is None:
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    losses = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
    return (losses * image_weights(targets, class_weights).to(losses.dtype)).mean()


@torch.no_grad()
def teacher_logits(teacher: nn.Module, images: Tensor, precision: str) -> Tensor:
    """Return the logits of a teacher, in full precision."""
    with autocast(images.device, precision):
        logits = teacher(images)
    return full_precision(logits)


def distillation_loss(logits: Tensor, wanted: Tensor, temperature: float = 1.0) -> Tensor:
    """Return how far logits are from those of a teacher (Hinton et al., 2015): T² · KL at temperature T, the mean of a batch."""
    ours, theirs = ((z / temperature).log_softmax(1) for z in (logits, wanted))
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
