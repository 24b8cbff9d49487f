"""What is searched, and what a search has evaluated: the words that all searchers share."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
from numpy.typing import NDArray
from pymoo.util.nds.non_dominated_sorting import NonDominatedSorting

from greedynas.greedy.searchers.front_chart import draw_front
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream
from greedynas.runtime.text import COSTS
from greedynas.spaces.budget import Budget
from greedynas.spaces.costs import CostTable, IntArray, PricesPaths
from greedynas.spaces.drawing import draw_path
from greedynas.spaces.feasible import sample_feasible, within
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space

Accuracies = Callable[[Sequence[OpPath]], Sequence[float]]
Score = Callable[[Sequence[OpPath], NDArray[np.float64]], NDArray[np.float64]]
STALE_ROUNDS = 20  # draws without a new feasible path before it is believed that there is none


@dataclass(frozen=True)
class Found:
    """An evaluated path.

    Attributes:
        path: The path.
        accuracy: Its accuracy on the supernet.
        generation: The proposal that it came from, counted from 0.

    Example:
        >>> import greedynas
        >>> space = greedynas.load_space("macro")
        >>> result = greedynas.search(space, lambda paths: [sum(path) / 16 for path in paths], generations=4)
        >>> result.best
        Found(path=(2, 2, 2, 2, 2, 2, 2, 2), accuracy=1.0, generation=2)
    """

    path: OpPath
    accuracy: float
    generation: int


@dataclass(frozen=True)
class Task:
    """What is searched: a space, its costs, the limits, and which costs are to be small besides a high accuracy."""

    space: Space
    budget: Budget
    objectives: tuple[str, ...]
    tables: Mapping[str, CostTable]
    score: Score | None = None  # what paths are ranked by instead of their accuracies

    def feasible(self, paths: IntArray) -> NDArray[np.bool_]:
        """Return which of some paths (n, layers) keep every limit."""
        return within(self.tables, self.budget.limits(), paths)

    def sample(self, n: int, rng: np.random.Generator) -> list[OpPath]:
        """Return n feasible paths, each of them equally likely."""
        limits = self.budget.limits()
        paths = sample_feasible(self.tables, limits, n, rng) if limits else self.space.sample(n, rng)
        return [tuple(path) for path in paths.tolist()]

    def new_random_paths(self, n: int, seen: set[OpPath], rng: np.random.Generator) -> list[OpPath]:
        """Return n distinct feasible paths that were not seen; fewer where no more can be found."""
        found: dict[OpPath, None] = {}
        for _ in range(STALE_ROUNDS):
            if len(found) >= n:
                break
            found.update((path, None) for path in self.sample(4 * n, rng) if path not in seen)
        return list(found)[:n]

    def scores(self, found: Sequence[Found]) -> NDArray[np.float64]:
        """Return an array (n, 1 + objectives) to be minimised: minus accuracy, then the costs."""
        paths = np.array([entry.path for entry in found])
        columns = [-np.array([entry.accuracy for entry in found])]
        return np.stack([*columns, *(self.tables[cost](paths) for cost in self.objectives)], axis=1)


@dataclass(frozen=True)
class Plan:
    """All that a searcher works with.

    Attributes:
        task: What is searched.
        pool: The candidate pool of the training, best path first.
        population: How many paths a proposal should have.
        generations: How many proposals there should be.
        seed: Of the random draws.

    Example:
        >>> import greedynas
        >>> @greedynas.register_searcher("doctest-one-draw")
        ... def one_draw(plan):
        ...     yield plan.task.sample(plan.population, plan.rng(0))
        >>> space = greedynas.load_space("macro")
        >>> found = greedynas.search(space, lambda paths: [0.5] * len(paths), searcher="doctest-one-draw").found
        >>> len(found) <= 50
        True
    """

    task: Task
    pool: Sequence[OpPath] = ()
    population: int = 50
    generations: int = 20
    seed: int = 0

    @property
    def evaluations(self) -> int:
        """How many paths are evaluated at most."""
        return self.population * self.generations

    def rng(self, generation: int) -> np.random.Generator:
        """Return the random numbers of a generation. They depend on nothing else, so that a search can be resumed."""
        return stream(self.seed, "search", generation)


@dataclass(frozen=True)
class Proposal:
    """Paths that a searcher wants to be evaluated next, and what it has counted on the way to them."""

    paths: Sequence[OpPath]
    from_pool: int = 0  # how many of the paths come from the pool
    rejected: int = 0  # how many others were rejected because they violate a limit


# A searcher is a generator: it yields a proposal (or a list of paths), is sent the evaluated paths, and yields the next one.
Searcher = Generator["Proposal | Sequence[OpPath]", list[Found], None]


@dataclass(repr=False)
class Searched:
    """Everything a search has evaluated, in order.

    Attributes:
        task: What was searched.
        found: The evaluated paths.
        from_pool: How many of the first paths come from the candidate pool.
        rejected: How many proposed paths were rejected because they violate a limit.

    Example:
        >>> import greedynas
        >>> space = greedynas.load_space("macro")
        >>> result = greedynas.search(space, lambda paths: [sum(path) / 16 for path in paths], searcher="random")
        >>> result, result.front()[-1] == result.best
        (Searched(1,000 paths of macro, best 1.0000), True)
    """

    task: Task
    found: list[Found] = field(default_factory=list)
    from_pool: int = 0
    rejected: int = 0

    @property
    def worth(self) -> NDArray[np.float64]:
        """What the choice goes by: accuracies, or the scores of `task.score`, in which all evaluated paths have a part."""
        accuracies = np.array([entry.accuracy for entry in self.found])
        score = self.task.score
        return accuracies if score is None else score([entry.path for entry in self.found], accuracies)

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
        """Return an array to be minimised: minus worth, then the costs. What cannot be priced costs more than anything else."""
        scores = self.task.scores(self.found)
        scores[:, 0] = -self.worth
        scores[np.isnan(scores)] = np.inf
        return scores

    def __repr__(self) -> str:
        best = f", best {self.best.accuracy:.4f}" if self.found else ""
        return f"Searched({len(self.found):,} paths of {self.task.space.name}{best})"

    def _repr_html_(self) -> str:
        if not self.found:
            return f"<p>{escape(repr(self))}</p>"
        cost = self.task.objectives[0]
        costs = self.task.tables[cost](np.array([entry.path for entry in self.found]))
        place = {entry.path: i for i, entry in enumerate(self.found)}
        front = [place[entry.path] for entry in self.front()]
        accuracies = np.array([entry.accuracy for entry in self.found])
        chart = draw_front(costs, accuracies, front, (COSTS[cost], "accuracy on the supernet"), repr(self))
        return chart + draw_path(self.best.path, self.task.space, f"best: {self.best.accuracy:.4f}")


def make_task(
    space: Space,
    budget: Budget,
    objectives: Sequence[str] = (),
    latency: CostTable | PricesPaths | None = None,
    score: Score | None = None,
) -> Task:
    """Return a task whose objectives are the limited costs, or multiply-adds where nothing is limited."""
    if latency is not None and not isinstance(latency, CostTable):
        latency = latency.cost_table(space)
    tables = {**space.cost_tables, **({} if latency is None else {"latency_ms": latency})}
    names = tuple(objectives) or tuple(budget.limits()) or ("macs",)
    for name in {*names, *budget.limits()}:
        if name not in tables:
            raise GreedyNASError(
                "a latency limit needs a latency table" if name == "latency_ms" else f"unknown cost {name!r}"
            )
    return Task(space, budget, names, tables, score)
