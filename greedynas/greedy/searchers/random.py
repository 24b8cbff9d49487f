"""Random search, the baseline for Algorithm 3."""

from greedynas.greedy.searchers.task import Plan, Proposal, Searcher
from greedynas.spaces.paths import OpPath


def random(plan: Plan) -> Searcher:
    """Propose distinct random feasible paths, one population per generation."""
    seen: set[OpPath] = set()
    for generation in range(plan.generations):
        paths = plan.task.new_random_paths(plan.population, seen, plan.rng(generation))
        if not paths:
            return  # every feasible path has been evaluated
        seen.update(paths)
        yield Proposal(paths)
