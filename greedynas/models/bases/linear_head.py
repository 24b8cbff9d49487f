"""A linear classifier on the features of a pretrained network, by logistic regression: where fine-tuning starts from."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greedynas.data.class_weights import image_weights
from greedynas.data.loader import ImageSet

CHUNK = 128  # images at a time
PENALTY = 1e-3  # of the squared weights on standardised features, beside the mean loss
ITERATIONS = 200


def fit_classifier(network: Any, images: ImageSet, class_weights: Tensor | None = None) -> None:
    """Replace the weights of a network's classifier by those of a linear classifier that is fitted to its features.

    Args:
        network: A network of timm, in training mode again afterwards.
        images: The images whose features are used, without augmentation.
        class_weights: How much each class counts; None: every image alike.
    """
    network.eval()
    features: list[Tensor] = []
    with torch.no_grad():
        for chunk in np.array_split(np.arange(len(images)), max(1, -(-len(images) // CHUNK))):
            batch, _ = images.eval_batch(chunk)
            features.append(network.forward_head(network.forward_features(batch), pre_logits=True).float())
    labels, classifier = images.labels.to(features[0].device), network.get_classifier()
    weights = None if class_weights is None else image_weights(labels, class_weights)
    head = fit_linear_head(torch.cat(features), labels, classifier.out_features, weights)
    classifier.load_state_dict(head.state_dict())
    network.train()


def fit_linear_head(features: Tensor, labels: Tensor, classes: int, image_weights: Tensor | None = None) -> nn.Linear:
    """Fit a linear classifier to the features of images.

    Args:
        features: The features (n, channels).
        labels: The labels (n,).
        classes: How many classes there are.
        image_weights: How much each image counts; None: all alike.

    Returns:
        The classifier. The same features give the same classifier.
    """
    x = features.double()
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x = (x - mean) / std
    weight = torch.zeros(classes, x.shape[1], dtype=x.dtype, device=x.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=x.dtype, device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=ITERATIONS, history_size=20, line_search_fn="strong_wolfe")
    counts = torch.ones(len(x), dtype=x.dtype, device=x.device) if image_weights is None else image_weights.double()

    def loss() -> Tensor:
        optimizer.zero_grad()
        losses = F.cross_entropy(x @ weight.T + bias, labels, reduction="none")
        value = (losses * counts).sum() / counts.sum() + PENALTY * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    head = nn.Linear(x.shape[1], classes)
    with torch.no_grad():
        scaled = weight / std
        head.weight.copy_(scaled)
        head.bias.copy_(bias - scaled @ mean)
    return head.to(features.device)
