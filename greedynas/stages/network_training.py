"""The training of one ordinary network by a recipe, as one loop.

network = build_network("greedynas-c", num_classes=10)
network, state = retrain(network, data.train_and_val(), make_recipe(RetrainSettings(epochs=30)))
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from rich.console import Console
from torch import Tensor, nn

from greedynas.data.augmentation import make_mixup, seeded_generators
from greedynas.data.loader import ImageSet
from greedynas.models.losses import classification_loss, distillation_loss, teacher_logits
from greedynas.rundir.callbacks import Callback
from greedynas.rundir.checkpointing import checkpointing
from greedynas.rundir.checkpoints import (
    AVERAGED,
    Checkpoint,
    Checkpoints,
    checkpoint_errors,
    load_training_tensors,
    load_weights,
    training_tensors,
)
from greedynas.rundir.journal import Journal
from greedynas.runtime.devices import autocast, full_precision, prepare
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.runtime.parallel.reduction import (
    broadcast_weights,
    share_of_batch_loss,
    sum_over_ranks,
    summed_gradients,
)
from greedynas.runtime.parallel.sync_batchnorm import synchronise
from greedynas.runtime.text import logger, percent
from greedynas.settings.recipes import LearningRateSchedule, ResolvedRecipe
from greedynas.spaces.paths import OpPath
from greedynas.stages.recipes import make_optimizer, make_schedule
from greedynas.stages.testing import predict_logits, top_accuracy


@dataclass
class RetrainState:
    """The state of a training besides the weights, their average and the state of the optimizer."""

    step: int = 0  # updates done
    epoch: int = 0  # epochs finished
    optimization_images: int = 0
    recent_losses: list[float] = field(default_factory=list)  # since the last line of the metrics
    epoch_loss: float = 0.0  # sum over the steps of the epoch that are in the metrics
    metrics_length: int = 0  # in bytes
    seconds: float = 0.0  # wall-clock time of all sessions
    accuracy: float | None = None  # on validation images after the last epoch


def retrain(
    network: nn.Module,
    images: ImageSet,
    recipe: ResolvedRecipe,
    *,
    seed: int = 0,
    precision: str = "fp32",
    folder: Path | None = None,
    class_weights: Tensor | None = None,
    teacher: nn.Module | None = None,
    teacher_precision: str | None = None,
    sync_bn: bool = False,
    console: Console | None = None,
    title: str = "retraining",
    validation: ImageSet | None = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[nn.Module, RetrainState]:
    """Train a network and return it in evaluation mode, with its averaged weights if the recipe averages them.

    The network must be on the device of the images. With a folder, metrics and checkpoints are written there; training
    resumes from the newest checkpoint and ends with the same weights as an uninterrupted one. The accuracy on images for
    `validation` is written after every epoch; nothing depends on it.
    """
    from timm.utils import ModelEmaV3  # type: ignore[attr-defined]

    images = images.seen(seed=seed, randaugment=recipe.randaugment, erasing=recipe.erasing)
    steps_per_epoch = images.steps_per_epoch(recipe.batch_size)
    images_per_step = min(recipe.batch_size, len(images))
    ranks.refuse_small_batch(images_per_step, "retrain.batch_size")
    mix = make_mixup(recipe.mixup, recipe.cutmix, int(images.labels.max()) + 1, seed)
    images_per_step -= images_per_step % 2 if mix is not None else 0  # with an odd number, one has no partner
    network.train()
    if sync_bn:
        synchronise(network)
    broadcast_weights(network)
    optimizer = make_optimizer(network, recipe)
    schedule = make_schedule(optimizer, recipe, steps_per_epoch)
    # With a warm-up, the average follows the weights closely at first and soon forgets the initial ones.
    average = ModelEmaV3(network, recipe.ema, use_warmup=True) if recipe.ema else None
    saved = None if folder is None else Checkpoints(folder / "checkpoints")
    state = _restored(saved, network, optimizer, average)
    trained = network if average is None else average.module
    if state.epoch >= recipe.epochs:
        return trained.eval(), state

    def contents() -> Checkpoint:
        tensors = training_tensors(network, optimizer)
        if average is not None:
            tensors |= {f"{AVERAGED}{name}": tensor for name, tensor in average.module.state_dict().items()}
        return tensors, asdict(state)

    save = None if saved is None else saved.save
    different = [ranks.rank()] if ranks.rank() else []  # dropout must differ between ranks
    with (
        RetrainJournal(
            folder, state, recipe, steps_per_epoch, optimizer, schedule, title, console, callbacks
        ) as journal,
        checkpointing(journal, contents, save, recipe.checkpoint_minutes, recipe.checkpoint_steps) as checkpoint,
    ):
        while state.epoch < recipe.epochs:
            done = state.step - state.epoch * steps_per_epoch
            for batch, labels in images.train_batches(state.epoch, recipe.batch_size, start=done):
                prepare(batch.device)
                targets = labels
                if mix is not None:
                    batch, targets = mix(batch, labels, state.epoch, state.step - state.epoch * steps_per_epoch)
                schedule.step_update(state.step)
                with (
                    seeded_generators(seed, "dropout", state.step, *different, device=batch.device),
                    autocast(batch.device, precision),
                ):
                    logits = network(batch)
                loss = classification_loss(full_precision(logits), targets, class_weights, recipe.label_smoothing)
                loss = share_of_batch_loss(loss, len(targets))
                if teacher is not None:
                    weight = recipe.teacher_weight
                    wanted = distillation_loss(
                        full_precision(logits),
                        teacher_logits(teacher, batch, teacher_precision or precision),
                        recipe.temperature,
                    )
                    loss = (1 - weight) * loss + weight * share_of_batch_loss(wanted, len(targets))
                optimizer.zero_grad(set_to_none=True)
                with summed_gradients([[network]]):
                    loss.backward()
                if recipe.clip_grad is not None:
                    nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_grad)
                optimizer.step()
                state.step += 1
                state.optimization_images += images_per_step
                if average is not None:
                    average.update(network, state.step)
                journal.step(sum_over_ranks(loss.detach()))
                checkpoint.if_due()
            state.epoch += 1
            if validation is not None:
                state.accuracy = ranks.on_first(partial(_accuracy, trained, validation))
                network.train()
            journal.epoch()
        checkpoint.now()
    logger.info("%s: %d epochs in %.0f s", title, state.epoch, state.seconds)
    return trained.eval(), state


class RetrainJournal(Journal):
    """The metrics of the training of a network. Only `seconds` and `images_per_second` depend on the clock."""

    state: RetrainState

    def __init__(
        self,
        folder: Path | None,
        state: RetrainState,
        recipe: ResolvedRecipe,
        steps_per_epoch: int,
        optimizer: torch.optim.Optimizer,
        schedule: LearningRateSchedule,
        title: str,
        console: Console | None,
        callbacks: Sequence[Callback] = (),
    ):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        steps = recipe.epochs * steps_per_epoch
        super().__init__(folder, state, title, steps, steps_per_epoch, recipe.log_every, console, callbacks)
        self._optimizer, self._schedule, self._title = optimizer, schedule, title

    def epoch(self) -> None:
        """Write the mean loss of a finished epoch, whose last step is always in the metrics."""
        found = {} if self.state.accuracy is None else {"val_accuracy": self.state.accuracy}
        loss = self.state.epoch_loss / self._steps_per_epoch
        self._write("epoch", loss=loss, **self.facts(self.state.step - 1), **found)
        self.state.epoch_loss = 0.0
        self.show()

    def status(self) -> list[str]:
        accuracy = self.state.accuracy
        return [] if accuracy is None else [f"accuracy {percent(accuracy)} (validation images)"]

    def facts(self, step: int) -> dict[str, Any]:
        self._schedule.step_update(step)
        return {"lr": self._optimizer.param_groups[0]["lr"]}

    def diverged(self, step: int, path: OpPath | None = None) -> GreedyNASError:
        return GreedyNASError(
            f"{self._title} diverged: the loss is not a number at step {step}; the last good checkpoint is kept; "
            "train with a lower retrain.lr, or with retrain.clip_grad, under another --name"
        )

    def _log(self) -> None:
        self.state.epoch_loss += sum(self.state.recent_losses)
        super()._log()


def _accuracy(network: nn.Module, images: ImageSet) -> float:
    """Return the top-1 accuracy of a network on images, with running BatchNorm statistics."""
    return top_accuracy(*predict_logits(network, images))


def _restored(
    saved: Checkpoints | None, network: nn.Module, optimizer: torch.optim.Optimizer, average: Any
) -> RetrainState:
    """Load the newest complete checkpoint and return its state, or return a new state if there is no checkpoint."""
    checkpoint = None if saved is None else saved.load()
    if checkpoint is None:
        return RetrainState()
    assert saved is not None
    tensors, state = checkpoint
    with checkpoint_errors(saved.folder):
        restored = TypeAdapter(RetrainState).validate_python(state)
        load_training_tensors(network, optimizer, tensors)
        if average is not None:
            load_weights(average.module, tensors, AVERAGED)
    logger.info("resuming from step %d", restored.step)
    return restored
