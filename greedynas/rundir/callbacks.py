"""Callbacks: what watches a training, logs it elsewhere, or ends it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from greedynas.runtime.registry import Registry


class Callback:
    """A watcher of trainings: it logs them elsewhere, or ends them. Override the methods that you need.

    With several ranks, only the first one calls it.

    Example:
        >>> import greedynas
        >>> class ThreeEpochs(greedynas.Callback):
        ...     def stop(self, state):
        ...         return "three epochs are enough" if state.epoch >= 3 else None
        >>> run = greedynas.train("auto", "runs/short", data="photos/", callbacks=[ThreeEpochs()])
    """

    def begin(self, folder: Path | None, step: int) -> None:
        """Prepare for a training in `folder` (None: it is not saved) that goes on after `step` steps."""

    def log(self, kind: str, step: int, epoch: int, values: dict[str, Any]) -> None:
        """Take what a line of `metrics.jsonl` says: of some steps, of an epoch, of a filtering."""

    def stop(self, state: Any) -> str | None:
        """Return why the training should end after the epoch that is just over; None: it should go on.

        `state` is a `TrainState` or the state of a retraining: `state.epoch`, `state.step` and so on.
        """
        return None

    def end(self) -> None:
        """Finish, however the training ends."""


CALLBACKS: "Registry[type[Callback]]" = Registry(
    "callback", {"tensorboard": "greedynas.rundir.tensorboard:TensorBoard"}
)


def make_callbacks(names: Iterable[str]) -> list[Callback]:
    """Return new callbacks by name."""
    return [CALLBACKS[name]() for name in names]


def first_reason(callbacks: Sequence[Callback], state: Any) -> str | None:
    """Return the reason of the first callback that wants to stop."""
    return next((reason for reason in (callback.stop(state) for callback in callbacks) if reason), None)
