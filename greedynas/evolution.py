"""Search for the best path under a budget: Algorithm 3 of the paper (NSGA-II from the candidate pool), and random search.

Built from pymoo's parts: its non-dominated sorting, crowding distance, tournament and variation operators. Ours are the
start from the pool, hard limits (a violating path is ditched for good), one evaluation a path ever, and the last front that
does not fit being sorted by accuracy. Each generation draws from its own stream, so the state at any generation follows
from the paths evaluated so far: a search is resumed by replaying them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pymoo.core.population import Population
from pymoo.core.problem import Problem
from pymoo.core.variable import Choice
from pymoo.operators.crossover.ux import UniformCrossover
from pymoo.operators.mutation.rm import ChoiceRandomMutation
from pymoo.operators.selection.tournament import TournamentSelection, compare
from pymoo.operators.survival.rank_and_crowding.metrics import calc_crowding_distance
from pymoo.util.nds.non_dominated_sorting import NonDominatedSorting

from greedynas.additive import blended
from greedynas.budget import Budget
from greedynas.cost import CostTable, IntArray
from greedynas.errors import GreedyNASError, unknown
from greedynas.feasible import sample_feasible, within
from greedynas.paths import OpPath
from greedynas.space import Space
from greedynas.streams import stream

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


def search(
    space: Space,
    evaluate: Accuracies,
    budget: Budget | None = None,
    *,
    searcher: str = "evolution",
    pool: Sequence[OpPath] = (),
    population_size: int = 50,
    generations: int = 20,
    objectives: Sequence[str] = (),
    latency: CostTable | None = None,
    seed: int = 0,
    additive: float = 0.0,
) -> Searched:
    """The best path within the budget by any evaluator: `evaluate` takes distinct paths and gives their accuracies.

    With `evolution`, the pool's best feasible paths are the first generation, filled up with random ones; `random` draws as
    many paths without looking. `.best` is the most accurate path (of several the cheapest), `.front()` the best at every cost. With `additive`, this share of what both
    go by comes from an additive model, fitted to all evaluated paths.
    """
    task = make_task(space, budget or Budget(), objectives, latency, additive)
    *_, result = search_steps(task, evaluate, searcher, pool, population_size, generations, seed)
    return result


def search_steps(
    task: "Task",
    evaluate: Accuracies,
    searcher: str,
    pool: Sequence[OpPath],
    population_size: int,
    generations: int,
    seed: int,
    earlier: Sequence[Found] = (),
) -> Iterator[Searched]:
    """The same search generation by generation, going on from what an interrupted one has evaluated."""
    if searcher == "random":
        paths = population_size * generations
        return random_search(task, evaluate, paths=paths, step=population_size, seed=seed, earlier=earlier)
    if searcher != "evolution":
        raise unknown("searcher", searcher, ["evolution", "random"])
    return evolutionary_search(
        task,
        evaluate,
        pool=pool,
        population_size=population_size,
        generations=generations,
        seed=seed,
        earlier=earlier,
    )


def evolutionary_search(
    task: Task,
    evaluate: Accuracies,
    *,
    pool: Sequence[OpPath] = (),
    population_size: int = 50,
    generations: int = 20,
    seed: int = 0,
    earlier: Sequence[Found] = (),
) -> Iterator[Searched]:
    """Algorithm 3, yielding after every generation; the initial population is the first of them.

    `earlier` are the results of a search that was interrupted: they are taken instead of evaluating again.
    """
    result, evaluation = Searched(task), _remembering(evaluate, earlier)

    paths, result.from_pool = initial_population(task, pool, population_size, stream(seed, "search", 0))
    result.found += evaluation(paths, 0)
    population = survivors(task, result.found, population_size)
    yield result
    for generation in range(1, generations):
        rng = stream(seed, "search", generation)
        seen = {entry.path for entry in result.found}
        offspring, ditched = make_new_population(task, population, seen, population_size, rng)
        if not offspring:
            return  # every feasible path has been evaluated
        result.ditched += ditched
        found = evaluation(offspring, generation)
        result.found += found
        population = survivors(task, population + found, population_size)
        yield result


def random_search(
    task: Task, evaluate: Accuracies, *, paths: int = 1000, step: int = 50, seed: int = 0, earlier: Sequence[Found] = ()
) -> Iterator[Searched]:
    """The baseline: distinct feasible paths at random, `step` at a time."""
    result, evaluation = Searched(task), _remembering(evaluate, earlier)
    seen: set[OpPath] = set()
    for generation in range(-(-paths // step)):
        wanted = min(step, paths - len(seen))
        drawn = new_random_paths(task, wanted, seen, stream(seed, "search", generation))
        if not drawn:
            return
        seen.update(drawn)
        result.found += evaluation(drawn, generation)
        yield result


def _remembering(evaluate: Accuracies, earlier: Sequence[Found]) -> Callable[[list[OpPath], int], list[Found]]:
    """Evaluation of a generation that takes the results of an interrupted search instead of evaluating again."""
    known = {entry.path: entry.accuracy for entry in earlier}

    def evaluation(paths: list[OpPath], generation: int) -> list[Found]:
        new = [path for path in paths if path not in known]
        known.update(zip(new, evaluate(new) if new else (), strict=True))
        return [Found(path, known[path], generation) for path in paths]

    return evaluation


def initial_population(
    task: Task, pool: Sequence[OpPath], size: int, rng: np.random.Generator
) -> tuple[list[OpPath], int]:
    """The pool's best feasible paths (it is given best first), filled up with random feasible ones."""
    distinct = list(dict.fromkeys(tuple(path) for path in pool))
    feasible = task.feasible(np.array(distinct)).tolist() if distinct else []
    chosen = [path for path, fits in zip(distinct, feasible, strict=True) if fits][:size]
    return chosen + new_random_paths(task, size - len(chosen), set(chosen), rng), len(chosen)


