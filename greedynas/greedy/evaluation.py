"""Losses and accuracies of many paths at once: paths form a prefix tree, and every shared prefix is computed once.

This is exact, because the input of a layer depends only on the ops before it. BatchNorm statistics come from
  batch        the evaluated images, `bn_images` of them at a time,
  recalibrate  training images, computed anew for every path,
  running      the averages kept in training (the paper's `eval()`), a mix over all paths.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from greedynas.data.class_weights import balanced_weights
from greedynas.models.batchnorm import BN_MODES, bn_mode, calibrates, pooled, run_block
from greedynas.models.supernet import Supernet
from greedynas.runtime.devices import autocast, full_precision, prepare
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.spaces.paths import OpPath, parse_path


@dataclass(repr=False)
class Evaluation:
    """The result of `evaluate_paths`: the loss and the accuracy of each path, and how much work it took.

    Attributes:
        losses: The mean cross-entropy of each path; the mean over classes where these are balanced.
        accuracies: The top-1 accuracy of each path; the mean over classes where these are balanced.
        images: The number of evaluated images: distinct paths times images.
        layers_run: The number of blocks that were run, counted once for each chunk of images.
        layers_plain: The number of blocks that evaluating one path at a time would have run.
        correct: Which images each path classified correctly, (paths, images), if `keep_correct` was set.

    Example:
        >>> import greedynas, torch
        >>> net = greedynas.Supernet(greedynas.load_space("macro"))
        >>> images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
        >>> result = greedynas.evaluate_paths(net, ["11111111", "11111112"], images, labels)
        >>> result.losses.shape, result.layers_run < result.layers_plain
        ((2,), True)
    """

    losses: NDArray[np.float64]
    accuracies: NDArray[np.float64]
    images: int = 0  # distinct paths x images
    layers_run: int = 0  # blocks run, counted once for each chunk of images
    layers_plain: int = 0  # blocks that one path at a time would have run
    correct: NDArray[np.bool_] | None = field(default=None, repr=False)  # (paths, images) with `keep_correct`

    def __repr__(self) -> str:
        if len(self.losses) == 0:
            return "Evaluation(0 paths)"
        worst, best = self.accuracies.min(), self.accuracies.max()
        return (
            f"Evaluation({len(self.losses):,} paths: accuracies {worst:.4f} to {best:.4f}, "
            f"losses {self.losses.min():.4f} to {self.losses.max():.4f})"
        )


def evaluate_paths(
    net: Supernet,
    paths: Sequence[Any],
    images: Tensor,
    labels: Tensor,
    bn: str = "batch",
    *,
    bn_images: int = 512,
    calibration: Tensor | None = None,
    precision: str = "fp32",
    keep_correct: bool = False,
    balanced: bool = False,
) -> Evaluation:
    """Evaluate paths of a supernet on images in memory. Prefixes that paths share are computed once.

    Args:
        net: The supernet.
        paths: Paths in any form that `parse_path` reads.
        images: The normalised images, (n, channels, size, size).
        labels: The labels of the images, (n,).
        bn: Where BatchNorm statistics come from: "batch", "recalibrate", "running", or a registered mode.
        bn_images: With "batch", how many images share their statistics.
        calibration: With "recalibrate", the training images that give the statistics.
        precision: "fp32" or "bf16".
        keep_correct: Whether to return which images each path classified correctly.
        balanced: Whether losses and accuracies are means over the classes that occur, so that all classes count alike.

    Returns:
        The losses and accuracies, in the order of the paths.

    Raises:
        GreedyNASError: If there are no images, or a path is not one of the space.

    Example:
        >>> import greedynas
        >>> net, data = greedynas.load_supernet("runs/photos"), greedynas.open_run("runs/photos").data()
        >>> images, labels = data.val.eval_batch(range(len(data.val)))
        >>> result = greedynas.evaluate_paths(net, ["0000", "1111", "2222"], images, labels)
        >>> result.accuracies.shape
        (3,)
    """
    if len(images) == 0:
        raise GreedyNASError("the evaluation set is empty")
    class_weights = balanced_weights(labels, net.space.num_classes, torch.float64) if balanced else None
    chunks = interleaved(len(images), bn_images)
    # The indices are created on the device of the images: a copy would wait for all queued work of the GPU.
    rows = (torch.arange(first, len(images), len(chunks), device=images.device) for first in range(len(chunks)))
    batches = ((images[chunk], labels[chunk]) for chunk in rows)
    result = evaluate_batches(
        net,
        paths,
        batches,
        bn,
        calibration=calibration,
        precision=precision,
        keep_correct=keep_correct,
        class_weights=class_weights,
    )
    if result.correct is not None:  # back into the order of the images
        result.correct = result.correct[:, np.argsort(np.concatenate(chunks))]
    return result


def interleaved(images: int, bn_images: int) -> list[NDArray[np.int64]]:
    """Return the indices of images in chunks of nearly `bn_images`, which share their statistics in mode `batch`.

    Every n-th image goes into the same chunk: folders are sorted by class, and the statistics of a single class are
    useless.
    """
    chunks = max(1, min(round(images / bn_images), images // 2))
    return [np.arange(first, images, chunks) for first in range(chunks)]


@torch.no_grad()
def evaluate_batches(
    net: Supernet,
    paths: Sequence[Any],
    batches: Iterable[tuple[Tensor, Tensor]],
    bn: str = "batch",
    *,
    calibration: Tensor | None = None,
    precision: str = "fp32",
    keep_correct: bool = False,
    class_weights: Tensor | None = None,
) -> Evaluation:
    """Evaluate paths over a stream of batches; memory is bounded by one batch at each depth of the tree.

    With `class_weights` every image is weighted by its class (see `class_weights.balanced_weights`). Each of several
    ranks evaluates its share of the paths on all images, and every rank returns the results of all paths.
    """
    if bn not in BN_MODES:
        raise BN_MODES.unknown(bn)
    if calibrates(bn) and calibration is None:
        raise GreedyNASError("recalibrated BatchNorm needs training images to calibrate on")
    parsed = [parse_path(path, net.space) for path in paths]
    prepare(next(net.parameters()).device)
    distinct = sorted(set(parsed))
    mine = ranks.share(distinct)
    shared = shared_layers(mine)
    losses, hits = np.zeros(len(mine)), np.zeros(len(mine))
    sums: list[Tensor] = []  # for each chunk: losses and hits of the paths
    totals: list[Tensor] = []  # for each chunk: the sum of the weights of its images
    correct: list[NDArray[np.bool_]] = []
    seen = chunks = run = 0
    for images, labels in batches if mine else ():
        weights = None if class_weights is None else class_weights.to(labels.device)[labels]
        loss_sums, rights = _evaluate_chunk(net, mine, shared, images, labels, calibration, bn, precision, weights)
        if weights is None:
            hit_sums = rights.sum(1).double()
        else:
            hit_sums = rights.double() @ weights.double()
            totals.append(weights.double().sum())
        sums.append(torch.stack((loss_sums.double(), hit_sums)))
        if keep_correct:
            correct.append(rights.cpu().numpy())
        seen += len(labels)
        run += len(mine) * len(net.space.layers) - sum(shared)
        chunks += 1
    for chunk in torch.stack(sums).cpu().numpy() if sums else ():  # the only place that waits for a GPU
        losses += chunk[0]
        hits += chunk[1]
    total: float = seen if class_weights is None else sum(float(weight) for weight in totals)
    losses, hits = losses / max(total, 1e-300), hits / max(total, 1e-300)
    if class_weights is not None:
        hits = hits.round(12)  # equal accuracies stay equal, whatever the order of summation
    seen, chunks = ranks.largest(seen), ranks.largest(chunks)
    if seen == 0:
        raise GreedyNASError("the evaluation set is empty")
    place = {path: i for i, path in enumerate(distinct)}
    order = [place[path] for path in parsed]
    losses, hits = (np.concatenate(ranks.gather(part))[order] for part in (losses, hits))
    return Evaluation(
        losses,
        hits,
        images=len(distinct) * seen,
        layers_run=sum(ranks.gather_values(run)),
        layers_plain=chunks * len(distinct) * len(net.space.layers),
        correct=_from_all_ranks(correct, seen)[order] if keep_correct else None,
    )


def _from_all_ranks(correct: list[NDArray[np.bool_]], seen: int) -> NDArray[np.bool_]:
    """Join the chunks (this rank's paths, images) of all ranks into one array (all paths, all images)."""
    mine = np.concatenate(correct, axis=1) if correct else np.zeros((0, seen), np.bool_)
    return np.concatenate(ranks.gather(mine))


def _evaluate_chunk(
    net: Supernet,
    distinct: Sequence[OpPath],
    shared: Sequence[int],
    images: Tensor,
    labels: Tensor,
    calibration: Tensor | None,
    bn: str,
    precision: str,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the (weighted) sums of losses (paths,) and the correctly classified images (paths, images).

    The paths are sorted and distinct.
    """
    calibration = calibration if calibrates(bn) else None
    if images.device.type == "cuda" and weights is None:  # a recording adds up the losses of several images
        from greedynas.greedy.graphs.evaluation import recorded_evaluation

        recorded = recorded_evaluation(net, len(distinct), images, labels, calibration, bn, precision)
        if recorded is not None:
            return recorded(net, distinct, shared, images, labels, calibration)
    losses: list[Tensor] = []
    rights: list[Tensor] = []
    with bn_mode(net, bn), autocast(images.device, precision):
        for logits in _leaves(net, distinct, shared, images, calibration):
            each = F.cross_entropy(full_precision(logits), labels, reduction="sum" if weights is None else "none")
            losses.append(each if weights is None else each @ weights.to(each.dtype))
            rights.append(logits.argmax(1) == labels)
    return torch.stack(losses), torch.stack(rights)


def shared_layers(distinct: Sequence[OpPath]) -> list[int]:
    """Return the number of leading layers that each of some sorted paths shares with the path before it.

    No earlier path shares more, because the paths are sorted.
    """
    shared = [0]
    for before, path in itertools.pairwise(distinct):
        shared.append(next(i for i, (a, b) in enumerate(zip(before, path, strict=True)) if a != b))
    return shared[: len(distinct)]


def _leaves(
    net: Supernet, distinct: Sequence[OpPath], shared: Sequence[int], images: Tensor, calibration: Tensor | None
) -> Iterator[Tensor]:
    """Yield the logits of every path in order, walking the prefix tree depth first with one activation per depth."""
    stack = [run_block(net.stem, images, calibration)]  # stack[d]: (images, calibration images) after d layers
    for path, known in zip(distinct, shared, strict=True):
        del stack[known + 1 :]
        for layer, place in enumerate(net.places(path)[known:], known):
            stack.append(run_block(net.layers[layer][place], *stack[-1]))  # type: ignore[index]
        yield net.classifier(pooled(net, *stack[-1]))
