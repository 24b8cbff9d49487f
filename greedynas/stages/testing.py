"""The evaluation of a trained network on a set of images, as `test.json` holds it."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from greedynas.data.class_weights import macro_accuracy
from greedynas.data.loader import ImageSet
from greedynas.rundir.schemas import VERSIONS, pack_bits
from greedynas.runtime.rng import stream

SCHEMA_VERSION = VERSIONS["test"]
CHUNK = 256  # images per batch
SHOWN = 12  # number of random images, and also of the most confident mistakes
THUMBNAIL = 96  # largest side in pixels


@torch.no_grad()
def predict_logits(network: nn.Module, images: ImageSet) -> tuple[Tensor, Tensor]:
    """Return the logits of all images, in fp32 with running statistics, and their labels, both on the CPU."""
    network.eval()
    logits, labels = [], []
    for chunk in np.split(np.arange(len(images)), range(CHUNK, len(images), CHUNK)):
        batch, truth = images.eval_batch(chunk)
        logits.append(network(batch).float().cpu())
        labels.append(truth.cpu())
    return torch.cat(logits), torch.cat(labels)


def top_accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> float:
    """Return the share of images whose class is among the k with the highest logits."""
    return float((logits.topk(k, dim=1).indices == labels[:, None]).any(1).float().mean())


def assess(network: nn.Module, images: ImageSet, class_names: Sequence[str], seed: int) -> dict[str, Any]:
    """Return accuracies, the confusion matrix, and a few images with the network's predictions."""
    logits, labels = predict_logits(network, images)
    classes, predicted = len(class_names), logits.argmax(1)
    pairs = torch.bincount(labels * classes + predicted, minlength=classes**2)
    confusion = pairs.reshape(classes, classes)  # rows: the true class
    counts, hits = confusion.sum(1).tolist(), confusion.diagonal().tolist()
    return {
        "schema_version": SCHEMA_VERSION,
        "images": len(labels),
        "top1": top_accuracy(logits, labels),
        "top5": top_accuracy(logits, labels, 5) if classes > 5 else None,
        "macro": macro_accuracy(predicted == labels, labels, classes),
        "loss": float(F.cross_entropy(logits, labels)),
        "class_names": list(class_names),
        "per_class": [hit / count if count else None for hit, count in zip(hits, counts, strict=True)],
        "confusion": confusion.tolist(),
        "correct": pack_bits((predicted == labels).numpy()),  # of each image, to compare networks on the same images
        "samples": _samples(logits.softmax(1), labels, images, seed),
    }


def _samples(probabilities: Tensor, labels: Tensor, images: ImageSet, seed: int) -> list[dict[str, Any]]:
    confidence, predicted = probabilities.max(1)
    rng = stream(seed, "shown test images")
    shown = rng.choice(len(labels), min(SHOWN, len(labels)), replace=False).tolist()
    wrong = torch.where(predicted != labels, confidence, -torch.ones(()))
    mistakes = [i for i in wrong.argsort(descending=True, stable=True).tolist() if wrong[i] >= 0 and i not in shown]
    shown += mistakes[:SHOWN]
    pictures, _ = images.eval_batch(shown)
    best = probabilities[shown].topk(min(5, probabilities.shape[1]), dim=1)
    return [
        {
            "image": _thumbnail(pixels),
            "label": int(labels[i]),
            "predicted": int(predicted[i]),
            "probability": float(confidence[i]),
            "top": [[int(k), float(p)] for p, k in zip(*row, strict=True)],
        }
        for i, pixels, *row in zip(shown, images.view.pixels(pictures).cpu(), best.values, best.indices, strict=True)
    ]


def _thumbnail(pixels: Tensor) -> str:
    """Return a thumbnail of the pixels (size, size, channels) as the data URL of a PNG."""
    image = Image.fromarray(pixels.squeeze(2).numpy())
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
