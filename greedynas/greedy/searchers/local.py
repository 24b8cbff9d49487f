"""Local search: White et al., Exploring the Loss Landscape in Neural Architecture Search, UAI 2021.

From the best of the first paths, the search moves to a better neighbour, one that differs in a single op, until no
neighbour is better, and then starts again from the best path of a new random draw. Neighbours are evaluated a tenth
of a population at a time, and the search moves as soon as one of them is better.
"""

from greedynas.greedy.searchers.task import Found, Plan, Proposal, Searcher, initial_population
from greedynas.spaces.paths import OpPath

BATCH = 0.1  # share of the population that is evaluated together


def local(plan: Plan) -> Searcher:
    """Propose the initial paths, then neighbours of the current path; after a local optimum, random paths."""
    task, batch = plan.task, max(1, round(BATCH * plan.population))
    paths, from_pool = initial_population(task, plan.pool, batch, plan.rng(0))
    found = yield Proposal(paths, from_pool=from_pool)
    seen, generation, current = set(paths), 0, _best(found)
    while True:
        generation += 1
        rng = plan.rng(generation)
        new: list[OpPath] = [path for path in task.neighbours(current.path) if path not in seen]
        chosen = [new[i] for i in rng.permutation(len(new))[:batch].tolist()]
        restart = not chosen
        if restart:
            chosen = task.new_random_paths(batch, seen, rng)
        if not chosen:
            return  # every feasible path has been evaluated
        seen.update(chosen)
        best = _best((yield Proposal(chosen)))
        current = best if restart or best.accuracy > current.accuracy else current


def _best(found: list[Found]) -> Found:
    return max(found, key=lambda entry: entry.accuracy)
