"""Derivation: the most probable path of a method with architecture parameters, within hard limits.

The papers of these methods take the most probable op of every layer, whose cost is only near the target of the training.
Here the path with the highest sum of log p is found among all paths within the limits, by dynamic programming over the
cost tables (`Task.ranked`). Without limits, it is the path of the papers.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from greedynas.greedy.searchers.task import Plan, Proposal, Searcher, Task
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.text import logger
from greedynas.spaces.paths import OpPath

LEAST = 1e-12  # a smaller probability counts as this one, so that its logarithm is finite
MOST_STEPS = 2_000_000  # of the exact search, after which the best of random paths is taken
RANDOM_PATHS = 100_000


def derivation(plan: Plan) -> Searcher:
    """Propose the most probable path within the limits, and nothing else."""
    if not plan.probabilities:
        raise GreedyNASError(
            "the searcher 'derivation' takes the path that a method with architecture parameters has learned, such as "
            "--sampler fbnet; search this supernet with another one, such as evolution"
        )
    yield Proposal([most_probable(plan.task, plan.probabilities, plan.rng(0))])


def most_probable(task: Task, probabilities: Sequence[NDArray[np.float64]], rng: np.random.Generator) -> OpPath:
    """Return the feasible path with the highest product of probabilities."""
    values = [np.log(np.maximum(layer / layer.sum(), LEAST)) for layer in probabilities]
    for path in task.ranked(values, MOST_STEPS):
        return path
    logger.warning("the most probable path is not certain: it is the best of %d random ones", RANDOM_PATHS)
    paths = np.array(task.sample(RANDOM_PATHS, rng))
    sums = sum(layer[paths[:, i]] for i, layer in enumerate(values))
    return tuple(paths[int(np.argmax(sums))].tolist())
