"""Paths evaluated on several supernets of one training (`train.snapshots`): the accuracy of a path moves from step to step, its
mean much less. Averaged weights (`train.ema`) are not the same: one supernet, whose paths have adapted to each other more."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from greedynas import distributed
from greedynas.averaging import evaluated
from greedynas.evaluation import Evaluation
from greedynas.runs import DAMAGE, Checkpoints, logger, read_checkpoint, step_of
from greedynas.state import load_weights
from greedynas.supernet import Supernet

Weights = dict[str, Tensor]


def load_snapshots(net: Supernet, folder: Path, steps: frozenset[int]) -> list[Weights]:
    """Earlier weights of a net, after these steps; rank 0 reads them for all. A damaged checkpoint is named and passed over."""
    shapes = {f"net.{name}": tensor.shape for name, tensor in net.state_dict().items()}
    found: list[Weights] = []
    for file in reversed(Checkpoints(folder).files()) if steps and distributed.is_first() else ():
        if step_of(file) not in steps:
            continue
        try:
            weights = evaluated(read_checkpoint(file)[0])
            if {name: tensor.shape for name, tensor in weights.items()} != shapes:
                raise ValueError("it is of another supernet")
            found.append(weights)
        except DAMAGE as error:
            logger.warning("checkpoint %s is damaged (%s); paths are evaluated without it", file.name, error)
    count = distributed.broadcast(len(found))
    return [distributed.broadcast_tensors(found[i] if found else None) for i in range(count)]


def evaluate_snapshots(net: Supernet, earlier: Sequence[Weights], evaluate: Callable[[], Evaluation]) -> Evaluation:
    """The mean of what is found on the net as it is and with its earlier weights. It is left as it was."""
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
