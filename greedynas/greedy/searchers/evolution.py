"""Evolutionary search: Algorithm 3 of the paper, NSGA-II starting from the candidate pool.

Non-dominated sorting, crowding distance, tournament and variation operators are pymoo's. Implemented here are the start
from the pool, hard limits (a path that violates one is rejected), a single evaluation of each path, and the selection
by accuracy from the last front, which does not fit as a whole.
"""

import numpy as np
from pymoo.core.population import Population
from pymoo.core.problem import Problem
from pymoo.core.variable import Choice
from pymoo.operators.crossover.ux import UniformCrossover
from pymoo.operators.mutation.rm import ChoiceRandomMutation
from pymoo.operators.selection.tournament import TournamentSelection, compare
from pymoo.operators.survival.rank_and_crowding.metrics import calc_crowding_distance
from pymoo.util.nds.non_dominated_sorting import NonDominatedSorting

from greedynas.greedy.searchers.task import STALE_ROUNDS, Found, Plan, Proposal, Searcher, Task, initial_population
from greedynas.spaces.costs import IntArray
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space


def evolution(plan: Plan) -> Searcher:
    """Propose the initial population and then generations of offspring: Algorithm 3."""
    task, size = plan.task, plan.population
    paths, from_pool = initial_population(task, plan.pool, size, plan.rng(0))
    everything = yield Proposal(paths, from_pool=from_pool)
    population = survivors(task, everything, size)
    for generation in range(1, plan.generations):
        seen = {entry.path for entry in everything}
        offspring, rejected = make_new_population(task, population, seen, size, plan.rng(generation))
        if not offspring:
            return  # every feasible path has been evaluated
        found = yield Proposal(offspring, rejected=rejected)
        everything = everything + found
        population = survivors(task, population + found, size)


def make_new_population(
    task: Task, population: list[Found], seen: set[OpPath], size: int, rng: np.random.Generator
) -> tuple[list[OpPath], int]:
    """Return offspring by binary tournament, uniform crossover and mutation, and how many others were rejected."""
    individuals, problem = _individuals(task, population), _problem(task.space)
    tournament = TournamentSelection(func_comp=_by_rank_then_crowding)
    offspring: dict[OpPath, None] = {}
    rejected = stale = 0
    while len(offspring) < size and stale < STALE_ROUNDS:
        parents = tournament.do(problem, individuals, size // 2 + 1, n_parents=2, to_pop=False, random_state=rng)
        children = UniformCrossover().do(problem, individuals, parents, random_state=rng)
        children = ChoiceRandomMutation().do(problem, children, random_state=rng)
        paths = children.get("X").astype(np.int64)
        feasible = task.feasible(paths)
        rejected += int((~feasible).sum())
        new = [path for path in map(tuple, paths[feasible].tolist()) if path not in seen and path not in offspring]
        offspring.update((path, None) for path in new)
        stale = 0 if new else stale + 1
    chosen = list(offspring)[:size]
    return chosen + task.new_random_paths(size - len(chosen), seen | set(chosen), rng), rejected


def survivors(task: Task, candidates: list[Found], size: int) -> list[Found]:
    """Return the `size` survivors: whole fronts while they fit, then the most accurate paths of the next front."""
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
    """Return a population as pymoo represents it, with rank and crowding distance."""
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
