"""Time several things beside each other, so that drift and other programs meet all of them alike.

They take turns, round after round. Disturbances only ever add time: of the medians of one thing, one for each round, the
lowest counts.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

WARMUP = 3  # runs of each before the first round
RUNS = 5  # of each in a round; their median counts

Runner = Callable[[], float]  # runs something once and returns milliseconds


def take_turns(
    runners: Sequence[Runner],
    rounds: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    between: Callable[[], Any] = lambda: None,
) -> NDArray[np.float64]:
    """Time runners in turns.

    Args:
        runners: What is timed.
        rounds: How often each has its turn, of RUNS runs.
        progress: Called after each round with the rounds that are done and all rounds.
        between: Called before each run.

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
    """Return what each runner takes when nothing disturbs it, from the medians of `take_turns`."""
    return medians.min(axis=1)
