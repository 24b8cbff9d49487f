"""A search that averages each accuracy over several supernets of one training. Not in the paper.

The accuracy of a path fluctuates from step to step. `experimental.snapshots = n` keeps n supernets: the last one, and
others at equal distances after the end of warm-up. The record that justifies it is `study macro`
(docs/results/studies.md), whose settings have three.
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
    """Return the hooks for averaging accuracies over `count` supernets."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1000:
        raise GreedyNASError(f"experimental.snapshots must be a number of supernets from 1 to 1000, got {count!r:.80}")
    if count == 1:
        return hooks
    steps = partial(snapshot_steps, count=count)

    def averaged(plain: SupernetAccuracies, folder: Path, schedule: Schedule, step: int) -> SupernetAccuracies:
        return AveragedAccuracies(plain, load_snapshots(plain.net, folder, steps(schedule), step))

    return replace(hooks, lasting_steps=steps, accuracies=averaged)


def snapshot_steps(schedule: Schedule, count: int) -> frozenset[int]:
    """Return the steps after which a supernet is kept for the search, without the last step."""
    first = min(schedule.warmup, schedule.steps)
    steps = {first + (schedule.steps - first) * i // count for i in range(1, count + 1)}
    return frozenset(steps - {0, schedule.steps})


def load_snapshots(net: Supernet, folder: Path, steps: frozenset[int], last: int) -> list[Weights]:
    """Return the weights that a net had after each of these steps. Rank 0 reads them for all ranks.

    `last` is the step of the net's current weights. If training stopped early at the step of a snapshot, that step is
    left out, because it would count twice in an average. Damaged checkpoints are skipped with a warning.
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
                raise ValueError("it belongs to another supernet")
            found[step] = weights
        except DAMAGE as error:
            logger.warning("checkpoint %s is damaged (%s); paths are evaluated without it", file.name, error)
    return [ranks.broadcast_tensors(found.get(step)) for step in ranks.broadcast(list(found))]


class AveragedAccuracies(SupernetAccuracies):
    """Accuracies averaged over the current and earlier weights of a net, which keeps its current weights."""

    def __init__(self, plain: SupernetAccuracies, earlier: Sequence[Weights]):
        self.__dict__.update(vars(plain))
        self.known = {}  # accuracies of a single supernet are not averages
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
