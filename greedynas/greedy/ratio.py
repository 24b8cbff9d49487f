"""The cost of a training step in forward passes of the same images on this machine: r of the paper's Table 1.

A clock alone cannot distinguish a slow step from a busy machine. Steps and passes are therefore timed in turn, and
their ratio is used only if the turns agree with each other and, on a CPU, with the CPU time of the process.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from greedynas.data.datasets import Data
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.steps import supernet_optimizer
from greedynas.models.supernet import Supernet
from greedynas.runtime.devices import autocast, full_precision
from greedynas.runtime.parallel import ranks
from greedynas.runtime.stopwatch import clock
from greedynas.runtime.text import logger

FEWEST, MOST = 5, 9  # turns that are timed
PATIENCE = 5.0  # seconds after which FEWEST turns are enough
ATTEMPTS = 3  # the number of first epochs at whose end the ratio is measured, until it succeeds

LEAST = 1.5  # a step has a forward and a backward pass, so a smaller ratio is a failed measurement
SPREAD = 0.3  # the middle half of the turns may differ by this share of their median
DISAGREEMENT = 0.25  # the median may differ from that of CPU time by this share


@dataclass(frozen=True)
class Turn:
    """The seconds of one training step and of the forward pass after it."""

    train: float
    evaluate: float
    train_cpu: float  # CPU time of this process
    evaluate_cpu: float

    @property
    def ratio(self) -> float:
        return self.train / max(self.evaluate, 1e-9)

    @property
    def cpu_ratio(self) -> float:
        return self.train_cpu / max(self.evaluate_cpu, 1e-9)


@dataclass(frozen=True)
class Measurement:
    """A ratio, or None with a message that says why it could not be measured."""

    ratio: float | None
    message: str


def time_turns(train: Callable[[], None], evaluate: Callable[[], None], device: torch.device) -> list[Turn]:
    """Time both functions in turn, after an untimed first turn in which kernels are chosen and memory is allocated."""
    train()
    evaluate()
    turns: list[Turn] = []
    start = time.perf_counter()
    while len(turns) < FEWEST or (len(turns) < MOST and time.perf_counter() - start < PATIENCE):
        (wall, cpu), (other_wall, other_cpu) = clock(train, device), clock(evaluate, device)
        turns.append(Turn(wall, other_wall, cpu, other_cpu))
    return turns


def judge(turns: Sequence[Turn], device: torch.device) -> Measurement:
    """Return the median ratio, or None if the turns do not agree or the median is impossible."""
    low, ratio, high = statistics.quantiles([turn.ratio for turn in turns], n=4, method="inclusive")
    spread = f"the middle half of {len(turns)} measurements lies between {low:.2f} and {high:.2f}"
    problem = None
    if high - low > SPREAD * ratio:
        problem = spread
    elif device.type == "cpu" and _differ(ratio, by_cpu := statistics.median(turn.cpu_ratio for turn in turns)):
        problem = f"{ratio:.2f} by the clock, {by_cpu:.2f} by CPU time"
    elif not plausible(ratio):
        problem = f"{ratio:.2f} is less than any training step can cost"
    if problem is not None:
        return Measurement(
            None, f"the cost of a training step in forward passes could not be measured ({problem}): {BUSY}"
        )
    return Measurement(ratio, f"a training step costs {ratio:.2f} forward passes here; {spread}")


BUSY = "the machine was busy with something else"


def plausible(ratio: float | None) -> bool:
    """Return whether a ratio is possible. Runs of earlier versions may have stored impossible ones."""
    return ratio is not None and ratio >= LEAST


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > DISAGREEMENT * max(one, other)


def measure_once(
    state: TrainState, net: Supernet, data: Data, settings: TrainSettings, precision: str, eval_precision: str
) -> None:
    """Measure the ratio at the end of an epoch unless the state has it, in the first ATTEMPTS epochs, on the first rank."""
    if state.measured_ratio is None and state.epoch <= ATTEMPTS:
        state.measured_ratio = ranks.on_first(lambda: measure_ratio(net, data, settings, precision, eval_precision))


def measure_ratio(
    net: Supernet, data: Data, settings: TrainSettings, precision: str, eval_precision: str
) -> float | None:
    """Return the time of a training step over that of a forward pass of the same images, or None on a busy machine.

    Both are measured on a copy of one path.
    """
    images, labels = data.val.eval_batch(np.arange(min(settings.batch_size, len(data.val))))
    network = net.subnet([count - 1 for count in net.space.num_ops]).train()
    optimizer = supernet_optimizer(network, settings)

    def train() -> None:
        optimizer.zero_grad()
        with autocast(images.device, precision):
            logits = network(images)
        F.cross_entropy(full_precision(logits), labels).backward()
        optimizer.step()

    def evaluate() -> None:
        with torch.no_grad(), autocast(images.device, eval_precision):
            network(images)

    found = judge(time_turns(train, evaluate, images.device), images.device)
    logger.info(found.message)
    return found.ratio
