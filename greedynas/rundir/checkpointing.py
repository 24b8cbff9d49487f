"""Periodic checkpoints, written while the training continues."""

import json
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from greedynas.rundir.checkpoints import AVERAGED, Checkpoint, copied
from greedynas.rundir.journal import Journal
from greedynas.runtime import signals
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger
from greedynas.spaces.paths import OpPath

WEIGHTS = ("net.", AVERAGED)  # prefixes of the names of weights in a checkpoint


class Checkpointing:
    """Saving of checkpoints while a training continues: the state is copied, and a thread writes the copy.

    Weights that are not finite are never saved. One checkpoint is written at a time; an error of writing is raised
    after the next step, or by `wait`. A signal (see `runtime/signals.py`) ends the training with a checkpoint.
    """

    def __init__(
        self,
        journal: Journal,
        contents: Callable[[], Checkpoint],
        save: Callable[[int, dict[str, Tensor], dict[str, Any]], None] | None,  # None: nothing is saved
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
        """Save a checkpoint if one is due, and stop after a signal. Call this after every update, of this `path`."""
        self.path = path
        if self._writing is not None and self._writing.done():
            self.wait()
        if signal := ranks.largest(signals.requested() or 0):
            self.now()
            self.wait()
            ranks.barrier()  # a rank that ends earlier would look like a failed one
            note = "" if self.save is None else f"a checkpoint of step {self.journal.state.step} is written"
            raise signals.Stopped(signal, note)
        step = self.journal.state.step
        by_steps = step in self.moments or (self.steps is not None and step % self.steps == 0)
        by_time = self._writing is None and time.monotonic() - self.last > 60 * self.minutes
        if by_steps or by_time:
            self.now()

    def now(self) -> None:
        """Start to save the current state; the previous checkpoint is finished first."""
        if self.save is None:
            return
        self.wait()
        self.journal.flush()
        tensors, state = self.contents()
        # The state is converted to text now, because training continues to change its lists.
        content = (copied(tensors), json.dumps(state))
        self._writing = self._writer.submit(self._write, self.journal.state.step, self.path, *content)
        self.last = time.monotonic()

    def wait(self) -> None:
        """Wait until no checkpoint is being written; raise the error of writing, if there was one."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as error:
            raise GreedyNASError(
                f"cannot write the checkpoint {error.filename or ''}: {error.strerror or error}; "
                "the previous one is kept: solve that, and give the same command again"
            ) from None

    def _write(self, step: int, path: OpPath | None, tensors: dict[str, Tensor], state: str) -> None:
        weights = (tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS))
        if not all(np.isfinite(tensor.numpy()).all() for tensor in weights):  # NumPy uses only this thread
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
    """Save checkpoints of a training every `minutes` minutes, every `steps` steps, and after the steps in `moments`.

    `save` writes what `contents` returns. All writing is finished when the context ends.
    """
    with signals.unhurried(), ThreadPoolExecutor(1, "checkpoint") as writer:
        save = save if ranks.is_first() else None
        checkpoint = Checkpointing(journal, contents, save, minutes, steps, moments, writer)
        try:
            yield checkpoint
        except BaseException as later:
            try:
                checkpoint.wait()
            except GreedyNASError as first:  # it is about an earlier step, so it is the error to show
                if isinstance(later, Exception):
                    raise first from None
                logger.warning("%s", first)
            signal = signals.requested()
            if signal is not None and isinstance(later, Exception) and not isinstance(later, GreedyNASError):
                # The same signal has probably ended a process that this step needed.
                logger.warning("the step was not finished: %s", later)
                raise signals.Stopped(signal, "the last checkpoint is kept") from None
            raise
        checkpoint.wait()
