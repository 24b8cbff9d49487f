"""The types that all searchers share: the task of a search, its plan, proposals and evaluated paths."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
from greedynas.spaces.feasible import FeasiblePaths, within
from greedynas.spaces.memory import cost_tables_for
from greedynas.spaces.paths import OpPath
from greedynas.spaces.ranked import MAX_STEPS, ranked_paths, whole_values
from greedynas.spaces.space import Space

Accuracies = Callable[[Sequence[OpPath]], Sequence[float]]
Score = Callable[[Sequence[OpPath], NDArray[np.float64]], NDArray[np.float64]]
STALE_ROUNDS = 20  # rounds without a new feasible path after which a search assumes that there is none


@dataclass(frozen=True)
class Found:
    """An evaluated path.

    Attributes:
        path: The path.
        accuracy: Its accuracy on the supernet.
        generation: The index of its proposal, counted from 0.

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
    """The task of a search: a space, its costs, their limits, and the costs that are minimised besides the error."""

    space: Space
    budget: Budget
    objectives: tuple[str, ...]
    tables: Mapping[str, CostTable]
    score: Score | None = None  # ranks paths instead of their accuracies

    def feasible(self, paths: IntArray) -> NDArray[np.bool_]:
        """Return a mask of the paths (n, layers) that keep every limit."""
        return within(self.tables, self.budget.limits(), paths)

    def sample(self, n: int, rng: np.random.Generator) -> list[OpPath]:
        """Return n random feasible paths, each equally likely."""
        paths = self.space.sample(n, rng) if self._limited is None else self._limited.sample(n, rng)
        return [tuple(path) for path in paths.tolist()]

    def ranked(self, values: Sequence[NDArray[np.float64]], steps: int = MAX_STEPS) -> Iterator[OpPath]:
        """Yield feasible paths in descending order of the sum of `values[layer][op]`, as far as a limited effort gets."""
        if self._limited is not None:
            yield from self._limited.ranked(values, steps)
        else:
            yield from (path for _, path in ranked_paths(whole_values(values), (), steps))

    @cached_property
    def _limited(self) -> FeasiblePaths | None:
        """The paths within the limits; None if nothing is limited. Counting them takes longer than drawing."""
        limits = self.budget.limits()
        return FeasiblePaths(self.tables, limits) if limits else None

    def new_random_paths(self, n: int, seen: set[OpPath], rng: np.random.Generator) -> list[OpPath]:
        """Return n distinct feasible paths that are not in `seen`, or fewer if no more can be found."""
        found: dict[OpPath, None] = {}
        for _ in range(STALE_ROUNDS):
            if len(found) >= n:
                break
            found.update((path, None) for path in self.sample(4 * n, rng) if path not in seen)
        return list(found)[:n]

    def neighbours(self, path: OpPath) -> list[OpPath]:
        """Return the feasible paths that differ from a path in a single op."""
        changed = one_change(np.array([path]), self.space.num_ops)
        return [tuple(other) for other in changed[self.feasible(changed)].tolist()]

    def scores(self, found: Sequence[Found]) -> NDArray[np.float64]:
        """Return an array (n, 1 + objectives) to be minimised: minus accuracy, then the costs."""
        paths = np.array([entry.path for entry in found])
        columns = [-np.array([entry.accuracy for entry in found])]
        return np.stack([*columns, *(self.tables[cost](paths) for cost in self.objectives)], axis=1)


@dataclass(frozen=True)
class Plan:
    """The input of a searcher.

    Attributes:
        task: The task of the search.
        pool: The candidate pool of the training, best path first.
        population: How many paths a proposal should have.
        generations: How many proposals there should be.
        seed: The seed of all random draws.
        probabilities: The probabilities of the ops of each layer, if the supernet was trained by a method that learns them.

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
    probabilities: Sequence[NDArray[np.float64]] = ()

    @property
    def evaluations(self) -> int:
        """The largest number of paths that are evaluated."""
        return self.population * self.generations

    def rng(self, generation: int) -> np.random.Generator:
        """Return a generation's random numbers. They depend on nothing else, so that a search can be resumed."""
        return stream(self.seed, "search", generation)


