"""Greedy training of a supernet: Algorithm 2 of the paper, and its rivals in the same loop."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from torch import Tensor

from greedynas.data.datasets import Data
from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.ratio import ATTEMPTS, measure_ratio
from greedynas.greedy.recorder import Recorder
from greedynas.greedy.samplers.sampler import Draw, make_sampler
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.state import TrainState, restore_state
from greedynas.greedy.steps import TrainingStep, supernet_optimizer
from greedynas.greedy.stopping import update_novelty, why_stop
from greedynas.greedy.validation import FilterLosses
from greedynas.models import engine
from greedynas.models.supernet import Supernet
from greedynas.rundir.callbacks import Callback
from greedynas.rundir.checkpointing import Checkpointing, checkpointing
from greedynas.rundir.checkpoints import Checkpoint, training_tensors
from greedynas.rundir.run_directory import RunDirectory
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import write_json
from greedynas.runtime.parallel import ranks
from greedynas.runtime.parallel.reduction import same_weights
from greedynas.runtime.parallel.sync_batchnorm import synchronise
from greedynas.runtime.rng import stream
from greedynas.runtime.text import logger


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
) -> TrainState:
    """Train a supernet greedily: sample and filter paths, keep the best in the pool, train one path a batch (Algorithm 2).

    Args:
        net: The supernet, which is trained in place.
        data: The images of the run (see `open_data`).
        settings: The settings of the training; their defaults are the paper's.
        seed: Of every random draw.
        precision: "fp32" or "bf16", of training.
        eval_precision: "fp32" or "bf16", of filtering.
        run: A run directory. Training then goes on from its newest checkpoint and ends as if it had never been interrupted.
        console: Where progress is shown.
        callbacks: What watches the training, and may end it after an epoch.
        lasting_steps: Steps whose checkpoints are kept when newer ones are written.

    Returns:
        The state at the end: the candidate pool, π, counts of images, and why training stopped.

    Raises:
        GreedyNASError: If the loss is not a number, or something about the settings cannot be.

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
    schedule, sampler = Schedule(settings, len(data.train)), make_sampler(settings.sampler)
    step = TrainingStep(net, supernet_optimizer(net, settings), settings, data.class_weights, precision)
    state = begin(net, step, schedule, run, precision)
    if state.stopped is not None:
        return state
    with journal_of(net, step, state, schedule, run, console, callbacks, lasting_steps) as (recorder, checkpoint):
        while state.stopped is None:
            trained = (
                state.step - state.epoch * schedule.steps_per_epoch
            )  # batches of this epoch, before an interruption
            for images, labels in data.train.train_batches(state.epoch, settings.batch_size, start=trained):
                if not state.waiting:
                    losses = FilterLosses(net, data, settings, seed, state, eval_precision)
                    draw = make_draw(net, settings, schedule, state, seed, losses)
                    drawn = sampler.draw(draw)
                    if not drawn.updates or not all(drawn.updates):
                        raise GreedyNASError(f"the sampler {settings.sampler!r} has drawn no path for an update")
                    for path, path_loss in drawn.filtered.kept if drawn.filtered is not None else ():
                        state.pool.update(path, path_loss)
                    state.waiting = drawn.updates
                    state.draws += 1
                    state.evaluation_images += losses.images
                    recorder.filtering(drawn.filtered, draw.epsilon)
                paths = state.waiting.pop(0)
                loss = step(images, labels, paths, schedule.lr(state.step))
                state.step += 1
                state.optimization_images += min(settings.batch_size, len(data.train)) * len(paths)
                recorder.step(loss, paths[0])
                checkpoint.if_due(paths[0])
            state.epoch += 1
            update_novelty(state)
            state.stopped = why_stop(state, settings) or recorder.reason_to_stop()
            if state.measured_ratio is None and state.epoch <= ATTEMPTS:
                measure = partial(measure_ratio, net, data, settings, precision, eval_precision)
                state.measured_ratio = ranks.on_first(measure)
            recorder.epoch()
        checkpoint.now()
    logger.info("supernet trained for %d epochs: %s", state.epoch, state.stopped)
    return state


def begin(
    net: Supernet, step: TrainingStep, schedule: Schedule, run: RunDirectory | None, precision: str
) -> TrainState:
    """Prepare the net for training and return the state that training goes on from."""
    settings = schedule.settings
    images_per_step = min(settings.batch_size, schedule.train_images)
    ranks.refuse_small_batch(images_per_step, "train.batch_size")
    make_sampler(settings.sampler).check(net.space)
    net.train()
    if settings.sync_bn:
        synchronise(net)
    same_weights(net)
    state = None if run is None else restore_state(run, net, step.optimizer)
    if precision == "bf16" and (state is None or state.stopped is None):
        engine.prepare(net, -(-images_per_step // ranks.size()))
    return state or TrainState(CandidatePool(settings.pool_size))


def make_draw(
    net: Supernet, settings: TrainSettings, schedule: Schedule, state: TrainState, seed: int, losses: FilterLosses
) -> Draw:
    """Return what a sampler may use now."""
    rng = stream(seed, "paths", state.draws)
    filters, epsilon = schedule.filters(state.step), schedule.epsilon(state.step)
    return Draw(net.space, settings, rng, state.step, filters, epsilon, state.pool, losses)


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
    """Yield what records a training and what saves it."""

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
    """Write a checkpoint, and before it the pool for people and for the search; the checkpoint has its own copy."""
    run.supernet.mkdir(exist_ok=True)
    best = CandidatePool.from_state(state["pool"]).best()
    entries = [{"path": path, "loss": loss if math.isfinite(loss) else None} for path, loss in best]
    write_json(run.supernet / "pool.json", entries)
    run.save_checkpoint(step, tensors, state)
