"""Search for the best path under a budget: Algorithm 3 of the paper (NSGA-II from the candidate pool), and random search.

Built from pymoo's parts: its non-dominated sorting, crowding distance, tournament and variation operators. Ours are the
start from the pool, hard limits (a violating path is ditched for good), one evaluation a path ever, and the last front that
does not fit being sorted by accuracy. Each generation draws from its own stream, so the state at any generation follows
from the paths evaluated so far: a search is resumed by replaying them.
"""

from collections.abc import Iterator, Sequence

from greedynas.greedy.searchers.evolution import evolutionary_search
from greedynas.greedy.searchers.random import random_search
from greedynas.greedy.searchers.task import Accuracies, Found, Searched, Task, make_task
from greedynas.runtime.errors import unknown
from greedynas.spaces.budget import Budget
from greedynas.spaces.costs import CostTable
from greedynas.spaces.paths import OpPath
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