@dataclass(frozen=True)
class Proposal:
    """The paths that a searcher wants to be evaluated next, and the counts for the statistics of the search."""

    paths: Sequence[OpPath]
    from_pool: int = 0  # how many of the paths come from the pool
    rejected: int = 0  # how many others were rejected because they violate a limit


# A searcher is a generator: it yields a proposal (or a list of paths), receives the evaluated paths, and so on.
Searcher = Generator["Proposal | Sequence[OpPath]", list[Found], None]


@dataclass(repr=False)
class Searched:
    """All evaluated paths of a search, in order.

    Attributes:
        task: The task of the search.
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
        """The values by which paths are ranked: accuracies, or the scores that `task.score` computes from these."""
        accuracies = np.array([entry.accuracy for entry in self.found])
        score = self.task.score
        return accuracies if score is None else score([entry.path for entry in self.found], accuracies)

    @property
    def best(self) -> Found:
        """The path with the highest worth; of equal ones the cheapest by the objectives in order, on the front."""
        scores = self._scores().tolist()
        return self.found[min(range(len(scores)), key=scores.__getitem__)]

    def front(self) -> list[Found]:
        """Return the Pareto front by worth and all objectives, cheapest path first."""
        scores = self._scores()
        front = NonDominatedSorting().do(scores, only_non_dominated_front=True)
        return [self.found[i] for i in sorted(front, key=lambda i: (*scores[i, 1:], i))]

    def _scores(self) -> NDArray[np.float64]:
        """Return an array to be minimised: minus worth, then the costs. Unknown costs count as infinite."""
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


def initial_population(
    task: Task, pool: Sequence[OpPath], size: int, rng: np.random.Generator, most: int | None = None
) -> tuple[list[OpPath], int]:
    """Return the best feasible paths of the pool, completed with random feasible ones, and how many are from the pool.

    The pool is sorted, best path first. At most `most` paths are taken from it, by default `size`.
    """
    distinct = list(dict.fromkeys(tuple(path) for path in pool))
    feasible = task.feasible(np.array(distinct)).tolist() if distinct else []
    chosen = [path for path, fits in zip(distinct, feasible, strict=True) if fits][: size if most is None else most]
    return chosen + task.new_random_paths(size - len(chosen), set(chosen), rng), len(chosen)


def one_change(paths: IntArray, num_ops: Sequence[int]) -> IntArray:
    """Return all paths that differ in one op from one of n paths, path by path: (n * changes, layers)."""
    cells = [(layer, op) for layer, ops in enumerate(num_ops) for op in range(ops)]
    layers, ops = np.array(cells).T
    changed = np.repeat(paths[:, None], len(cells), axis=1)
    changed[:, np.arange(len(cells)), layers] = ops
    return changed[(changed != paths[:, None]).any(axis=2)]


def make_task(
    space: Space,
    budget: Budget,
    objectives: Sequence[str] = (),
    latency: CostTable | PricesPaths | None = None,
    score: Score | None = None,
) -> Task:
    """Return a task. Without objectives, the limited costs are minimised, or multiply-adds if nothing is limited."""
    if latency is not None and not isinstance(latency, CostTable):
        latency = latency.cost_table(space)
    names = tuple(objectives) or tuple(budget.limits()) or ("macs",)
    tables = {
        **cost_tables_for(space, {*names, *budget.limits()}),
        **({} if latency is None else {"latency_ms": latency}),
    }
    for name in {*names, *budget.limits()}:
        if name not in tables:
            raise GreedyNASError(
                "a latency limit needs a latency table" if name == "latency_ms" else f"unknown cost {name!r}"
            )
    return Task(space, budget, names, tables, score)
