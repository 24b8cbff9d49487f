"""A search that averages each accuracy over several supernets of one training. Not in the paper.

A path's accuracy moves from step to step. `experimental.snapshots = n` keeps n supernets: the last, and the others evenly
since the end of the warm-up. The record that justifies it: `study macro` (docs/results/studies.md), whose settings have three.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from greedynas.greedy.evaluation import Evaluation
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.validation import SupernetAccuracies
from greedynas.models.supernet import Supernet
from greedynas.rundir.checkpoints import DAMAGE, Checkpoints, load_weights, net_weights, read_checkpoint, step_of
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger
from greedynas.settings.experiments import Hooks
from greedynas.spaces.paths import OpPath

Weights = dict[str, Tensor]


def snapshots(count: Any, hooks: Hooks) -> Hooks:
    """Return the hooks for averages over this many supernets."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1000:
        raise GreedyNASError(f"experimental.snapshots is a number of supernets from 1 to 1000, got {count!r:.80}")
    if count == 1:
        return hooks
    steps = partial(snapshot_steps, count=count)

    def averaged(plain: SupernetAccuracies, folder: Path, schedule: Schedule, step: int) -> SupernetAccuracies:
        return AveragedAccuracies(plain, load_snapshots(plain.net, folder, steps(schedule), step))

    return replace(hooks, lasting_steps=steps, accuracies=averaged)


def snapshot_steps(schedule: Schedule, count: int) -> frozenset[int]:
    """Return the steps after which a supernet is kept for the search, besides the last one."""
    first = min(schedule.warmup, schedule.steps)
    steps = {first + (schedule.steps - first) * i // count for i in range(1, count + 1)}
    return frozenset(steps - {0, schedule.steps})


def load_snapshots(net: Supernet, folder: Path, steps: frozenset[int], last: int) -> list[Weights]:
    """Return the weights that a net had after these steps, one set for each step; rank 0 reads them for all.

    `last` is the step of the weights that the net has now. Training may stop early at a step of a snapshot: that step is not
    returned, else it would count twice in an average. A damaged checkpoint is named and passed over.
    """
    shapes = {f"net.{name}": tensor.shape for name, tensor in net.state_dict().items()}
    found: dict[int, Weights] = {}
    for file in reversed(Checkpoints(folder).files()) if steps and ranks.is_first() else ():
        step = step_of(file)
        if step not in steps or step == last or step in found:  # a crash may leave two files of a step
            continue
        try:
            weights = net_weights(read_checkpoint(file)[0])
            if {name: tensor.shape for name, tensor in weights.items()} != shapes:
                raise ValueError("it is of another supernet")
            found[step] = weights
        except DAMAGE as error:
            logger.warning("checkpoint %s is damaged (%s); paths are evaluated without it", file.name, error)
    return [ranks.broadcast_tensors(found.get(step)) for step in ranks.broadcast(list(found))]


class AveragedAccuracies(SupernetAccuracies):
    """Accuracies that are means over a net as it is and with earlier weights. The net is left as it was."""

    def __init__(self, plain: SupernetAccuracies, earlier: Sequence[Weights]):
        self.__dict__.update(vars(plain))
        self.known = {}  # those of one supernet are none of these
        self.earlier = earlier
        self.supernets = 1 + len(earlier)

    def evaluate(self, paths: Sequence[OpPath], images: NDArray[np.int64] | None = None) -> Evaluation:
        """Return the means over all supernets."""
        results = [super().evaluate(paths, images)]
        last = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        try:
            for weights in self.earlier:
                load_weights(self.net, weights)
                results.append(super().evaluate(paths, images))
        finally:
            self.net.load_state_dict(last)
        return Evaluation(
            np.mean([result.losses for result in results], axis=0),
            np.mean([result.accuracies for result in results], axis=0),
            images=sum(result.images for result in results),
            layers_run=sum(result.layers_run for result in results),
            layers_plain=sum(result.layers_plain for result in results),
        )
