"""Experiments: ideas that are not in the paper, each behind one named hook. They live in `greedynas.experimental`.

A run names them in the section `experimental` of its settings (`--set experimental.snapshots=3`). Nothing imports their
modules but the registry below, when a run asks for one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greedynas.greedy.schedule import Schedule
from greedynas.greedy.searchers.task import Score
from greedynas.greedy.validation import SupernetAccuracies
from greedynas.models.supernet import Supernet
from greedynas.runtime.registry import Registry


def _no_steps(schedule: Schedule) -> frozenset[int]:
    return frozenset()


def _as_they_are(accuracies: SupernetAccuracies, folder: Path, schedule: Schedule, step: int) -> SupernetAccuracies:
    return accuracies


@dataclass(frozen=True)
class Hooks:
    """The places at which an experiment may change a run. Without one, a run does what the paper says.

    Attributes:
        supernet: The class of the supernet.
        lasting_steps: Returns the steps of a training whose checkpoints are kept when newer ones are written.
        accuracies: Takes what a search evaluates paths with, the folder of the checkpoints, the schedule of the training and
            its last step, and returns what the search uses instead.
        score: What a search ranks paths by instead of their accuracies.
    """

    supernet: type[Supernet] = Supernet
    lasting_steps: Callable[[Schedule], frozenset[int]] = _no_steps
    accuracies: Callable[[SupernetAccuracies, Path, Schedule, int], SupernetAccuracies] = _as_they_are
    score: Score | None = None


Experiment = Callable[[Any, Hooks], Hooks]  # the value of its setting, and the hooks so far

EXPERIMENTS: Registry[Experiment] = Registry(
    "experiment",
    {
        "additive": "greedynas.experimental.additive:additive",
        "snapshots": "greedynas.experimental.snapshots:snapshots",
        "split_after_identity": "greedynas.experimental.split_after_identity:split_after_identity",
    },
)


def hooks_of(experimental: Mapping[str, Any]) -> Hooks:
    """Return the hooks of the experiments that a run names, with their values."""
    hooks = Hooks()
    for name, value in experimental.items():
        hooks = EXPERIMENTS[name](value, hooks)
    return hooks
