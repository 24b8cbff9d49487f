"""The interface of samplers, which draw the paths that the next updates of a supernet train."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from greedynas.greedy.filtering import Evaluate, Filtered
from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.samplers.learning import Learning
from greedynas.greedy.settings import SAMPLERS, TrainSettings
from greedynas.models.supernet import Mixture, Supernet
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.feasible import FeasiblePaths
from greedynas.spaces.paths import OpPath, parse_path
from greedynas.spaces.space import Space


def _no_accuracies(paths: Sequence[OpPath]) -> Sequence[float]:
    """Raise an error: the draws of a test or of a plan have no accuracies."""
    raise GreedyNASError("this draw has no accuracies")


@dataclass(frozen=True)
class Draw:
    """Everything that a sampler may use for one draw.

    Attributes:
        space: The space of the supernet.
        settings: The settings of the training, such as `m` and `k`.
        rng: The random number generator of this draw. A sampler uses no other one, so that a training can be resumed.
        step: The number of finished updates.
        filters: Whether paths are to be filtered in this draw; never during warm-up.
        epsilon: The probability of sampling from the pool in this draw.
        pool: The candidate pool.
        losses: A function that returns the losses of distinct paths, all on the same new batch of validation images.
            The evaluated images are counted.
        feasible: The paths within the limits of the training; None if it has none.
        accuracies: A function that returns the accuracies of distinct paths on the same images as `losses`.
        learning: Validation batches and a memory, with which methods learn from draw to draw.

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
    feasible: FeasiblePaths | None = None
    accuracies: Evaluate = _no_accuracies
    learning: Learning | None = None

    def uniform(self, n: int = 1) -> list[OpPath]:
        """Return n paths, each path of the space equally likely, or each one within the limits of the training."""
        drawn = self.space.sample(n, self.rng) if self.feasible is None else self.feasible.sample(n, self.rng)
        return [parse_path(path, self.space) for path in drawn]

    def explore(self) -> OpPath:
        """Return one such path."""
        return self.uniform()[0]


@dataclass(frozen=True)
class Drawn:
    """The paths of the next updates, and the filtering that chose them, if any.

    Attributes:
        updates: For each update, the paths that it trains. The gradients of several paths are added up.
        filtered: The outcome of the filtering. The paths that it kept enter the pool.
    """

    updates: list[list[OpPath]]
    filtered: Filtered | None = None

    @property
    def kept(self) -> Sequence[tuple[OpPath, float]]:
        """The paths that the filtering kept, with their losses, best first."""
        return () if self.filtered is None else self.filtered.kept


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
        ...         return [draw.uniform(2)]
        >>> Pairs().paths_per_update(greedynas.load_space("macro"))
        2
    """

    filters = False  # whether it evaluates paths for every k updates after warm-up, which estimates take into account
    fills_pool = True  # whether the paths that it evaluates enter the pool, by which a training may stop early
    supernet: type[Supernet] = Supernet  # the kind of supernet that it trains

    def check(self, space: Space) -> None:  # noqa: B027 (most samplers take every space)
        """Raise a GreedyNASError if the sampler cannot draw paths of this space."""

    def check_settings(self, space: Space, settings: TrainSettings) -> None:  # noqa: B027
        """Raise a GreedyNASError if the sampler cannot train this space with these settings."""

    def paths_per_update(self, space: Space) -> int:
        """Return the number of paths that an update trains."""
        return 1

    def evaluates(self, settings: TrainSettings) -> int:
        """Return the number of paths that it evaluates for every k updates, if it `filters`."""
        return settings.m if settings.filtering else settings.k

    def learning_paths(self, space: Space) -> int:
        """Return the number of paths that its steps on architecture parameters cost before every update."""
        return 0

    @abstractmethod
    def draw(self, draw: Draw) -> "Drawn | Sequence[Sequence[Any]]":
        """Return the paths of the next updates: for each update a list of the paths that it trains."""


class FunctionSampler(Sampler):
    """A sampler made from a function that takes a `Draw` and returns paths. Each path is trained by one update."""

    def __init__(self, function: Callable[[Draw], Sequence[Any]]):
        self.function = function

    def draw(self, draw: Draw) -> Drawn:
        return Drawn([[parse_path(path, draw.space)] for path in self.function(draw)])


def draw_updates(sampler: Sampler, draw: Draw) -> Drawn:
    """Return what a sampler draws, with every path checked. Each update must train at least one path."""
    name, drawn = draw.settings.sampler, sampler.draw(draw)
    updates = drawn.updates if isinstance(drawn, Drawn) else drawn
    if not isinstance(updates, Sequence) or not all(isinstance(paths, Sequence) for paths in updates):
        raise GreedyNASError(f"the sampler {name!r} must return a list of paths for each update, got {drawn!r:.80}")
    if not updates or not all(updates):
        raise GreedyNASError(f"the sampler {name!r} drew no path for an update")
    filtered = drawn.filtered if isinstance(drawn, Drawn) else None
    return Drawn([[_checked(path, draw.space) for path in paths] for paths in updates], filtered)


def _checked(path: Any, space: Space) -> OpPath:
    parsed = parse_path(path, space)
    return path if isinstance(path, Mixture) else parsed


def make_sampler(name: str) -> Sampler:
    """Return the sampler with this name."""
    found = SAMPLERS[name]
    return found() if isinstance(found, type) else FunctionSampler(found)


def matching_sampler(space: Space, settings: TrainSettings) -> Sampler:
    """Return the sampler of a training; raise a GreedyNASError if it cannot train this space."""
    sampler = make_sampler(settings.sampler)
    sampler.check(space)
    sampler.check_settings(space, settings)
    return sampler


def checked_sampler(net: Supernet, settings: TrainSettings) -> Sampler:
    """Return the sampler of a training; raise a GreedyNASError if it cannot train this supernet."""
    sampler = matching_sampler(net.space, settings)
    if not isinstance(net, sampler.supernet):
        raise GreedyNASError(
            f"the method {settings.sampler!r} trains a {sampler.supernet.__name__}, not a {type(net).__name__}"
        )
    return sampler


def stops_early(name: str) -> bool:
    """Return whether a training with this sampler fills the candidate pool, and may stop when it is steady."""
    sampler = make_sampler(name)
    return sampler.filters and sampler.fills_pool
