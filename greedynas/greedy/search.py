"""Search for the best path under a budget, by any searcher and any evaluator.

A searcher draws all that is random from streams of its own, so the state at any moment follows from the paths evaluated so
far: a search is resumed by replaying them.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

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
) -> Searched:
    """Search a space for the best path within a budget.

    Args:
        space: The space.
        evaluate: Takes distinct paths and returns their accuracies, by a supernet or by anything else.
        budget: The limits. Without one, every path is feasible.
        searcher: "evolution" starts from the pool's best feasible paths (Algorithm 3), "random" draws as many paths at
            random; or the name of a registered searcher.
        pool: The candidate pool of the supernet's training, best path first.
        population_size: How many paths are evaluated in a generation.
        generations: How many generations there are, the initial one among them.
        objectives: Costs that are to be small: "macs", "params", "latency_ms". Without any, the limited ones.
        latency: A latency table, needed where latency is limited or an objective.
        seed: Of the random draws.
        score: What paths are ranked by in the end instead of their accuracies.

    Returns:
        The evaluated paths: `.best` is the most accurate one (of several the cheapest), `.front()` the best at every cost,
        `.found` all of them.

    Raises:
        GreedyNASError: If the budget cannot be kept, or a name is unknown.

    Example:
        >>> import greedynas
        >>> space = greedynas.load_space("macro")
        >>> budget = greedynas.Budget(max_macs=50_000_000)
        >>> result = greedynas.search(space, lambda paths: [sum(path) / 16 for path in paths], budget, generations=4)
        >>> len(result.found), int(space.costs([result.best.path]).macs[0]) <= 50_000_000
        (200, True)
    """
    task = make_task(space, budget or Budget(), objectives, latency, score)
    plan = Plan(task, pool, population_size, generations, seed)
    *_, result = search_steps(plan, evaluate, searcher)
    return result


def search_steps(
    plan: Plan, evaluate: Accuracies, searcher: str = "evolution", earlier: Sequence[Found] = ()
) -> Iterator[Searched]:
    """Search generation by generation, and yield all that is evaluated so far after each.

    `earlier` are the results of a search that was interrupted: they are taken instead of evaluating again.
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
    """Return the distinct paths of a proposal that keep every limit, and how many do not. Limits are hard."""
    paths = list(dict.fromkeys(parse_path(path, plan.task.space) for path in proposed))
    feasible = plan.task.feasible(np.array(paths)) if paths else np.zeros(0, bool)
    kept = [path for path, fits in zip(paths, feasible.tolist(), strict=True) if fits]
    return kept, len(paths) - len(kept)


def _remembering(evaluate: Accuracies, earlier: Sequence[Found]) -> Callable[[list[OpPath], int], list[Found]]:
    """Return an evaluation of a generation that takes known results instead of evaluating again."""
    known = {entry.path: entry.accuracy for entry in earlier}

    def evaluation(paths: list[OpPath], generation: int) -> list[Found]:
        new = [path for path in paths if path not in known]
        known.update(zip(new, map(float, evaluate(new)) if new else (), strict=True))
        return [Found(path, known[path], generation) for path in paths]

    return evaluation
