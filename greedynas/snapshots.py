"""Paths evaluated on several supernets of one training (`train.snapshots`), because a path's accuracy moves from step to step.
Averaged weights (`train.ema`) are something else: one supernet."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greedynas import distributed
from greedynas.averaging import evaluated
from greedynas.evaluation import BNMode, Evaluation, evaluate_batches, interleaved
from greedynas.imagesets import ImageSet
from greedynas.losses import balanced_weights
from greedynas.paths import OpPath
from greedynas.runs import DAMAGE, Checkpoints, logger, read_checkpoint, step_of
from greedynas.state import load_weights
from greedynas.supernet import Supernet

Weights = dict[str, Tensor]


def load_snapshots(net: Supernet, folder: Path, steps: frozenset[int], last: int) -> list[Weights]:
    """Return the weights that a net had after these steps, one set for each step; rank 0 reads them for all.

    `last` is the step of the weights that the net has now. Training may stop early at a step of a snapshot: that step is not
    returned, else it would count twice in an average. A damaged checkpoint is named and passed over.
    """
    shapes = {f"net.{name}": tensor.shape for name, tensor in net.state_dict().items()}
    found: dict[int, Weights] = {}
    for file in reversed(Checkpoints(folder).files()) if steps and distributed.is_first() else ():
        step = step_of(file)
        if step not in steps or step == last or step in found:  # a crash may leave two files of a step
            continue
        try:
            weights = evaluated(read_checkpoint(file)[0])
            if {name: tensor.shape for name, tensor in weights.items()} != shapes:
                raise ValueError("it is of another supernet")
            found[step] = weights
        except DAMAGE as error:
            logger.warning("checkpoint %s is damaged (%s); paths are evaluated without it", file.name, error)
    return [distributed.broadcast_tensors(found.get(step)) for step in distributed.broadcast(list(found))]


def evaluate_snapshots(
    net: Supernet,
    earlier: Sequence[Weights],
    paths: Sequence[OpPath],
    val: ImageSet,
    bn: BNMode,
    bn_images: int,
    *,
    calibration: Tensor | None,
    precision: str,
    images: NDArray[np.int64] | None = None,
    balanced: bool = False,
) -> Evaluation:
    """Evaluate paths on validation images (None: all) and return the mean over the net as it is and with its earlier weights.

    With `balanced`, every class counts alike. The net is left as it was.
    """
    chosen = np.arange(len(val)) if images is None else images
    labels = val.labels[chosen]
    class_weights = balanced_weights(labels, net.space.num_classes, torch.float64) if balanced else None
    chunks = [chosen[chunk] for chunk in interleaved(len(chosen), bn_images)]

    def evaluate() -> Evaluation:
        batches = (val.eval_batch(chunk) for chunk in chunks)
        options = {"calibration": calibration, "precision": precision, "class_weights": class_weights}
        return evaluate_batches(net, paths, batches, bn, **options)  # type: ignore[arg-type]

    results = [evaluate()]
    if not earlier:
        return results[0]
    last = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    try:
        for weights in earlier:
            load_weights(net, weights)
            results.append(evaluate())
    finally:
        net.load_state_dict(last)
    return Evaluation(
        np.mean([result.losses for result in results], axis=0),
        np.mean([result.accuracies for result in results], axis=0),
        images=sum(result.images for result in results),
        layers_run=sum(result.layers_run for result in results),
        layers_plain=sum(result.layers_plain for result in results),
    )
