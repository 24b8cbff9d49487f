"""The journal of a supernet's training: metrics, progress and messages."""

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
from greedynas.runtime.text import logger, percent
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
        self.schedule, self.space = schedule, space
        every = schedule.settings.log_every
        super().__init__(folder, state, "supernet", schedule.steps, schedule.steps_per_epoch, every, console, callbacks)

    def filtering(self, filtered: Filtered | None) -> None:
        """Record a filtering and the losses of the pool after it."""
        if filtered is None:
            return
        losses = sorted(self.state.pool.losses())
        self._write(
            "filter",
            epsilon=self.schedule.epsilon(self.state.step),
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
            val_accuracy=state.accuracy,
            **self._images_counted(),
            measured_ratio=ratio,  # None on a busy machine
            corrected_images_measured=None if ratio is None else corrected_images(*images, ratio),
            **self._learned(),
        )
        self.show()
        found = self._pool_now() if state.accuracy is None else f"{self._pool_now()}, {self._accuracy()}"
        logger.info("epoch %d of %d%s", state.epoch, self.schedule.settings.max_epochs, found)

    def _learned(self) -> dict[str, Any]:
        """Return the probabilities of ops, if the sampler is a method that learns them."""
        learned = self.state.memory.get("probabilities")
        return {} if learned is None else {"probabilities": [[round(p, 6) for p in layer] for layer in learned]}

    def _pool_now(self) -> str:
        if self.state.novelty is not None:
            return f", π = {self.state.novelty:.3f}"
        return f", {len(self.state.pool)} paths in the pool" if len(self.state.pool) else ""

    def _accuracy(self) -> str:
        assert self.state.accuracy is not None
        return f"accuracy {percent(self.state.accuracy)} ({self.state.accuracy_of})"

    def facts(self, step: int) -> dict[str, Any]:
        lr, epsilon = self.schedule.lr(step), self.schedule.epsilon(step)
        return {"lr": lr, "epsilon": epsilon, "pi": self.state.novelty, **self._images_counted()}

    @property
    def may_end_early(self) -> bool:  # type: ignore[override]
        settings = self.schedule.settings
        return settings.stopping and self.schedule.filterings(self.schedule.steps) > 0

    def work(self, step: int) -> float:
        return corrected_images(*self.schedule.images_until(step, self.space))

    def status(self) -> list[str]:
        state = self.state
        found = [] if state.accuracy is None else [self._accuracy()]
        if len(state.pool):
            epsilon = self.schedule.epsilon(state.step - 1)
            pi = "" if state.novelty is None else f" π {state.novelty:.2f}"
            found.append(f"pool {len(state.pool)} ε {epsilon:.2f}{pi}")
        return found

    def diverged(self, step: int, path: OpPath | None = None) -> GreedyNASError:
        return diverged(step, path, self.space)

    def _images_counted(self) -> dict[str, float]:
        names = ("optimization_images", "evaluation_images", "corrected_images")
        return {name: getattr(self.state, name) for name in names}


def diverged(step: int, path: OpPath | None, space: Space) -> GreedyNASError:
    where = "" if path is None else f" on path {compact(path, space)} ({pretty(path, space)})"
    return GreedyNASError(
        f"training diverged: the loss is not a number at step {step}{where}; "
        "the last good checkpoint is kept; lower train.lr or set train.clip_grad, in another --out"
    )


def _finite(value: float) -> float | None:
    """Return a value, or None if it is not finite, because JSON has no infinity."""
    return value if math.isfinite(value) else None
