"""The training of a supernet: Algorithm 2 of the paper, and other samplers in the same loop."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from torch import Tensor

from greedynas.data.datasets import Data
from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.ratio import measure_once
from greedynas.greedy.recorder import Recorder
from greedynas.greedy.samplers.learning import Learning
from greedynas.greedy.samplers.sampler import Draw, Drawn, checked_sampler, draw_updates
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.state import TrainState, restore_state
from greedynas.greedy.steps import TrainingStep, supernet_optimizer
from greedynas.greedy.stopping import update_novelty, why_stop
from greedynas.greedy.validation import FilterLosses, watch_accuracy
from greedynas.models import engine
from greedynas.models.supernet import Supernet
from greedynas.rundir.callbacks import Callback
from greedynas.rundir.checkpointing import Checkpointing, checkpointing
from greedynas.rundir.checkpoints import Checkpoint, training_tensors
from greedynas.rundir.run_directory import RunDirectory
from greedynas.runtime.files import write_json
from greedynas.runtime.parallel import ranks
from greedynas.runtime.parallel.reduction import broadcast_weights
from greedynas.runtime.parallel.sync_batchnorm import synchronise
from greedynas.runtime.rng import stream
from greedynas.runtime.text import logger
from greedynas.spaces.feasible import feasible_paths
from greedynas.spaces.paths import most_expensive


def train_supernet(
    net: Supernet,
    data: Data,
    settings: TrainSettings,
    *,
    seed: int = 0,
    precision: str = "fp32",
    eval_precision: str = "fp32",
    run: RunDirectory | None = None,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
    lasting_steps: frozenset[int] = frozenset(),
    make_step: Callable[..., TrainingStep] = TrainingStep,
) -> TrainState:
    """Train a supernet greedily: sample and filter paths, keep the best in the pool, train one per batch (Algorithm 2).

    Args:
        net: The supernet, which is trained in place.
        data: The images of the run (see `open_data`).
        settings: The settings of the training; their defaults are the paper's.
        seed: The seed of all random draws.
        precision: The precision of training, "fp32" or "bf16".
        eval_precision: The precision of filtering, "fp32" or "bf16".
        run: A run directory. Training resumes from its newest checkpoint and ends as if it had never been interrupted.
        console: Where progress is shown.
        callbacks: Callbacks that observe the training and may end it after an epoch.
        lasting_steps: The steps whose checkpoints are kept when newer ones are written.
        make_step: The class of the updates, or a function that returns one; a subclass may change the loss.

    Returns:
        The state at the end: the candidate pool, π, counts of images, and why training stopped.

    Raises:
        GreedyNASError: If the loss is not a number, or the settings do not fit the space or the data.

    Example:
        >>> import greedynas
        >>> space = greedynas.load_space("tiny.yaml")
        >>> net, data = greedynas.Supernet(space), greedynas.open_data("photos/", space=space)
        >>> settings = greedynas.TrainSettings(
        ...     max_epochs=2, batch_size=14, filter_images=6, bn_images=6, pool_size=5, warmup=2, stopping=False
        ... )
        >>> state = greedynas.train_supernet(net, data, settings)
        >>> state.step, state.stopped
        (6, 'max_epochs reached')
    """
    schedule = Schedule(settings, len(data.train))
    draw = Drawing(net, data, schedule, seed, precision, eval_precision)
    step = make_step(net, supernet_optimizer(net, settings), settings, data.class_weights, precision)
    state = begin(net, step, schedule, run, precision)
    if state.stopped is not None:
        return state
    with journal_of(net, step, state, schedule, run, console, callbacks, lasting_steps) as (recorder, checkpoint):
        while state.stopped is None:
            done = state.step - state.epoch * schedule.steps_per_epoch  # 0, except after an interruption
            for images, labels in data.train.train_batches(state.epoch, settings.batch_size, start=done):
                if not state.waiting:
                    drawn = draw(state)
                    for path, path_loss in drawn.kept:
                        state.pool.update(path, path_loss)
                    recorder.filtering(drawn.filtered)
                    state.waiting = list(drawn.updates)
                paths = state.waiting.pop(0)
                loss = step(images, labels, paths, schedule.lr(state.step))
                state.step += 1
                state.optimization_images += min(settings.batch_size, len(data.train)) * len(paths)
                recorder.step(loss, paths[0])
                checkpoint.if_due(paths[0])
            state.epoch += 1
            update_novelty(state)
            state.stopped = why_stop(state, settings) or recorder.reason_to_stop()
            watch_accuracy(net, data, settings, seed, state, eval_precision)
            measure_once(state, net, data, settings, precision, eval_precision)
            recorder.epoch()
        checkpoint.now()
    logger.info("supernet trained for %d epochs: %s", state.epoch, state.stopped)
    return state


def begin(
    net: Supernet, step: TrainingStep, schedule: Schedule, run: RunDirectory | None, precision: str
) -> TrainState:
    """Prepare the net for training and return the state from which training starts or resumes."""
    settings = schedule.settings
    images_per_step = min(settings.batch_size, schedule.train_images)
    ranks.refuse_small_batch(images_per_step, "train.batch_size")
    net.train()
    if settings.sync_bn:
        synchronise(net)
    broadcast_weights(net)
    state = None if run is None else restore_state(run, net, step.optimizer)
    if precision == "bf16" and (state is None or state.stopped is None):
        engine.prepare(net, -(-images_per_step // ranks.size()))
    return state or TrainState(CandidatePool(settings.pool_size))


class Drawing:
    """Draws the paths of the next updates: those of the sampler and, where `whole_every` says so, the whole network."""

    def __init__(self, net: Supernet, data: Data, schedule: Schedule, seed: int, precision: str, eval_precision: str):
        self.net, self.data, self.schedule, self.seed = net, data, schedule, seed
        self.precision, self.eval_precision = precision, eval_precision
        self.sampler = checked_sampler(net, schedule.settings)
        if self.sampler.learning_paths(net.space):
            ranks.refuse_small_batch(min(schedule.settings.batch_size, len(data.val)), "data.val_images")
        self.feasible = feasible_paths(net.space, schedule.settings.limits)

    def __call__(self, state: TrainState) -> Drawn:
        """Return the next draw, and count it and the images that were evaluated for it."""
        settings, schedule = self.schedule.settings, self.schedule
        losses = FilterLosses(self.net, self.data, settings, self.seed, state, self.eval_precision)
        learning = self.learning(state)
        draw = Draw(
            space=self.net.space,
            settings=settings,
            rng=stream(self.seed, "paths", state.draws),
            step=state.step,
            filters=schedule.filters(state.step),
            epsilon=schedule.epsilon(state.step),
            pool=state.pool,
            losses=losses,
            feasible=self.feasible,
            accuracies=losses.accuracies,
            learning=learning,
        )
        drawn = draw_updates(self.sampler, draw)
        if settings.whole_every is not None and state.draws % settings.whole_every == 0:
            drawn = replace(drawn, updates=[*drawn.updates, [most_expensive(self.net.space)]])
        state.draws += 1
        state.optimization_images += learning.optimization_images
        state.evaluation_images += losses.images
        return drawn

    def learning(self, state: TrainState) -> Learning:
        """Return what a sampler needs to learn from draw to draw."""
        schedule, step = self.schedule, state.step
        return Learning(
            self.net,
            self.data,
            schedule.settings,
            self.seed,
            state.draws,
            state.memory,
            warm=step >= schedule.warmup,
            progress=schedule.progress(step),
            updates=schedule.steps - schedule.warmup,
            precision=self.precision,
        )


@contextmanager
def journal_of(
    net: Supernet,
    step: TrainingStep,
    state: TrainState,
    schedule: Schedule,
    run: RunDirectory | None,
    console: Console | None,
    callbacks: Sequence[Callback],
    lasting_steps: frozenset[int],
) -> Iterator[tuple[Recorder, Checkpointing]]:
    """Yield the recorder of a training and the writer of its checkpoints."""

    def contents() -> Checkpoint:
        return training_tensors(net, step.optimizer), state.to_json()

    settings, folder, save = schedule.settings, None, None
    if run is not None:
        run.keep_checkpoints(lasting_steps)
        folder, save = run.folder, partial(save_all, run)
    times = (settings.checkpoint_minutes, settings.checkpoint_steps, lasting_steps)
    with (
        Recorder(folder, schedule, state, net.space, console, callbacks) as recorder,
        checkpointing(recorder, contents, save, *times) as checkpoint,
    ):
        yield recorder, checkpoint


def save_all(run: RunDirectory, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write the pool as `pool.json`, for users and for the search, and then a checkpoint, which has its own copy."""
    run.supernet.mkdir(exist_ok=True)
    best = CandidatePool.from_state(state["pool"]).best()
    entries = [{"path": path, "loss": loss if math.isfinite(loss) else None} for path, loss in best]
    write_json(run.supernet / "pool.json", entries)
    run.save_checkpoint(step, tensors, state)
