"""The journal of a training: losses are checked, metrics written, callbacks called, progress shown."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from greedynas.rundir.callbacks import Callback, first_reason, make_callbacks
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import Records
from greedynas.runtime.parallel import ranks
from greedynas.runtime.terminal import text_column
from greedynas.spaces.paths import OpPath


class Counters(Protocol):
    """What the state of any training counts."""

    step: int
    epoch: int
    optimization_images: int
    recent_losses: list[float]
    metrics_length: int
    seconds: float


class Journal(ABC):
    """Looks at losses, writes metrics, moves the display. Without a folder, or on another rank than 0, nothing is written."""

    def __init__(
        self,
        folder: Path | None,
        state: Counters,
        what: str,
        steps: int,
        steps_per_epoch: int,
        log_every: int,
        console: Console | None,
        callbacks: Sequence[Callback] = (),
    ):
        if not ranks.is_first():
            folder, console, callbacks = None, None, ()
        self.state = state
        self._steps_per_epoch, self._log_every = steps_per_epoch, log_every
        self._pending: list[
            tuple[int, OpPath | None, Tensor]
        ] = []  # losses not yet looked at: looking waits for the GPU
        self._time, self._images = time.monotonic(), state.optimization_images
        self._records = None if folder is None else Records(folder / "metrics.jsonl", state.metrics_length)
        self._callbacks = [*callbacks, *_usual_callbacks(folder)]
        for callback in self._callbacks:
            callback.begin(folder, state.step)
        self._progress = _progress(console)
        self._task = self._progress.add_task(what, total=steps, completed=state.step, told="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._records is not None:
            self._records.close()
        for callback in self._callbacks:
            callback.end()

    def step(self, loss: Tensor, path: OpPath | None = None) -> None:
        """After every update."""
        step = self.state.step
        self._pending.append((step, path, loss))
        due = step % self._log_every == 0 or step % self._steps_per_epoch == 0
        if due or loss.device.type == "cpu":
            self.look_at_losses()
        if due:
            self._log()

    def look_at_losses(self) -> None:
        """Find the first loss that is not a number, before anything that follows from it is saved."""
        values = torch.stack([loss for _, _, loss in self._pending]).tolist() if self._pending else []
        for (step, path, _), value in zip(self._pending, values, strict=True):
            if not math.isfinite(value):
                raise self.diverged(step, path)
        self.state.recent_losses += values
        self._pending.clear()

    def flush(self) -> None:
        """Before a checkpoint: all metrics are written, and the state knows how long they are."""
        self.look_at_losses()
        if self._records is not None:
            self.state.metrics_length = self._records.flush()

    def sync(self) -> None:
        """And on the disk. Any thread may call this."""
        if self._records is not None:
            self._records.sync()

    def reason_to_stop(self) -> str | None:
        """Return why a callback wants the training to end after this epoch, the same on every rank."""
        reason: str | None = ranks.broadcast(first_reason(self._callbacks, self.state) if ranks.is_first() else None)
        return reason

    @abstractmethod
    def diverged(self, step: int, path: OpPath | None = None) -> GreedyNASError: ...

    @abstractmethod
    def facts(self, step: int) -> dict[str, Any]:
        """What a line of kind `step` says besides the loss and the clock; `step` was just done."""

    def told(self) -> str:
        """What the display says between the loss and the speed."""
        return ""

    def _log(self) -> None:
        state, now = self.state, time.monotonic()
        rate = (state.optimization_images - self._images) / max(now - self._time, 1e-9)
        state.seconds += now - self._time
        self._time, self._images = now, state.optimization_images
        loss = float(np.mean(state.recent_losses))
        state.recent_losses = []
        self._write("step", loss=loss, **self.facts(state.step - 1), images_per_second=rate, seconds=state.seconds)
        told = f"epoch {state.epoch + 1}  loss {loss:.3f}{self.told()}  {rate:,.0f} images/s"
        self._progress.update(self._task, completed=state.step, told=told)

    def _write(self, kind: str, **values: Any) -> None:
        if self._records is not None:
            self._records.write(kind=kind, step=self.state.step, epoch=self.state.epoch, **values)
        for callback in self._callbacks:
            callback.log(kind, self.state.step, self.state.epoch, values)


def _progress(console: Console | None) -> Progress:
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), text_column("{task.fields[told]}"))
    quiet = console is None or not console.is_terminal
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=quiet)


def _usual_callbacks(folder: Path | None) -> list[Callback]:
    """Return TensorBoard's callback for a training that is saved, where TensorBoard is installed."""
    return make_callbacks(["tensorboard"]) if folder is not None and find_spec("tensorboard") is not None else []
