"""What is searched, and what a search has evaluated: the words that all searchers share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pymoo.util.nds.non_dominated_sorting import NonDominatedSorting

from greedynas.experimental.additive import blended
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.budget import Budget
from greedynas.spaces.costs import CostTable, IntArray
from greedynas.spaces.feasible import sample_feasible, within
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space

Accuracies = Callable[[Sequence[OpPath]], Sequence[float]]
STALE_ROUNDS = 20  # rounds of offspring without a new feasible path before random ones help out


@dataclass(frozen=True)
class Found:
    """An evaluated path."""

    path: OpPath
    accuracy: float
    generation: int


@dataclass
class Searched:
    """Everything a search evaluated, in order, and what it passed over."""

    task: "Task"
    found: list[Found] = field(default_factory=list)
    from_pool: int = 0  # of the initial population
    ditched: int = 0  # offspring that violated a limit

    @property
    def worth(self) -> NDArray[np.float64]:
        """What the choice goes by: accuracies, or with `task.additive` scores that all evaluated paths have a part in."""
        accuracies = np.array([entry.accuracy for entry in self.found])
        return blended([entry.path for entry in self.found], accuracies, self.task.additive)

    @property
    def best(self) -> Found:
        """The path of the highest worth; of equal ones the cheapest, by the objectives in order. It is on the front."""
        scores = self._scores().tolist()
        return self.found[min(range(len(scores)), key=scores.__getitem__)]

    def front(self) -> list[Found]:
        """Return the paths that no other one beats in worth and in every objective, cheapest first."""
        scores = self._scores()
        front = NonDominatedSorting().do(scores, only_non_dominated_front=True)
        return [self.found[i] for i in sorted(front, key=lambda i: (*scores[i, 1:], i))]

    def _scores(self) -> NDArray[np.float64]:
        """All to be minimised: minus worth, then the costs. What cannot be priced is more expensive than anything else."""
        scores = self.task.scores(self.found)
        scores[:, 0] = -self.worth
        scores[np.isnan(scores)] = np.inf
        return scores


@dataclass(frozen=True)
class Task:
    """What is searched: a space, its costs, the limits, and which costs are to be small besides a high accuracy."""

    space: Space
    budget: Budget
    objectives: tuple[str, ...]
    tables: Mapping[str, CostTable]
    additive: float = 0.0  # how much of a path's worth is an additive model's

    def feasible(self, paths: IntArray) -> NDArray[np.bool_]:
        return within(self.tables, self.budget.limits(), paths)

    def sample(self, n: int, rng: np.random.Generator) -> list[OpPath]:
        limits = self.budget.limits()
        paths = sample_feasible(self.tables, limits, n, rng) if limits else self.space.sample(n, rng)
        return [tuple(path) for path in paths.tolist()]

    def scores(self, found: Sequence[Found]) -> NDArray[np.float64]:
        """All to be minimised: minus accuracy, then the costs. (n, 1 + objectives)."""
        paths = np.array([entry.path for entry in found])
        columns = [-np.array([entry.accuracy for entry in found])]
        return np.stack([*columns, *(self.tables[cost](paths) for cost in self.objectives)], axis=1)


def _remembering(evaluate: Accuracies, earlier: Sequence[Found]) -> Callable[[list[OpPath], int], list[Found]]:
    """Evaluation of a generation that takes the results of an interrupted search instead of evaluating again."""
    known = {entry.path: entry.accuracy for entry in earlier}

    def evaluation(paths: list[OpPath], generation: int) -> list[Found]:
        new = [path for path in paths if path not in known]
        known.update(zip(new, evaluate(new) if new else (), strict=True))
        return [Found(path, known[path], generation) for path in paths]

    return evaluation


def new_random_paths(task: Task, n: int, seen: set[OpPath], rng: np.random.Generator) -> list[OpPath]:
    """n feasible paths that were not seen; fewer where there are no more to be found."""
    found: dict[OpPath, None] = {}
    for _ in range(STALE_ROUNDS):
        if len(found) >= n:
            break
        found.update((path, None) for path in task.sample(4 * n, rng) if path not in seen)
    return list(found)[:n]


def make_task(
    space: Space,
    budget: Budget,
    objectives: Sequence[str] = (),
    latency: CostTable | None = None,
    additive: float = 0.0,
) -> Task:
    """The limited costs are objectives, or multiply-adds where nothing is limited. Refuses limits that no path keeps."""
    tables = {**space.cost_tables, **({} if latency is None else {"latency_ms": latency})}
    names = tuple(objectives) or tuple(budget.limits()) or ("macs",)
    for name in {*names, *budget.limits()}:
        if name not in tables:
            raise GreedyNASError(
                "a latency limit needs a latency table" if name == "latency_ms" else f"unknown cost {name!r}"
            )
    return Task(space, budget, names, tables, additive)
