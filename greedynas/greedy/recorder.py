"""The journal of a supernet's training."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from greedynas.greedy.filtering import Filtered
from greedynas.greedy.schedule import Schedule, corrected_images
from greedynas.greedy.state import TrainState
from greedynas.rundir.callbacks import Callback
from greedynas.rundir.journal import Journal
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.text import logger
from greedynas.spaces.paths import OpPath, compact, pretty
from greedynas.spaces.space import Space


class Recorder(Journal):
    """The journal of a supernet's training.

    The wall-clock fields (seconds, images_per_second, measured_ratio, corrected_images_measured) are the only ones that
    differ between two runs of the same seed.
    """

    state: TrainState

    def __init__(
        self,
        folder: Path | None,
        schedule: Schedule,
        state: TrainState,
        space: Space,
        console: Console | None,
        callbacks: Sequence[Callback] = (),
    ):
        every = schedule.settings.log_every
        super().__init__(folder, state, "supernet", schedule.steps, schedule.steps_per_epoch, every, console, callbacks)
        self.schedule, self.space = schedule, space

    def filtering(self, filtered: Filtered | None, epsilon: float) -> None:
        """Record a filtering and what it has made of the pool."""
        if filtered is None:
            return
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
        """Record the end of an epoch."""
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
        logger.info("epoch %d of %d%s", state.epoch, self.schedule.settings.max_epochs, self._pool_now())

    def _pool_now(self) -> str:
        if self.state.novelty is not None:
            return f", π = {self.state.novelty:.3f}"
        return f", {len(self.state.pool)} paths in the pool" if len(self.state.pool) else ""

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


def diverged(step: int, path: OpPath | None, space: Space) -> GreedyNASError:
    told = "" if path is None else f" on path {compact(path, space)} ({pretty(path, space)})"
    return GreedyNASError(
        f"training diverged: the loss is not a number at step {step}{told}; "
        "the last good checkpoint is kept; lower train.lr or set train.clip_grad, in another --out"
    )


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
