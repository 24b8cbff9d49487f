"""Experiments: ideas that are not in the paper, each behind one named hook. Their code is in `greedynas.experimental`.

The section `experimental` of a run's settings names them (`--set experimental.snapshots=3`). Only the registry below
imports their modules, and only for runs that use them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greedynas.data.datasets import Data
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.search import search_steps
from greedynas.greedy.searchers.task import Accuracies, Found, Plan, Score, Searched
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.validation import SupernetAccuracies
from greedynas.models.supernet import Supernet
from greedynas.runtime.registry import Registry
from greedynas.spaces.space import Space


def _no_steps(schedule: Schedule) -> frozenset[int]:
    return frozenset()


def _unchanged(accuracies: SupernetAccuracies, folder: Path, schedule: Schedule, step: int) -> SupernetAccuracies:
    return accuracies


def _plain_search(
    plan: Plan,
    evaluate: Accuracies,
    searcher: str,
    earlier: Sequence[Found],
    home: Path,
    train: TrainSettings,
    precision: str,
) -> Iterator[Searched]:
    return search_steps(plan, evaluate, searcher, earlier)


def _same_score(score: Score | None, space: Space, data: Data, seed: int) -> Score | None:
    return score


@dataclass(frozen=True)
class Hooks:
    """The hooks by which an experiment may change a run. The defaults are the paper's method.

    Attributes:
        supernet: The class of the supernet.
        lasting_steps: A function that returns the steps of a training whose checkpoints are kept for good.
        accuracies: A function that takes the evaluator of a search, the folder of the checkpoints, the schedule of the
            training and its last step, and returns the evaluator to use instead.
        score: A function that gives the scores by which a search ranks paths instead of by their accuracies.
        refine_score: A function that takes this score (or None), the space, the data and the seed of a run, and returns
            the score to use instead.
        search: A function that searches as `search_steps` does, and also takes the folder of the search, and the settings and
            the precision of the supernet's training.
    """

    supernet: type[Supernet] = Supernet
    lasting_steps: Callable[[Schedule], frozenset[int]] = _no_steps
    accuracies: Callable[[SupernetAccuracies, Path, Schedule, int], SupernetAccuracies] = _unchanged
    score: Score | None = None
    refine_score: Callable[[Score | None, Space, Data, int], Score | None] = _same_score
    search: Callable[[Plan, Accuracies, str, Sequence[Found], Path, TrainSettings, str], Iterator[Searched]] = (
        _plain_search
    )


Experiment = Callable[[Any, Hooks], Hooks]  # takes the value of the setting and the hooks so far

EXPERIMENTS: Registry[Experiment] = Registry(
    "experiment",
    {
        "additive": "greedynas.experimental.additive:additive",
        "second_opinion": "greedynas.experimental.second_opinion:second_opinion",
        "shifting": "greedynas.experimental.shifting:shifting",
        "snapshots": "greedynas.experimental.snapshots:snapshots",
        "split_after_identity": "greedynas.experimental.split_after_identity:split_after_identity",
    },
)


def hooks_of(experimental: Mapping[str, Any]) -> Hooks:
    """Return the hooks of the experiments in the section `experimental` of a run's settings."""
    hooks = Hooks()
    for name, value in experimental.items():
        hooks = EXPERIMENTS[name](value, hooks)
    return hooks
