"""Greedy training of a supernet: Algorithm 2 of the paper, and its rivals in the same loop."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from greedynas.data.datasets import Data
from greedynas.greedy import ratio
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.filtering import Filtered, filter_paths, sample_paths
from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.ratio import measure_ratio
from greedynas.greedy.recorder import Recorder, diverged
from greedynas.greedy.samplers.fair import fair_paths
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.state import TrainState, restore_state
from greedynas.greedy.steps import TrainingStep, make_optimizer
from greedynas.greedy.stopping import why_stop
from greedynas.models import engine
from greedynas.models.ema import AveragedWeights
from greedynas.models.supernet import Supernet, fresh_supernet
from greedynas.rundir.checkpointing import checkpointing
from greedynas.rundir.checkpoints import Checkpoint, training_tensors
from greedynas.rundir.run_directory import RunDirectory
from greedynas.runtime.files import write_json
from greedynas.runtime.parallel import ranks
from greedynas.runtime.parallel.reduction import same_weights
from greedynas.runtime.parallel.sync_batchnorm import synchronise
from greedynas.runtime.rng import stream
from greedynas.runtime.text import logger
from greedynas.spaces.paths import OpPath


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
) -> TrainState:
    """Algorithm 2: every k steps sample and filter paths and update the pool, then train each kept path on one batch.

    With a run, training goes on from its newest checkpoint and ends as if it had never been interrupted. The net is left with
    its last weights, or with the averaged ones if the settings ask for an average; if they ask for several supernets, it
    becomes one after the other.
    """
    schedule = Schedule(settings, len(data.train))
    images_per_step = min(settings.batch_size, len(data.train))
    ranks.refuse_small_batch(images_per_step, "train.batch_size")
    net.train()
    if settings.sync_bn:
        synchronise(net)
    same_weights(net)
    optimizer = make_optimizer(net, settings)
    average = AveragedWeights(net, settings.ema)
    state = restore_state(run, net, optimizer, average) if run is not None else None
    state = state or TrainState(CandidatePool(settings.pool_size))
    if state.stopped is not None:
        average.replace()
        return state
    step = TrainingStep(net, optimizer, settings, data.class_weights, precision)
    if precision == "bf16":
        engine.prepare(net, -(-images_per_step // ranks.size()))

    def contents() -> Checkpoint:
        return {**training_tensors(net, optimizer), **average.tensors()}, state.to_json()

    if run is not None:
        run.keep_checkpoints(schedule.snapshots)
    save = None if run is None else partial(save_all, run)
    times = (settings.checkpoint_minutes, settings.checkpoint_steps, schedule.snapshots)
    with (
        Recorder(run.folder if run is not None else None, schedule, state, net.space, console) as recorder,
        checkpointing(recorder, contents, save, *times) as checkpoint,
    ):
        while state.stopped is None:
            done = state.step - state.epoch * schedule.steps_per_epoch
            supernet = schedule.supernet(state.step)
            if state.step == supernet.start > 0 and not done:
                number = schedule.supernets.index(supernet)
                begin_anew(
                    net,
                    fresh_supernet(
                        net.space,
                        seed,
                        split=settings.split_after_identity,
                        zero_residuals=settings.zero_residuals,
                        number=number,
                    ),
                    optimizer,
                    average,
                    state,
                )
                step.refresh()
                logger.info("supernet %d of %d begins", number + 1, len(schedule.supernets))
            for images, labels in data.train.train_batches(state.epoch, settings.batch_size, start=done):
                if not state.waiting:
                    rng = stream(seed, "paths", state.draws)
                    if schedule.filters(state.step):
                        epsilon = schedule.epsilon(state.step)
                        filtered = filter_on_validation(net, data, settings, rng, seed, state, epsilon, eval_precision)
                        for path, path_loss in filtered.kept:
                            state.pool.update(path, path_loss)
                        state.waiting = [[path] for path, _ in filtered.kept]
                        state.evaluation_images += filtered.evaluated * images_per_path(settings, data)
                        recorder.filtering(filtered, epsilon)
                    elif settings.sampler == "fair":
                        state.waiting = [fair_paths(net.space, rng)]
                    else:
                        state.waiting = [sample_paths(net.space, 1, rng)]
                    state.draws += 1
                paths = state.waiting.pop(0)
                lr = schedule.lr(state.step)
                loss = step(images, labels, paths, lr)
                state.step += 1
                average.update(state.step - supernet.start)
                state.optimization_images += images_per_step * len(paths)
                recorder.step(loss, paths[0])
                checkpoint.if_due(paths[0])
            state.epoch += 1
            state.novelty = state.pool.novelty(state.snapshot) if state.pool.full else None
            state.snapshot = sorted(state.pool)
            state.stopped = why_stop(state, schedule)
            if state.measured_ratio is None and state.epoch <= ratio.ATTEMPTS:
                measure = partial(measure_ratio, net, data, settings, precision, eval_precision)
                state.measured_ratio = ranks.on_first(measure)
            recorder.epoch()
            logger.info("epoch %d of %d%s", state.epoch, settings.max_epochs, _pool_told(state))
        checkpoint.now()
    average.replace()
    logger.info("supernet trained for %d epochs: %s", state.epoch, state.stopped)
    return state


def begin_anew(
    net: Supernet, fresh: Supernet, optimizer: torch.optim.Optimizer, average: AveragedWeights, state: TrainState
) -> None:
    """Take fresh weights and forget what was learned with the old ones. All tensors stay where they are: recorded steps
    write there."""
    net.load_state_dict(fresh.state_dict())
    for memory in optimizer.state.values():
        if (momentum := memory.get("momentum_buffer")) is not None:
            momentum.zero_()
    average.begin()
    state.pool = CandidatePool(state.pool.size)
    state.waiting, state.snapshot, state.novelty = [], [], None


def images_per_path(settings: TrainSettings, data: Data) -> int:
    """Images that the evaluation of one path takes."""
    calibration = min(settings.calibration_images, len(data.train)) if settings.bn == "recalibrate" else 0
    return settings.filter_images + calibration


def calibration_images(data: Data, count: int, rng: np.random.Generator) -> Tensor:
    """Training images, without augmentation, for the statistics of recalibrated BatchNorm."""
    images, _ = data.train.eval_batch(rng.choice(len(data.train), min(count, len(data.train)), replace=False))
    return images


def filter_on_validation(
    net: Supernet,
    data: Data,
    settings: TrainSettings,
    rng: np.random.Generator,
    seed: int,
    state: TrainState,
    epsilon: float,
    precision: str,
) -> Filtered:
    """Algorithm 1 on the current supernet, with validation images that are new for every filtering."""
    chosen = data.val.balanced(settings.filter_images, stream(seed, "filter images", state.draws))
    images, labels = data.val.eval_batch(chosen)
    calibration = None
    if settings.bn == "recalibrate":
        rng_images = stream(seed, "calibration images", state.draws)
        calibration = calibration_images(data, settings.calibration_images, rng_images)

    def losses(paths: Sequence[OpPath]) -> Sequence[float]:
        bn = {"bn": settings.bn, "bn_images": settings.bn_images, "calibration": calibration}
        options = {**bn, "precision": precision, "balanced": data.balanced}
        result = evaluate_paths(net, paths, images, labels, **options)  # type: ignore[arg-type]
        # A path whose loss overflows is the worst of all. If that is every path, the weights are broken.
        found = np.nan_to_num(result.losses, nan=np.inf)
        if np.isinf(found).all():
            raise diverged(state.step, paths[0], net.space)
        return found.tolist()

    m = settings.m if settings.filtering else settings.k
    return filter_paths(net.space, losses, m, settings.k, rng, state.pool, epsilon).decided()


def save_all(run: RunDirectory, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """A checkpoint, and before it the pool for people and for the search; the checkpoint has its own copy."""
    run.supernet.mkdir(exist_ok=True)
    best = CandidatePool.from_state(state["pool"]).best()
    entries = [{"path": path, "loss": loss if math.isfinite(loss) else None} for path, loss in best]
    write_json(run.supernet / "pool.json", entries)
    run.save_checkpoint(step, tensors, state)


def _pool_told(state: TrainState) -> str:
    if state.novelty is not None:
        return f", π = {state.novelty:.3f}"
    return f", {len(state.pool)} paths in the pool" if len(state.pool) else ""
