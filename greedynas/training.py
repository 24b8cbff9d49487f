"""Greedy training of a supernet: Algorithm 2 of the paper, and its rivals in the same loop."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from greedynas import distributed, ratio
from greedynas.averaging import AveragedWeights
from greedynas.config import TrainSettings
from greedynas.data import Data
from greedynas.evaluation import autocast, evaluate_paths, full_precision
from greedynas.files import write_json
from greedynas.gpu import engine
from greedynas.gpu.graphs import GraphedTraining
from greedynas.gpu.recording import worth_recording
from greedynas.losses import classification_loss
from greedynas.paths import OpPath
from greedynas.pool import CandidatePool
from greedynas.reduction import added_up, gradients_added_up, my_part, same_weights
from greedynas.runs import Checkpoint, Run, logger
from greedynas.sampling import Filtered, fair_paths, filter_paths, sample_paths
from greedynas.schedule import Schedule
from greedynas.state import TrainState, restore_state, training_tensors
from greedynas.streams import stream
from greedynas.supernet import Supernet, fresh_supernet
from greedynas.syncnorm import synchronise
from greedynas.telemetry import Recorder, checkpointing, diverged


def train_supernet(
    net: Supernet,
    data: Data,
    settings: TrainSettings,
    *,
    seed: int = 0,
    precision: str = "fp32",
    eval_precision: str = "fp32",
    run: Run | None = None,
    console: Console | None = None,
) -> TrainState:
    """Algorithm 2: every k steps sample and filter paths and update the pool, then train each kept path on one batch.

    With a run, training goes on from its newest checkpoint and ends as if it had never been interrupted. The net is left with
    its last weights, or with the averaged ones if the settings ask for an average; if they ask for several supernets, it
    becomes one after the other.
    """
    schedule = Schedule(settings, len(data.train))
    images_per_step = min(settings.batch_size, len(data.train))
    distributed.refuse_small_batch(images_per_step, "train.batch_size")
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
        engine.prepare(net, -(-images_per_step // distributed.size()))

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
                begin_anew(net, fresh_supernet(net.space, settings, seed, number), optimizer, average, state)
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
                state.measured_ratio = distributed.on_first(measure)
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


def why_stop(state: TrainState, schedule: Schedule) -> str | None:
    """The stopping principle, at the end of an epoch: few new paths in a full pool since the end of the epoch before. Of
    several supernets the last one alone may stop early."""
    settings, last = schedule.settings, state.epoch * schedule.steps_per_epoch > schedule.supernets[-1].start
    if settings.stopping and last and state.novelty is not None and state.novelty <= settings.alpha:
        return f"the pool is steady (π = {state.novelty:.3f} ≤ {settings.alpha})"
    return "max_epochs reached" if state.epoch >= settings.max_epochs else None


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


class TrainingStep:
    """`train_step`, or where that would be slower than its kernels (small images on a GPU) the same by replay."""

    def __init__(
        self,
        net: Supernet,
        optimizer: torch.optim.Optimizer,
        settings: TrainSettings,
        class_weights: Tensor | None,
        precision: str,
    ):
        self.net, self.optimizer, self.settings = net, optimizer, settings
        self.class_weights, self.precision = class_weights, precision
        self.recorded: GraphedTraining | None = None

    def __call__(self, images: Tensor, labels: Tensor, paths: Sequence[OpPath], lr: float) -> Tensor:
        small = worth_recording(images) and self.settings.clip_grad is None and distributed.size() == 1
        how = (self.settings, self.class_weights, self.precision)
        if small and self.recorded is None:
            self.recorded = GraphedTraining(self.net, self.optimizer, images, labels, *how)
        if small and self.recorded is not None and self.recorded.images.shape == images.shape:
            return self.recorded(images, labels, paths, lr)
        loss = train_step(self.net, self.optimizer, images, labels, paths, lr, *how)
        self.refresh()
        return loss

    def refresh(self) -> None:
        """After the weights were changed by something else."""
        if self.recorded is not None:
            self.recorded.refresh()


def train_step(
    net: Supernet,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    paths: Sequence[OpPath],
    lr: float,
    settings: TrainSettings,
    class_weights: Tensor | None,
    precision: str,
) -> Tensor:
    """One update. Gradients of several paths on the same batch (`fair`) add up before it, and those of all ranks, each with
    its share of the batch. Returns the mean loss."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)  # paths that are not trained have no gradient, not a zero one
    total = torch.zeros((), device=images.device)
    with gradients_added_up(net.path_modules(path) for path in paths):
        for path in paths:
            with autocast(images.device, precision):
                logits = net(images, path)
            loss = classification_loss(full_precision(logits), labels, class_weights, settings.label_smoothing)
            loss = my_part(loss, len(labels))
            loss.backward()
            total += loss.detach()
    if settings.clip_grad is not None:
        nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], settings.clip_grad)
    optimizer.step()
    return added_up(total) / len(paths)


def make_optimizer(net: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum; no weight decay on BatchNorm and biases, or on everything."""
    from timm.optim import param_groups_weight_decay  # type: ignore[attr-defined]

    decay, nesterov = settings.weight_decay, settings.momentum > 0
    groups = net.parameters() if settings.decay_all else param_groups_weight_decay(net, decay)
    return torch.optim.SGD(groups, settings.lr, settings.momentum, weight_decay=decay, nesterov=nesterov)


def measure_ratio(
    net: Supernet, data: Data, settings: TrainSettings, precision: str, eval_precision: str
) -> float | None:
    """Return the time of a training step over that of a forward evaluation of the same images, on a copy of one path; None
    where the machine is too busy to tell."""
    images, labels = data.val.eval_batch(np.arange(min(settings.batch_size, len(data.val))))
    network = net.subnet([count - 1 for count in net.space.num_ops]).train()
    optimizer = make_optimizer(network, settings)

    def train() -> None:
        optimizer.zero_grad()
        with autocast(images.device, precision):
            logits = network(images)
        F.cross_entropy(full_precision(logits), labels).backward()
        optimizer.step()

    def evaluate() -> None:
        with torch.no_grad(), autocast(images.device, eval_precision):
            network(images)

    found = ratio.judge(ratio.time_turns(train, evaluate, images.device), images.device)
    logger.info(found.message)
    return found.ratio


def save_all(run: Run, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
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
