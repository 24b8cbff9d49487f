"""The classification loss of supernets and of single networks, and the weights that balance classes."""

from torch import Tensor
from torch.nn import functional as F

from greedynas.data.class_weights import image_weights


def classification_loss(
    logits: Tensor, targets: Tensor, class_weights: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy of a batch, in which every image counts by the weight of its class.

    Targets are labels (n,), or the shares of each class (n, classes) that mixup makes. A weight says how much an image counts,
    never which answer is right: labels are smoothed without weights. PyTorch's weighted cross-entropy multiplies each smoothed
    share by the weight of its class, so that for a common class the best answer becomes the rarest one.

    The mean is over images, not over weights. The weights have a mean of 1 over the training set (`balanced_weights`), and a
    denominator that followed the batch would cancel most of them: a batch without a rare image would count as much as one
    with it.
    """
    if class_weights is None:
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    losses = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
    return (losses * image_weights(targets, class_weights).to(losses.dtype)).mean()
