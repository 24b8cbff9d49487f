"""What the future of a supernet training depends on, and how it goes into a checkpoint and comes out again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from typing_extensions import TypedDict

from greedynas.averaging import AveragedWeights
from greedynas.errors import GreedyNASError
from greedynas.paths import OpPath, parse_path
from greedynas.pool import CandidatePool
from greedynas.runs import Run, logger
from greedynas.schedule import corrected_images
from greedynas.space import Space, first_problem
from greedynas.supernet import Supernet

# What SGD and RMSpropTF remember of a parameter, by its name in a checkpoint.
MEMORY = {"momentum": "momentum_buffer", "square_avg": "square_avg", "step": "step"}


@dataclass
class TrainState:
    """Everything besides weights and momentum."""

    pool: CandidatePool
    step: int = 0  # updates done
    epoch: int = 0  # epochs finished
    draws: int = 0  # counts the streams of paths and of filter images
    waiting: list[list[OpPath]] = field(default_factory=list)  # what the next steps train
    snapshot: list[OpPath] = field(default_factory=list)  # the pool at the end of the epoch before
    novelty: float | None = None  # π at the end of the last epoch
    optimization_images: int = 0
    evaluation_images: int = 0
    stopped: str | None = None  # why training ended
    recent_losses: list[float] = field(default_factory=list)  # since the last line of metrics
    metrics_length: int = 0  # bytes
    seconds: float = 0.0  # wall clock, of all sessions
    measured_ratio: float | None = None  # a training step over a forward pass, on this machine

    @property
    def corrected_images(self) -> float:
        return corrected_images(self.optimization_images, self.evaluation_images)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "pool": self.pool.state()}

    @classmethod
    def from_json(cls, state: dict[str, Any], space: Space) -> "TrainState":
        """Of a checkpoint, which may be somebody else's: what is not as we write it is refused."""
        _SAVED.validate_python(state)
        waiting = [[tuple(path) for path in paths] for paths in state["waiting"]]
        snapshot = [tuple(path) for path in state["snapshot"]]
        pool = CandidatePool.from_state(state["pool"])
        for path in (*pool, *snapshot, *(path for paths in waiting for path in paths)):
            parse_path(path, space)
        return cls(**{**state, "pool": pool, "waiting": waiting, "snapshot": snapshot})


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
    snapshot: PathLists
    novelty: float | None
    optimization_images: Count
    evaluation_images: Count
    stopped: str | None
    recent_losses: list[float]
    metrics_length: Count
    seconds: float
    measured_ratio: float | None


_SAVED = TypeAdapter(_Saved)


@contextmanager
def fitting(where: Path) -> Iterator[None]:
    """A checkpoint that is whole but does not belong to this network, or was not written by us, is one line."""
    try:
        yield
    except (
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        OverflowError,
    ) as error:  # of pydantic, and of load_state_dict
        told = first_problem(error) if isinstance(error, ValidationError) else " ".join(str(error).split())
        raise GreedyNASError(f"the checkpoint in {where} does not fit this run: {told:.300}") from None


def restore_state(
    run: Run, net: Supernet, optimizer: torch.optim.Optimizer, average: AveragedWeights
) -> TrainState | None:
    """What the newest whole checkpoint holds, put into the net, its optimizer and its average."""
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        return None
    tensors, state = checkpoint
    with fitting(run.supernet):
        load_training_tensors(net, optimizer, tensors)
        average.load(tensors)
        restored = TrainState.from_json(state, net.space)
    logger.info("going on from step %d", restored.step)
    return restored


def training_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, and what the optimizer remembers of each of them."""
    tensors: dict[str, Tensor] = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        memory = optimizer.state.get(parameter, {})
        tensors |= {f"{short}.{name}": memory[key] for short, key in MEMORY.items() if key in memory}
    return tensors


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in memory that nobody else writes to, on the CPU; from a GPU through pinned memory, all at once."""
    copies = {}
    for name, tensor in tensors.items():
        room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        copies[name] = room.copy_(tensor.detach(), non_blocking=True)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def load_training_tensors(net: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    load_weights(net, tensors)
    for name, parameter in net.named_parameters():
        for short, key in MEMORY.items():
            if (saved := tensors.get(f"{short}.{name}")) is not None:
                # A parameter's own device and memory layout; a count of steps is no such thing and stays as it is.
                like = torch.empty_like(parameter).copy_(saved) if saved.shape == parameter.shape else saved
                optimizer.state[parameter][key] = like.detach()


def load_weights(net: nn.Module, tensors: dict[str, Tensor], prefix: str = "net.") -> None:
    net.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
