"""What a training tells and saves: metrics.jsonl, TensorBoard where it is installed, a live display, checkpoints in time."""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from greedynas import distributed, stopping
from greedynas.averaging import AVERAGED
from greedynas.errors import GreedyNASError
from greedynas.files import Records
from greedynas.paths import OpPath, compact, pretty
from greedynas.runs import Checkpoint, logger
from greedynas.sampling import Filtered
from greedynas.schedule import Schedule, corrected_images
from greedynas.space import Space
from greedynas.state import TrainState, copied
from greedynas.terminal import text_column

WEIGHTS = ("net.", AVERAGED)  # how the names of weights begin in a checkpoint


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
    ):
        if not distributed.is_first():
            folder = console = None
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
        """Before a checkpoint: all metrics are written, and the state knows how long they are."""
        self.look_at_losses()
        if self._records is not None:
            self.state.metrics_length = self._records.flush()

    def sync(self) -> None:
        """And on the disk. Any thread may call this."""
        if self._records is not None:
            self._records.sync()

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
        images, ratio = (state.optimization_images, state.evaluation_images), state.measured_ratio
        self._write(
            "epoch",
            pi=state.novelty,
            pool_size=len(state.pool),
            stopped=state.stopped,
            **self._images_counted(),
            measured_ratio=ratio,  # None: the machine was too busy
            corrected_images_measured=None if ratio is None else corrected_images(*images, ratio),
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
    """Saves when it is time to, beside the training: the state is copied, and a thread writes the copy.

    Nothing is saved that is not finite. One checkpoint is written at a time; what goes wrong with it is raised after the
    next step, or by `wait`. A signal (see `stopping.py`) ends the training with a checkpoint.
    """

    def __init__(
        self,
        journal: Journal,
        contents: Callable[[], Checkpoint],
        save: Callable[[int, dict[str, Tensor], dict[str, Any]], None] | None,  # None: nowhere
        minutes: float,
        steps: int | None,
        moments: Collection[int],
        writer: Executor,
    ):
        self.journal, self.contents, self.save = journal, contents, save
        self.minutes, self.steps, self.moments, self._writer = minutes, steps, moments, writer
        self.path: OpPath | None = None
        self.last = time.monotonic()
        self._writing: Future[None] | None = None

    def if_due(self, path: OpPath | None = None) -> None:
        """After an update, of this path."""
        self.path = path
        if self._writing is not None and self._writing.done():
            self.wait()
        if signal := distributed.largest(stopping.requested() or 0):
            self.now()
            self.wait()
            distributed.barrier()  # the others' end would be taken for a failure
            told = "" if self.save is None else f"a checkpoint of step {self.journal.state.step} is written"
            raise stopping.Stopped(signal, told)
        step = self.journal.state.step
        by_steps = step in self.moments or (self.steps is not None and step % self.steps == 0)
        by_time = self._writing is None and time.monotonic() - self.last > 60 * self.minutes
        if by_steps or by_time:
            self.now()

    def now(self) -> None:
        """Begin to save what is there now; the checkpoint before this one is finished first."""
        if self.save is None:
            return
        self.wait()
        self.journal.flush()
        tensors, state = self.contents()
        # The state is text at once: training goes on to change its lists.
        content = (copied(tensors), json.dumps(state))
        self._writing = self._writer.submit(self._write, self.journal.state.step, self.path, *content)
        self.last = time.monotonic()

    def wait(self) -> None:
        """Until nothing is being written."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as error:
            raise GreedyNASError(
                f"cannot write the checkpoint {error.filename or ''}: {error.strerror or error}; the one before is kept: "
                "put that right, and give the same command again"
            ) from None

    def _write(self, step: int, path: OpPath | None, tensors: dict[str, Tensor], state: str) -> None:
        weights = (tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS))
        if not all(np.isfinite(tensor.numpy()).all() for tensor in weights):  # NumPy keeps to its own thread
            raise self.journal.diverged(step, path)
        self.journal.sync()
        assert self.save is not None
        self.save(step, tensors, json.loads(state))


@contextmanager
def checkpointing(
    journal: Journal,
    contents: Callable[[], Checkpoint],
    save: Callable[[int, dict[str, Tensor], dict[str, Any]], None] | None,
    minutes: float,
    steps: int | None,
    moments: Collection[int] = (),
) -> Iterator[Checkpointing]:
    """Checkpoints of a training, every so many minutes or steps and at these moments: `contents` are written by `save`, and
    all of it when this is left."""
    with stopping.unhurried(), ThreadPoolExecutor(1, "checkpoint") as writer:
        save = save if distributed.is_first() else None
        checkpoint = Checkpointing(journal, contents, save, minutes, steps, moments, writer)
        try:
            yield checkpoint
        except BaseException as later:
            try:
                checkpoint.wait()
            except GreedyNASError as first:  # of an earlier step, and the one to tell
                if isinstance(later, Exception):
                    raise first from None
                logger.warning("%s", first)
            signal = stopping.requested()
            if signal is not None and isinstance(later, Exception) and not isinstance(later, GreedyNASError):
                # The same signal has ended a process that this step needed.
                logger.warning("the step was not finished: %s", later)
                raise stopping.Stopped(signal, "the last checkpoint is kept") from None
            raise
        checkpoint.wait()


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
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), text_column("{task.fields[told]}"))
    quiet = console is None or not console.is_terminal
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=quiet)


def _tensorboard(folder: Path, step: int) -> Any:
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step)
