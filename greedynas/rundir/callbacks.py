"""Callbacks: objects that observe a training, log it elsewhere, or end it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from greedynas.runtime.registry import Registry


class Callback:
    """An observer of trainings, which logs them elsewhere or ends them. Override the methods that you need.

    With several ranks, only the first one calls it.

    Example:
        >>> import greedynas
        >>> class ThreeEpochs(greedynas.Callback):
        ...     def stop(self, state):
        ...         return "three epochs are enough" if state.epoch >= 3 else None
        >>> run = greedynas.train("auto", "runs/short", data="photos/", callbacks=[ThreeEpochs()])
    """

    def begin(self, folder: Path | None, step: int) -> None:
        """Prepare for a training in `folder` (None: it is not saved) that continues after `step` steps."""

    def log(self, kind: str, step: int, epoch: int, values: dict[str, Any]) -> None:
        """Receive the values of a line of `metrics.jsonl`, about some steps, an epoch or a filtering."""

    def stop(self, state: Any) -> str | None:
        """Return why the training should end after the epoch that is just over, or None if it should continue.

        `state` is a `TrainState` or the state of a retraining: `state.epoch`, `state.step` and so on.
        """
        return None

    def report(self, folder: Path, file: Path) -> None:
        """Receive the report of the whole job in the run directory `folder`, after all stages."""

    def end(self) -> None:
        """Finish; this is called at the end of every training, also of one that fails."""


CALLBACKS: "Registry[type[Callback]]" = Registry(
    "callback",
    {
        "tensorboard": "greedynas.rundir.trackers.tensorboard:TensorBoard",
        "wandb": "greedynas.rundir.trackers.wandb_tracker:WandB",
        "mlflow": "greedynas.rundir.trackers.mlflow_tracker:MLflow",
    },
)


def make_callbacks(names: Iterable[str]) -> list[Callback]:
    """Return new callbacks by name."""
    return [CALLBACKS[name]() for name in names]


def first_reason(callbacks: Sequence[Callback], state: Any) -> str | None:
    """Return the reason of the first callback that wants to stop."""
    return next((reason for reason in (callback.stop(state) for callback in callbacks) if reason), None)
