"""The search for the best path under a budget, with any searcher and any evaluator.

A searcher takes all random numbers from its own streams, so its state is determined by the paths evaluated so far: a
search is resumed by replaying them.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from greedynas.greedy.searchers import SEARCHERS
from greedynas.greedy.searchers.task import STALE_ROUNDS, Accuracies, Found, Plan, Proposal, Score, Searched, make_task
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.budget import Budget
from greedynas.spaces.costs import CostTable, PricesPaths
from greedynas.spaces.paths import OpPath, parse_path
from greedynas.spaces.space import Space


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
    latency: CostTable | PricesPaths | None = None,
    seed: int = 0,
    score: Score | None = None,
    probabilities: Sequence[NDArray[np.float64]] = (),
) -> Searched:
    """Search a space for the best path within a budget.

    Args:
        space: The space.
        evaluate: A function that takes distinct paths and returns their accuracies, from a supernet or anything else.
        budget: The limits. Without one, every path is feasible.
        searcher: "evolution" (Algorithm 3, which starts from the pool's best feasible paths), "model" (a ridge
            regression proposes paths), "aging" (regularised evolution), "local" (local search), "reinforce" (a policy
            learned by reinforcement), "derivation" (the most probable path), "random" (the same number of random
            paths), or the name of a registered searcher.
        pool: The candidate pool of the supernet's training, best path first.
        population_size: How many paths are evaluated in a generation.
        generations: The number of generations, including the initial one.
        objectives: The costs to minimise: "macs", "params", "latency_ms". By default those that the budget limits.
        latency: A latency table, needed if latency is limited or an objective.
        seed: The seed of all random draws.
        score: A function that gives the scores by which paths are ranked in the end, instead of accuracies.
        probabilities: The probabilities of the ops of each layer, which "derivation" needs.

    Returns:
        The evaluated paths: `.best` is the most accurate one (of equal ones the cheapest), `.front()` has the best at
        every cost, `.found` has all of them.

    Raises:
        GreedyNASError: If no path keeps the budget, or a name is unknown.

    Example:
        >>> import greedynas
        >>> space = greedynas.load_space("macro")
        >>> budget = greedynas.Budget(max_macs=50_000_000)
        >>> result = greedynas.search(space, lambda paths: [sum(path) / 16 for path in paths], budget, generations=4)
        >>> len(result.found), int(space.costs([result.best.path]).macs[0]) <= 50_000_000
        (200, True)
    """
    task = make_task(space, budget or Budget(), objectives, latency, score)
    plan = Plan(task, pool, population_size, generations, seed, probabilities)
    *_, result = search_steps(plan, evaluate, searcher)
    return result


def search_steps(
    plan: Plan, evaluate: Accuracies, searcher: str = "evolution", earlier: Sequence[Found] = ()
) -> Iterator[Searched]:
    """Search generation by generation and yield the result so far after each.

    `earlier` has the results of an interrupted search, which are used instead of evaluating their paths again.
    """
    result, evaluation = Searched(plan.task), _remembering(evaluate, earlier)
    proposals = SEARCHERS[searcher](plan)
    seen: set[OpPath] = set()
    generation, stale, found = 0, 0, None
    while len(seen) < plan.evaluations and stale < STALE_ROUNDS:
        try:
            proposal = proposals.send(found)
        except StopIteration:
            break
        proposal = proposal if isinstance(proposal, Proposal) else Proposal(proposal)
        paths, rejected = _feasible(plan, proposal.paths)
        new = set([path for path in paths if path not in seen][: plan.evaluations - len(seen)])
        seen |= new
        found = evaluation([path for path in paths if path in seen], generation)
        result.found += [entry for entry in found if entry.path in new]
        stale = 0 if new else stale + 1
        result.from_pool += proposal.from_pool
        result.rejected += proposal.rejected + rejected
        generation += 1
        if result.found:
            yield result
    if not result.found:
        raise GreedyNASError(f"the searcher {searcher!r} has proposed no path that keeps the budget")


def _feasible(plan: Plan, proposed: Sequence[OpPath]) -> tuple[list[OpPath], int]:
    """Return the distinct paths of a proposal that keep every limit, and the number of those that violate one."""
    paths = list(dict.fromkeys(parse_path(path, plan.task.space) for path in proposed))
    feasible = plan.task.feasible(np.array(paths)) if paths else np.zeros(0, bool)
    kept = [path for path, fits in zip(paths, feasible.tolist(), strict=True) if fits]
    return kept, len(paths) - len(kept)


def _remembering(evaluate: Accuracies, earlier: Sequence[Found]) -> Callable[[list[OpPath], int], list[Found]]:
    """Return a function that evaluates a generation and uses the results of `earlier` where it can."""
    known = {entry.path: entry.accuracy for entry in earlier}

    def evaluation(paths: list[OpPath], generation: int) -> list[Found]:
        new = [path for path in paths if path not in known]
        known.update(zip(new, map(float, evaluate(new)) if new else (), strict=True))
        return [Found(path, known[path], generation) for path in paths]

    return evaluation
