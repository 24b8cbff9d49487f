"""Algorithm 3 of the paper: NSGA-II from the candidate pool."""

from collections.abc import Iterator, Sequence

import numpy as np
from pymoo.core.population import Population
from pymoo.core.problem import Problem
from pymoo.core.variable import Choice
from pymoo.operators.crossover.ux import UniformCrossover
from pymoo.operators.mutation.rm import ChoiceRandomMutation
from pymoo.operators.selection.tournament import TournamentSelection, compare
from pymoo.operators.survival.rank_and_crowding.metrics import calc_crowding_distance
from pymoo.util.nds.non_dominated_sorting import NonDominatedSorting

from greedynas.greedy.searchers.task import (
    STALE_ROUNDS,
    Accuracies,
    Found,
    Searched,
    Task,
    _remembering,
    new_random_paths,
)
from greedynas.runtime.rng import stream
from greedynas.spaces.costs import IntArray
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space


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


def initial_population(
    task: Task, pool: Sequence[OpPath], size: int, rng: np.random.Generator
) -> tuple[list[OpPath], int]:
    """The pool's best feasible paths (it is given best first), filled up with random feasible ones."""
    distinct = list(dict.fromkeys(tuple(path) for path in pool))
    feasible = task.feasible(np.array(distinct)).tolist() if distinct else []
    chosen = [path for path, fits in zip(distinct, feasible, strict=True) if fits][:size]
    return chosen + new_random_paths(task, size - len(chosen), set(chosen), rng), len(chosen)


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
