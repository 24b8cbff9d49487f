"""Regularised evolution: Real et al., Regularized Evolution for Image Classifier Architecture Search, AAAI 2019.

The parent of a new path is the best of a few random members of the population, and differs from it in one op. The
oldest members die, however good they are. The original evaluates one path at a time; here a tenth of a population
is evaluated together, because a supernet shares the computation of common layers.
"""

from greedynas.greedy.searchers.task import Plan, Proposal, Searcher, initial_population
from greedynas.spaces.paths import OpPath

SAMPLE = 0.5  # share of the population from which a parent is chosen: 50 of 100 in the paper's first experiments
BROOD = 0.1  # share of the population that is born, evaluated and replaced together
TRIES = 20  # parents whose neighbours have all been evaluated, after which a random path is born


def aging(plan: Plan) -> Searcher:
    """Propose the initial population, and then children of the best of random members, while the oldest die."""
    task, size = plan.task, plan.population
    paths, from_pool = initial_population(task, plan.pool, size, plan.rng(0))
    population = yield Proposal(paths, from_pool=from_pool)  # oldest first
    seen, generation, brood = set(paths), 0, max(1, round(BROOD * size))
    while True:
        generation += 1
        rng, children = plan.rng(generation), dict[OpPath, None]()
        for _ in range(TRIES * brood):
            if len(children) == brood:
                break
            members = rng.choice(len(population), max(1, round(SAMPLE * len(population))), replace=False)
            parent = max((population[i] for i in members.tolist()), key=lambda entry: entry.accuracy)
            new = [path for path in task.neighbours(parent.path) if path not in seen and path not in children]
            if new:
                children[new[rng.integers(len(new))]] = None
        born = [*children, *task.new_random_paths(brood - len(children), seen | set(children), rng)]
        if not born:
            return  # every feasible path has been evaluated
        seen.update(born)
        population = (population + (yield Proposal(born)))[-size:]
