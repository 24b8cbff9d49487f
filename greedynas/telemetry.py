"""What a training tells and saves: metrics.jsonl, TensorBoard where it is installed, a live display, checkpoints in time."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from greedynas.errors import GreedyNASError
from greedynas.files import Records
from greedynas.paths import OpPath, compact, pretty
from greedynas.sampling import Filtered
from greedynas.schedule import PAPER_RATIO, Schedule, corrected_images
from greedynas.space import Space
from greedynas.state import TrainState


class Counters(Protocol):
    """What the state of any training counts."""

    step: int
    epoch: int
    optimization_images: int
    recent_losses: list[float]
    metrics_length: int
    seconds: float


class Journal(ABC):
    """Looks at losses, writes metrics, moves the display. Without a folder nothing is written."""

    def __init__(
        self,
        folder: Path | None,
        state: Counters,
        what: str,
        steps: int,
        steps_per_epoch: int,
        log_every: int,
        console: Console | None,
    ):
        self.state = state
        self._steps_per_epoch, self._log_every = steps_per_epoch, log_every
        self._pending: list[
            tuple[int, OpPath | None, Tensor]
        ] = []  # losses not yet looked at: looking waits for the GPU
        self._time, self._images = time.monotonic(), state.optimization_images
        self._records = None if folder is None else Records(folder / "metrics.jsonl", state.metrics_length)
        self._board = None if folder is None else _tensorboard(folder / "tensorboard", state.step)
        self._progress = _progress(console)
        self._task = self._progress.add_task(what, total=steps, completed=state.step, told="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._records is not None:
            self._records.close()
        if self._board is not None:
            self._board.close()

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
        """Before a checkpoint: all metrics are on the disk, and the state knows how long they are."""
        self.look_at_losses()
        if self._records is not None:
            self.state.metrics_length = self._records.flush()

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
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, self.state.step)


class Recorder(Journal):
    """The journal of a supernet's training.

    The wall-clock fields (seconds, images_per_second, measured_ratio, corrected_images_measured) are the only ones that
    differ between two runs of the same seed.
    """

    state: TrainState

    def __init__(
        self, folder: Path | None, schedule: Schedule, state: TrainState, space: Space, console: Console | None
    ):
        every = schedule.settings.log_every
        super().__init__(folder, state, "supernet", schedule.steps, schedule.steps_per_epoch, every, console)
        self.schedule, self.space = schedule, space

    def filtering(self, filtered: Filtered, epsilon: float) -> None:
        losses = sorted(self.state.pool.losses())
        self._write(
            "filter",
            epsilon=epsilon,
            kept=[_finite(loss) for _, loss in filtered.kept],
            rejected=[_finite(loss) for _, loss in filtered.rejected],
            pool_size=len(losses),
            pool_best=_finite(losses[0]),
            pool_median=_finite(losses[len(losses) // 2]),
            pool_worst=_finite(losses[-1]),
        )

    def epoch(self) -> None:
        state = self.state
        ratio = state.measured_ratio or PAPER_RATIO
        self._write(
            "epoch",
            pi=state.novelty,
            pool_size=len(state.pool),
            stopped=state.stopped,
            **self._images_counted(),
            measured_ratio=ratio,
            corrected_images_measured=corrected_images(state.optimization_images, state.evaluation_images, ratio),
        )

    def facts(self, step: int) -> dict[str, Any]:
        lr, epsilon = self.schedule.lr(step), self.schedule.epsilon(step)
        return {"lr": lr, "epsilon": epsilon, "pi": self.state.novelty, **self._images_counted()}

    def told(self) -> str:
        state = self.state
        pi = "" if state.novelty is None else f"  π {state.novelty:.2f}"
        epsilon = self.schedule.epsilon(state.step - 1)
        return f"  pool {len(state.pool)}  ε {epsilon:.2f}{pi}" if len(state.pool) else ""

    def diverged(self, step: int, path: OpPath | None = None) -> GreedyNASError:
        return diverged(step, path, self.space)

    def _images_counted(self) -> dict[str, float]:
        names = ("optimization_images", "evaluation_images", "corrected_images")
        return {name: getattr(self.state, name) for name in names}


class Checkpointing:
    """Saves when it is time to; nothing is saved that is not finite."""

    def __init__(
        self,
        journal: Journal,
        modules: Iterable[nn.Module],
        save: Callable[[], None] | None,  # None: nowhere
        minutes: float,
        steps: int | None,
    ):
        self.journal, self.modules, self.save, self.minutes, self.steps = journal, modules, save, minutes, steps
        self.path: OpPath | None = None
        self.last = time.monotonic()

    def if_due(self, path: OpPath | None = None) -> None:
        """After an update, of this path."""
        self.path = path
        by_steps = self.steps is not None and self.journal.state.step % self.steps == 0
        if by_steps or time.monotonic() - self.last > 60 * self.minutes:
            self.now()

    def now(self) -> None:
        if self.save is None:
            return
        self.journal.flush()
        tensors = (tensor for module in self.modules for tensor in module.state_dict().values())
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise self.journal.diverged(self.journal.state.step, self.path)
        self.save()
        self.last = time.monotonic()


def diverged(step: int, path: OpPath | None, space: Space) -> GreedyNASError:
    told = "" if path is None else f" on path {compact(path, space)} ({pretty(path, space)})"
    return GreedyNASError(
        f"training diverged: the loss is not a number at step {step}{told}; "
        "the last good checkpoint is kept; lower train.lr or set train.clip_grad, in another --out"
    )


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _progress(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
    quiet = console is None or not console.is_terminal
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=quiet)


def _tensorboard(folder: Path, step: int) -> Any:
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step)