def new_random_paths(task: Task, n: int, seen: set[OpPath], rng: np.random.Generator) -> list[OpPath]:
    """n feasible paths that were not seen; fewer where there are no more to be found."""
    found: dict[OpPath, None] = {}
    for _ in range(STALE_ROUNDS):
        if len(found) >= n:
            break
        found.update((path, None) for path in task.sample(4 * n, rng) if path not in seen)
    return list(found)[:n]


def make_new_population(
    task: Task, population: list[Found], seen: set[OpPath], size: int, rng: np.random.Generator
) -> tuple[list[OpPath], int]:
    """Offspring by binary tournament, uniform crossover and mutation; (new feasible paths, how many were ditched)."""
    individuals, problem = _individuals(task, population), _problem(task.space)
    tournament = TournamentSelection(func_comp=_by_rank_then_crowding)
    offspring: dict[OpPath, None] = {}
    ditched = stale = 0
    while len(offspring) < size and stale < STALE_ROUNDS:
        parents = tournament.do(problem, individuals, size // 2 + 1, n_parents=2, to_pop=False, random_state=rng)
        children = UniformCrossover().do(problem, individuals, parents, random_state=rng)
        children = ChoiceRandomMutation().do(problem, children, random_state=rng)
        paths = children.get("X").astype(np.int64)
        feasible = task.feasible(paths)
        ditched += int((~feasible).sum())
        new = [path for path in map(tuple, paths[feasible].tolist()) if path not in seen and path not in offspring]
        offspring.update((path, None) for path in new)
        stale = 0 if new else stale + 1
    chosen = list(offspring)[:size]
    return chosen + new_random_paths(task, size - len(chosen), seen | set(chosen), rng), ditched


def survivors(task: Task, candidates: list[Found], size: int) -> list[Found]:
    """Whole fronts while they fit; the first that does not is sorted by accuracy and cut."""
    kept: list[Found] = []
    for front in NonDominatedSorting().do(task.scores(candidates)):
        members = [candidates[i] for i in front]
        if len(kept) + len(members) > size:
            members.sort(key=lambda entry: -entry.accuracy)
        kept += members[: size - len(kept)]
        if len(kept) == size:
            break
    return kept


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


def _individuals(task: Task, population: list[Found]) -> Population:
    """Pymoo's form of a population, with rank and crowding distance."""
    scores = task.scores(population)
    ranks, crowding = np.zeros(len(population), dtype=int), np.zeros(len(population))
    for rank, front in enumerate(NonDominatedSorting().do(scores)):
        ranks[front] = rank
        crowding[front] = calc_crowding_distance(scores[front]) if len(front) > 2 else np.inf
    paths = np.array([entry.path for entry in population])
    return Population.new("X", paths, "F", scores, "rank", ranks, "crowding", crowding)


def _by_rank_then_crowding(
    population: Population, pairs: IntArray, random_state: np.random.Generator, **_: object
) -> IntArray:
    ranks, crowding = population.get("rank"), population.get("crowding")
    winners = []
    for a, b in pairs:
        if ranks[a] != ranks[b]:
            winners.append(a if ranks[a] < ranks[b] else b)
        else:
            better = {"method": "larger_is_better", "return_random_if_equal": True, "random_state": random_state}
            winners.append(compare(a, crowding[a], b, crowding[b], **better))
    return np.array(winners, dtype=int)


def _problem(space: Space) -> Problem:
    return Problem(vars={str(i): Choice(options=np.arange(count)) for i, count in enumerate(space.num_ops)})
