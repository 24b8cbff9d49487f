"""Checkpoints of a training: one file each, named after its step and content; loading executes nothing."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from greedynas.runtime import signals
from greedynas.runtime.errors import GreedyNASError, first_problem
from greedynas.runtime.files import TEMPORARY, write_atomically
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger as logger

AVERAGED = "ema."  # prefix of the names of averaged weights in a checkpoint
KEEP = 2  # number of checkpoints that are kept by default
Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]  # tensors by name, and everything else
DAMAGE = (
    OSError,
    SafetensorError,
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
)  # raised by reading a damaged checkpoint
_CHECKPOINT = re.compile(r"step-(\d+)-([0-9a-f]{16})\.safetensors")


class Checkpoints:
    """The checkpoints of a training: one file each, named after its step and content. `lasting` steps are kept."""

    def __init__(self, folder: Path, keep: int = KEEP):
        self.folder, self.keep = folder, keep
        self.lasting: frozenset[int] = frozenset()
        self._damaged: set[Path] = set()

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint and remove old ones, except lasting ones and the newest earlier ones that are not damaged.

        Another one of the same step is removed, too (it was saved before the end of its epoch), and so are later ones
        (they were damaged).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"state": json.dumps(state)})
        digest = hashlib.sha256(data).hexdigest()[:16]
        new = self.folder / f"step-{step:09d}-{digest}.safetensors"
        write_atomically(new, data)
        others = [file for file in self.files() if file != new]
        earlier = [file for file in others if step_of(file) < step and file not in self._damaged]
        keep = {*earlier[: self.keep - 1], *(file for file in earlier if step_of(file) in self.lasting)}
        for file in others:
            if file not in keep:
                file.unlink()
        for file in self.folder.glob(f"*{TEMPORARY}"):  # left by a crash
            file.unlink()

    def files(self) -> list[Path]:
        """Return the files of the checkpoints, newest first."""
        files = self.folder.glob("step-*.safetensors") if self.folder.is_dir() else []
        return sorted((file for file in files if _CHECKPOINT.fullmatch(file.name)), reverse=True)

    def load(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None; rank 0 reads it for all ranks."""
        tensors, state = (self._newest() if ranks.is_first() else None) or (None, None)
        state = ranks.broadcast(state)
        return None if state is None else (ranks.broadcast_tensors(tensors), state)

    def _newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, and log a warning for each damaged one."""
        files = self.files()
        for file in files:
            try:
                return read_checkpoint(file)
            except DAMAGE as error:
                self._damaged.add(file)
                logger.warning("checkpoint %s is damaged (%s); going back to the previous one", file.name, error)
        if files:
            logger.warning("no checkpoint is intact; starting from the beginning")
        return None


def step_of(file: Path) -> int:
    """Return the step of a checkpoint, from the name of its file."""
    return int(file.name.split("-")[1])


def read_checkpoint(file: Path) -> Checkpoint:
    """Return the tensors and the state of a checkpoint; raise one of `DAMAGE` if the file is damaged."""
    try:
        return _read_checkpoint(file)
    except DAMAGE:
        signals.raise_lost()  # after a signal, the file itself may be intact
        raise


def _read_checkpoint(file: Path) -> Checkpoint:
    match = _CHECKPOINT.fullmatch(file.name)
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()[:16]
    if match is None or digest != match[2]:
        raise ValueError("its content does not match its name")
    with safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
        return tensors, json.loads(handle.metadata()["state"])


# The state of SGD and RMSpropTF has these names in a checkpoint; that of other optimizers is named OTHERS + its own
# name.
MEMORY = {"momentum_buffer": "momentum", "square_avg": "square_avg", "step": "step"}
OTHERS, NUMBERS = "optimizer.", "number."


@contextmanager
def checkpoint_errors(where: Path) -> Iterator[None]:
    """Turn errors of loading an intact checkpoint that does not fit this network, or is not ours, into one line."""
    try:
        yield
    except (
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        OverflowError,
    ) as error:  # raised by pydantic and by load_state_dict
        problem = first_problem(error) if isinstance(error, ValidationError) else " ".join(str(error).split())
        raise GreedyNASError(f"the checkpoint in {where} does not fit this run: {problem:.300}") from None


def training_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the weights of a network and the optimizer's state for each of them, by name."""
    tensors: dict[str, Tensor] = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{MEMORY.get(key, OTHERS + key)}.{name}"] = value
            elif isinstance(value, int | float):
                tensors[f"{NUMBERS}{key}.{name}"] = torch.tensor(value, dtype=torch.float64)
            elif value is not None:
                kind = f"the state of {type(optimizer).__name__} has {key!r}, a {type(value).__name__}"
                raise GreedyNASError(f"{kind}: a checkpoint can hold only tensors and numbers; use another optimizer")
    return tensors


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU, which nothing else writes to; GPU tensors go through pinned memory."""
    copies = {}
    for name, tensor in tensors.items():
        room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        copies[name] = room.copy_(tensor.detach(), non_blocking=True)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def load_training_tensors(net: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load tensors that `training_tensors` returned into a network and its optimizer."""
    load_weights(net, tensors)
    parameters = dict(net.named_parameters())
    keys = {short: key for key, short in MEMORY.items()}
    for full, saved in tensors.items():
        kept = next((prefix for prefix in (OTHERS, NUMBERS) if full.startswith(prefix)), "")
        short, _, name = full.removeprefix(kept).partition(".")
        if name not in parameters or not (kept or short in keys):
            continue  # a weight
        parameter = parameters[name]
        if kept == NUMBERS:
            number = float(saved.item())
            optimizer.state[parameter][short] = int(number) if number.is_integer() else number
            continue
        # State of the shape of its parameter gets its device and memory layout; a count of steps keeps its own.
        like = torch.empty_like(parameter).copy_(saved) if saved.shape == parameter.shape else saved
        optimizer.state[parameter][short if kept else keys[short]] = like.detach()


def load_weights(net: nn.Module, tensors: dict[str, Tensor], prefix: str = "net.") -> None:
    """Load the weights of a checkpoint whose names have this prefix into a network."""
    net.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})


def net_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the network in a checkpoint, under their names in the checkpoint."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith("net.")}
