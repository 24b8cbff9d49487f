"""The journal of a training: it checks losses, writes metrics, calls callbacks and shows progress."""

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
from torch import Tensor

from greedynas.rundir.callbacks import Callback, first_reason, make_callbacks
from greedynas.rundir.progress import Progress
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import Records
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import duration
from greedynas.spaces.paths import OpPath


class Counters(Protocol):
    """The counters that the state of every training has."""

    step: int
    epoch: int
    optimization_images: int
    recent_losses: list[float]
    metrics_length: int
    seconds: float


class Journal(ABC):
    """The base of journals: checks losses, writes metrics, shows progress. Only rank 0 writes, if there is a folder."""

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
        ] = []  # losses that are not yet checked: reading them waits for the GPU
        self._time, self._images = time.monotonic(), state.optimization_images
        self._records = None if folder is None else Records(folder / "metrics.jsonl", state.metrics_length)
        self._rate = 0.0
        self._callbacks = [*callbacks, *_usual_callbacks(folder, callbacks)]
        for callback in self._callbacks:
            callback.begin(folder, state.step)
        self._what, self._console, self._steps, self._epochs = what, console, steps, steps // steps_per_epoch
        self._loss: float | None = None
        whole, early = self.work(steps), self.may_end_early
        self._progress = Progress(console, what, steps, state.step, folder=folder, work=whole, may_end_early=early)

    def __enter__(self) -> Self:
        self._announce_resuming()
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)
        if self._records is not None:
            self._records.close()
        for callback in self._callbacks:
            callback.end()

    def step(self, loss: Tensor, path: OpPath | None = None) -> None:
        """Record the loss of an update. Call this after every update."""
        step = self.state.step
        self._pending.append((step, path, loss))
        self._progress.advance(step)
        due = step % self._log_every == 0 or step % self._steps_per_epoch == 0
        if due or loss.device.type == "cpu":
            self.check_losses()
        if due:
            self._log()

    def check_losses(self) -> None:
        """Raise if a loss is not finite, before anything that depends on it is saved."""
        values = torch.stack([loss for _, _, loss in self._pending]).tolist() if self._pending else []
        for (step, path, _), value in zip(self._pending, values, strict=True):
            if not math.isfinite(value):
                raise self.diverged(step, path)
        self.state.recent_losses += values
        self._pending.clear()

    def flush(self) -> None:
        """Write all metrics and store their length in the state. Call this before a checkpoint is made."""
        self.check_losses()
        if self._records is not None:
            self.state.metrics_length = self._records.flush()

    def sync(self) -> None:
        """Wait until the written metrics are on disk. Any thread may call this."""
        if self._records is not None:
            self._records.sync()

    def reason_to_stop(self) -> str | None:
        """Return why a callback wants the training to end after this epoch, the same on every rank."""
        reason: str | None = ranks.broadcast(first_reason(self._callbacks, self.state) if ranks.is_first() else None)
        return reason

    def _announce_resuming(self) -> None:
        """Print from which step a training is resumed, and what is left of it."""
        state, done, left = self.state, self.state.step, self._steps - self.state.step
        if not done or self._console is None or left <= 0:
            return
        most = "at most " if self.may_end_early else ""
        whole, finished = self.work(self._steps) or self._steps, self.work(done) or done
        pace = f", about {duration(state.seconds * (whole - finished) / finished)} at the pace so far"
        self._console.print(
            f"Resuming {self._what} from step {done:,} of {self._steps:,} (epoch {done // self._steps_per_epoch + 1} of "
            f"{self._epochs}): {most}{left:,} steps are left{pace if state.seconds else ''}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    @abstractmethod
    def diverged(self, step: int, path: OpPath | None = None) -> GreedyNASError:
        """Return the error for a loss that is not finite."""

    @abstractmethod
    def facts(self, step: int) -> dict[str, Any]:
        """Return the values of a line of kind `step` besides loss, speed and time; `step` is the last finished one."""

    may_end_early = False  # whether the training may take fewer steps

    def work(self, step: int) -> float | None:
        """Return the cost of the first `step` steps, or None if all steps cost the same."""
        return None

    def status(self) -> list[str]:
        """Return texts for the progress display, the most important first."""
        return []

    def _log(self) -> None:
        state, now = self.state, time.monotonic()
        rate = (state.optimization_images - self._images) / max(now - self._time, 1e-9)
        state.seconds += now - self._time
        self._time, self._images = now, state.optimization_images
        loss = float(np.mean(state.recent_losses))
        state.recent_losses = []
        self._write("step", loss=loss, **self.facts(state.step - 1), images_per_second=rate, seconds=state.seconds)
        self._loss, self._rate = loss, rate
        self.show()

    def show(self) -> None:
        """Update the progress display."""
        state = self.state
        if self._loss is None:
            return
        epoch = min((state.step - 1) // self._steps_per_epoch + 1, self._epochs)
        first, *more = [f"loss {self._loss:.3f}", *self.status()]
        details = [first, f"epoch {epoch} of {self._epochs}", *more, f"{self._rate:,.0f} images/s"]
        facts = {"epoch": epoch, "epochs": self._epochs, "loss": self._loss, "images_per_second": self._rate}
        self._progress.update(state.step, details, self.work(state.step), **facts)

    def _write(self, kind: str, **values: Any) -> None:
        if self._records is not None:
            self._records.write(kind=kind, step=self.state.step, epoch=self.state.epoch, **values)
            if kind != "filter":
                self._records.flush()  # other processes read them while the training goes on
        for callback in self._callbacks:
            callback.log(kind, self.state.step, self.state.epoch, values)


def _usual_callbacks(folder: Path | None, given: Sequence[Callback]) -> list[Callback]:
    """Return TensorBoard's callback if the training is saved, TensorBoard is installed, and it is not given anyway."""
    if folder is None or find_spec("tensorboard") is None:
        return []
    return [one for one in make_callbacks(["tensorboard"]) if type(one) not in map(type, given)]
