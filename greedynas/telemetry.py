"""What a training tells: metrics.jsonl, TensorBoard where it is installed, and a live display."""

import math
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from greedynas.errors import GreedyNASError
from greedynas.files import Records
from greedynas.paths import OpPath, compact, pretty
from greedynas.sampling import Filtered
from greedynas.schedule import PAPER_RATIO, Schedule, corrected_images
from greedynas.space import Space
from greedynas.state import TrainState


class Recorder:
    """Looks at losses, writes metrics, moves the display. Without a folder nothing is written.

    The wall-clock fields (seconds, images_per_second, measured_ratio, corrected_images_measured) are the only ones that
    differ between two runs of the same seed.
    """

    def __init__(
        self, folder: Path | None, schedule: Schedule, state: TrainState, space: Space, console: Console | None
    ):
        self.schedule, self.state, self.space = schedule, state, space
        self._pending: list[tuple[int, OpPath, Tensor]] = []  # losses not yet looked at: looking waits for the GPU
        self._time, self._images = time.monotonic(), state.optimization_images
        self._records = None if folder is None else Records(folder / "metrics.jsonl", state.metrics_length)
        self._board = None if folder is None else _tensorboard(folder / "tensorboard", state.step)
        self._progress = _progress(console)
        self._task = self._progress.add_task("supernet", total=schedule.steps, completed=state.step, told="")

    def __enter__(self) -> "Recorder":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._records is not None:
            self._records.close()
        if self._board is not None:
            self._board.close()

    def filtering(self, filtered: Filtered, epsilon: float) -> None:
        losses = sorted(self.state.pool.losses())
        self._write(
            "filter",
            epsilon=epsilon,
            kept=[_finite(loss) for _, loss in filtered.kept],
            rejected=[_finite(loss) for _, loss in filtered.rejected],
            pool_size=len(losses),
            pool_best=losses[0],
            pool_median=_finite(losses[len(losses) // 2]),
            pool_worst=_finite(losses[-1]),
        )

    def step(self, loss: Tensor, path: OpPath) -> None:
        """After every update."""
        step, settings = self.state.step, self.schedule.settings
        self._pending.append((step, path, loss))
        due = step % settings.log_every == 0 or step % self.schedule.steps_per_epoch == 0
        if due or loss.device.type == "cpu":
            self.look_at_losses()
        if due:
            self._log()

    def look_at_losses(self) -> None:
        """Find the first loss that is not a number, before anything that follows from it is saved."""
        values = torch.stack([loss for _, _, loss in self._pending]).tolist() if self._pending else []
        for (step, path, _), value in zip(self._pending, values, strict=True):
            if not math.isfinite(value):
                raise diverged(step, path, self.space)
        self.state.recent_losses += values
        self._pending.clear()

    def epoch(self) -> None:
        state = self.state
        ratio = state.measured_ratio or PAPER_RATIO
        self._write(
            "epoch",
            pi=state.novelty,
            pool_size=len(state.pool),
            stopped=state.stopped,
            optimization_images=state.optimization_images,
            evaluation_images=state.evaluation_images,
            corrected_images=state.corrected_images,
            measured_ratio=ratio,
            corrected_images_measured=corrected_images(state.optimization_images, state.evaluation_images, ratio),
        )

    def flush(self) -> None:
        """Before a checkpoint: all metrics are on the disk, and the state knows how long they are."""
        self.look_at_losses()
        if self._records is not None:
            self.state.metrics_length = self._records.flush()

    def _log(self) -> None:
        state, now = self.state, time.monotonic()
        rate = (state.optimization_images - self._images) / max(now - self._time, 1e-9)
        state.seconds += now - self._time
        self._time, self._images = now, state.optimization_images
        loss = float(np.mean(state.recent_losses))
        state.recent_losses = []
        last = state.step - 1  # the step that was just done
        lr, epsilon = self.schedule.lr(last), self.schedule.epsilon(last)
        self._write(
            "step",
            loss=loss,
            lr=lr,
            epsilon=epsilon,
            pi=state.novelty,
            optimization_images=state.optimization_images,
            evaluation_images=state.evaluation_images,
            corrected_images=state.corrected_images,
            images_per_second=rate,
            seconds=state.seconds,
        )
        pi = "" if state.novelty is None else f"  π {state.novelty:.2f}"
        pool = f"  pool {len(state.pool)}  ε {epsilon:.2f}{pi}" if len(state.pool) else ""
        told = f"epoch {state.epoch + 1}  loss {loss:.3f}{pool}  {rate:,.0f} images/s"
        self._progress.update(self._task, completed=state.step, told=told)

    def _write(self, kind: str, **values: Any) -> None:
        if self._records is not None:
            self._records.write(kind=kind, step=self.state.step, epoch=self.state.epoch, **values)
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, self.state.step)


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
