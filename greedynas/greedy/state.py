"""The state of a supernet training, and how it is written to a checkpoint and restored."""

from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.samplers.learning import probabilities_in
from greedynas.greedy.schedule import corrected_images
from greedynas.models.supernet import Supernet
from greedynas.rundir.checkpoints import checkpoint_errors, load_training_tensors
from greedynas.rundir.run_directory import RunDirectory
from greedynas.runtime.text import logger
from greedynas.spaces.paths import OpPath, parse_path
from greedynas.spaces.space import Space


@dataclass
class TrainState:
    """The state of a supernet's training without weights and momentum: the pool, counters, and why it stopped.

    Attributes:
        pool: The candidate pool.
        step: The number of finished updates.
        epoch: The number of finished epochs.
        novelty: π at the end of the last epoch; None before the pool is full.
        optimization_images: The number of images that went through a training step.
        evaluation_images: The number of images that were evaluated in filterings: distinct paths times images.
        stopped: Why the training ended; None while it goes on.
        memory: What the sampler remembers from draw to draw, such as the probabilities of ops that a method has learned.

    Example:
        >>> import greedynas
        >>> state = greedynas.TrainState(greedynas.CandidatePool(100))
        >>> state.epoch, state.stopped
        (0, None)
    """

    pool: CandidatePool
    step: int = 0  # updates done
    epoch: int = 0  # epochs finished
    draws: int = 0  # counts the streams of paths and of filter images
    waiting: list[list[OpPath]] = field(default_factory=list)  # paths that the next steps train
    previous_pool: list[OpPath] = field(default_factory=list)  # the pool at the end of the previous epoch
    novelty: float | None = None  # π at the end of the last epoch
    optimization_images: int = 0
    evaluation_images: int = 0
    stopped: str | None = None  # why training ended
    recent_losses: list[float] = field(default_factory=list)  # since the last line of metrics
    metrics_length: int = 0  # bytes
    seconds: float = 0.0  # wall-clock time of all sessions
    measured_ratio: float | None = None  # cost of a training step over a forward pass, on this machine
    memory: dict[str, Any] = field(default_factory=dict)  # of the sampler, as JSON
    accuracy: float | None = None  # at the end of the last epoch, for people
    accuracy_of: str = ""  # the path that has this accuracy, in words

    @property
    def corrected_images(self) -> float:
        """The cost of the training so far in images: those trained on, plus a share of those evaluated."""
        return corrected_images(self.optimization_images, self.evaluation_images)

    def to_json(self) -> dict[str, Any]:
        """Return the state as it is stored in a checkpoint."""
        return {**vars(self), "pool": self.pool.state()}

    @classmethod
    def from_json(cls, state: dict[str, Any], space: Space) -> "TrainState":
        """Return the state in a checkpoint, after a check of all types and paths, as it may be untrusted."""
        _SAVED.validate_python(state)
        waiting = [[tuple(path) for path in paths] for paths in state["waiting"]]
        previous = [tuple(path) for path in state["previous_pool"]]
        pool = CandidatePool.from_state(state["pool"])
        for path in (*pool, *previous, *(path for paths in waiting for path in paths)):
            parse_path(path, space)
        probabilities_in(state.get("memory", {}), space.num_ops)
        return cls(**{**state, "pool": pool, "waiting": waiting, "previous_pool": previous})


Count = Annotated[int, Field(ge=0)]
PathLists = list[list[Count]]


class _SavedPool(TypedDict):
    size: Annotated[int, Field(ge=1)]
    updates: Count
    entries: list[tuple[list[Count], float, int]]


class _Saved(TypedDict):
    """A `TrainState` as JSON."""

    pool: _SavedPool
    step: Count
    epoch: Count
    draws: Count
    waiting: list[PathLists]
    previous_pool: PathLists
    novelty: float | None
    optimization_images: Count
    evaluation_images: Count
    stopped: str | None
    recent_losses: list[float]
    metrics_length: Count
    seconds: float
    measured_ratio: float | None
    memory: NotRequired[dict[str, Any]]
    # Missing in checkpoints of older versions
    accuracy: NotRequired[Annotated[float, Field(ge=0, le=1)] | None]
    accuracy_of: NotRequired[Annotated[str, Field(max_length=100)]]


_SAVED = TypeAdapter(_Saved)


def restore_state(run: RunDirectory, net: Supernet, optimizer: torch.optim.Optimizer) -> TrainState | None:
    """Load the newest complete checkpoint into the net and its optimizer and return its state, or None without one."""
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        return None
    tensors, state = checkpoint
    with checkpoint_errors(run.supernet):
        load_training_tensors(net, optimizer, tensors)
        restored = TrainState.from_json(state, net.space)
    logger.info("resuming from step %d", restored.step)
    return restored
