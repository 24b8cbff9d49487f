"""What the future of a supernet training depends on, and how it goes into a checkpoint and comes out again."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from greedynas.paths import OpPath
from greedynas.pool import CandidatePool
from greedynas.runs import Run, logger
from greedynas.schedule import corrected_images
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
    def from_json(cls, state: dict[str, Any]) -> "TrainState":
        waiting = [[tuple(path) for path in paths] for paths in state["waiting"]]
        snapshot = [tuple(path) for path in state["snapshot"]]
        pool = CandidatePool.from_state(state["pool"])
        return cls(**{**state, "pool": pool, "waiting": waiting, "snapshot": snapshot})


def save_state(run: Run, state: TrainState, net: Supernet, optimizer: torch.optim.Optimizer) -> None:
    """Weights, momentum and state as one checkpoint."""
    run.save_checkpoint(state.step, training_tensors(net, optimizer), state.to_json())


def restore_state(run: Run, net: Supernet, optimizer: torch.optim.Optimizer) -> TrainState | None:
    """What the newest whole checkpoint holds, put into the net and its optimizer."""
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        return None
    tensors, state = checkpoint
    load_training_tensors(net, optimizer, tensors)
    restored = TrainState.from_json(state)
    logger.info("going on from step %d", restored.step)
    return restored


def training_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, and what the optimizer remembers of each of them."""
    tensors: dict[str, Tensor] = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        memory = optimizer.state.get(parameter, {})
        tensors |= {f"{short}.{name}": memory[key] for short, key in MEMORY.items() if key in memory}
    return tensors


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
