"""Random search, the baseline of Algorithm 3."""

from collections.abc import Iterator, Sequence

from greedynas.greedy.searchers.task import Accuracies, Found, Searched, Task, _remembering, new_random_paths
from greedynas.runtime.rng import stream
from greedynas.spaces.paths import OpPath


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
