"""What a sampler is: given a supernet in training, it draws the paths of the next updates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from greedynas.greedy.filtering import Evaluate, Filtered
from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.settings import SAMPLERS, TrainSettings
from greedynas.spaces.paths import OpPath, parse_path
from greedynas.spaces.space import Space


@dataclass(frozen=True)
class Draw:
    """Everything that a sampler may use for one draw.

    Attributes:
        space: The space of the supernet.
        settings: The settings of the training, such as `m` and `k`.
        rng: The random numbers of this draw. They alone make it random, so that a training can be resumed.
        step: How many updates are done.
        filters: Whether paths are to be filtered now: never during warm-up.
        epsilon: The probability of sampling from the pool now.
        pool: The candidate pool.
        losses: Returns the loss of each of some distinct paths, all on the same new batch of validation images. Its cost is
            counted.

    Example:
        >>> import greedynas
        >>> @greedynas.register_sampler("doctest-two-paths")
        ... def two_paths(draw):
        ...     return draw.uniform(2)
        >>> "doctest-two-paths" in greedynas.registered()["sampler"]
        True
    """

    space: Space
    settings: TrainSettings
    rng: np.random.Generator
    step: int
    filters: bool
    epsilon: float
    pool: CandidatePool
    losses: Evaluate

    def uniform(self, n: int = 1) -> list[OpPath]:
        """Return n paths, each path of the space equally likely."""
        return [parse_path(path, self.space) for path in self.space.sample(n, self.rng)]


@dataclass(frozen=True)
class Drawn:
    """The paths of the next updates, and where they were filtered how.

    Attributes:
        updates: For each update the paths that it trains. The gradients of several paths are added up.
        filtered: The outcome of a filtering. What it kept enters the pool.
    """

    updates: list[list[OpPath]]
    filtered: Filtered | None = None


class Sampler(ABC):
    """The base class of samplers, which decide what paths the next updates of a supernet train.

    A function that takes a `Draw` and returns paths is enough for most samplers (`register_sampler`). Derive from this class to check
    the space, or to train several paths in one update.

    Example:
        >>> import greedynas
        >>> class Pairs(greedynas.Sampler):
        ...     def paths_per_update(self, space):
        ...         return 2
        ...     def draw(self, draw):
        ...         from greedynas.greedy.samplers.sampler import Drawn
        ...         return Drawn([draw.uniform(2)])
        >>> Pairs().paths_per_update(greedynas.load_space("macro"))
        2
    """

    filters = False  # whether it evaluates m paths for every k updates after the warm-up: the plan counts that

    def check(self, space: Space) -> None:  # noqa: B027 (most samplers take every space)
        """Raise a GreedyNASError if paths of this space cannot be drawn."""

    def paths_per_update(self, space: Space) -> int:
        """Return how many paths an update trains."""
        return 1

    @abstractmethod
    def draw(self, draw: Draw) -> Drawn:
        """Return the paths of the next updates."""


class FunctionSampler(Sampler):
    """A sampler made of a function that takes a `Draw` and returns paths, each of which one update trains."""

    def __init__(self, function: Callable[[Draw], Sequence[Any]]):
        self.function = function

    def draw(self, draw: Draw) -> Drawn:
        return Drawn([[parse_path(path, draw.space)] for path in self.function(draw)])


def make_sampler(name: str) -> Sampler:
    """Return the sampler of this name."""
    found = SAMPLERS[name]
    return found() if isinstance(found, type) else FunctionSampler(found)
