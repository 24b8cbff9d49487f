"""The timing of several functions in turns, so that drift and other programs affect all of them equally.

Disturbances can only add time, so the lowest of a function's medians, one for each round, counts.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

WARMUP = 3  # runs of each function before the first round
RUNS = 5  # runs of each function in a round, of which the median is taken

Runner = Callable[[], float]  # runs something once and returns milliseconds


def take_turns(
    runners: Sequence[Runner],
    rounds: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    between: Callable[[], Any] = lambda: None,
) -> NDArray[np.float64]:
    """Time runners in turns and return their medians.

    Args:
        runners: The functions to time.
        rounds: The number of turns of each runner. A turn has RUNS runs.
        progress: A function that is called after each round with the number of finished rounds and of all rounds.
        between: A function that is called before each run.

    Returns:
        The median of each turn in milliseconds, (runners, rounds).
    """

    def run(runner: Runner) -> float:
        between()
        return runner()

    medians = np.empty((len(runners), rounds))
    for runner in runners:
        for _ in range(WARMUP):
            runner()
    for turn in range(rounds):
        for i, runner in enumerate(runners):
            medians[i, turn] = statistics.median(run(runner) for _ in range(RUNS))
        progress(turn + 1, rounds)
    return medians


def quietest(medians: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the undisturbed time of each runner: the lowest of its medians from `take_turns`."""
    return medians.min(axis=1)
