"""Training of one ordinary network by a recipe: a loop to read from top to bottom.

network = build_network("greedynas-c", num_classes=10)
network, state = retrain(network, data.train_and_val(), make_recipe(RetrainSettings(epochs=30)))
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from greedynas.data.augmentation import make_mixup, seeded_generators
from greedynas.data.loader import ImageSet
from greedynas.models.losses import classification_loss
from greedynas.rundir.checkpointing import checkpointing
from greedynas.rundir.checkpoints import (
    AVERAGED,
    Checkpoint,
    Checkpoints,
    fitting,
    load_training_tensors,
    load_weights,
    training_tensors,
)
from greedynas.rundir.journal import Journal
from greedynas.runtime.devices import autocast, full_precision
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.runtime.parallel.reduction import added_up, gradients_added_up, my_part, same_weights
from greedynas.runtime.parallel.sync_batchnorm import synchronise
from greedynas.runtime.text import logger
from greedynas.settings.recipes import LearningRateSchedule, ResolvedRecipe
from greedynas.spaces.paths import OpPath
from greedynas.stages.recipes import make_optimizer, make_schedule


@dataclass
class RetrainState:
    """What the future of a training depends on besides weights, their average and what the optimizer remembers."""

    step: int = 0  # updates done
    epoch: int = 0  # epochs finished
    optimization_images: int = 0
    recent_losses: list[float] = field(default_factory=list)  # since the last line of metrics
    epoch_loss: float = 0.0  # sum over the steps of the epoch that have a line
    metrics_length: int = 0  # bytes
    seconds: float = 0.0  # wall clock, of all sessions


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
    sync_bn: bool = False,
    console: Console | None = None,
    title: str = "retraining",
) -> tuple[nn.Module, RetrainState]:
    """Train a network that is on the device of the images; returns it with its last weights, the averaged ones if the
    recipe averages, in evaluation mode.

    With a folder, metrics and checkpoints go there, and training goes on from the newest checkpoint and ends as if it had
    never been interrupted.
    """
    from timm.utils import ModelEmaV3  # type: ignore[attr-defined]

    images = images.seen(seed=seed, randaugment=recipe.randaugment, erasing=recipe.erasing)
    steps_per_epoch = images.steps_per_epoch(recipe.batch_size)
    images_per_step = min(recipe.batch_size, len(images))
    ranks.refuse_small_batch(images_per_step, "retrain.batch_size")
    mix = make_mixup(recipe.mixup, recipe.cutmix, int(images.labels.max()) + 1, seed)
    images_per_step -= images_per_step % 2 if mix is not None else 0  # an odd one has no partner
    network.train()
    if sync_bn:
        synchronise(network)
    same_weights(network)
    optimizer = make_optimizer(network, recipe)
    schedule = make_schedule(optimizer, recipe, steps_per_epoch)
    # With a warm-up of its own: at first the average follows the weights closely, else it would remember the initial ones.
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
    different = [ranks.rank()] if ranks.rank() else []  # ranks drop different features
    with (
        RetrainJournal(folder, state, recipe, steps_per_epoch, optimizer, schedule, title, console) as journal,
        checkpointing(journal, contents, save, recipe.checkpoint_minutes, recipe.checkpoint_steps) as checkpoint,
    ):
        while state.epoch < recipe.epochs:
            done = state.step - state.epoch * steps_per_epoch
            for batch, labels in images.train_batches(state.epoch, recipe.batch_size, start=done):
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
                loss = my_part(loss, len(targets))
                if teacher is not None:
                    weight = recipe.teacher_weight
                    wanted = distillation_loss(logits, teacher, batch, recipe, precision)
                    loss = (1 - weight) * loss + weight * my_part(wanted, len(targets))
                optimizer.zero_grad(set_to_none=True)
                with gradients_added_up([[network]]):
                    loss.backward()
                if recipe.clip_grad is not None:
                    nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_grad)
                optimizer.step()
                state.step += 1
                state.optimization_images += images_per_step
                if average is not None:
                    average.update(network, state.step)
                journal.step(added_up(loss.detach()))
                checkpoint.if_due()
            state.epoch += 1
            journal.epoch()
        checkpoint.now()
    logger.info("%s: %d epochs in %.0f s", title, state.epoch, state.seconds)
    return trained.eval(), state


def distillation_loss(
    logits: Tensor, teacher: nn.Module, images: Tensor, recipe: ResolvedRecipe, precision: str
) -> Tensor:
    """How far the network's view of these images is from the teacher's (Hinton et al., 2015): T² · KL at temperature T."""
    with torch.no_grad(), autocast(images.device, precision):
        wanted = teacher(images)
    ours, theirs = ((full_precision(z) / recipe.temperature).log_softmax(1) for z in (logits, wanted))
    return recipe.temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


class RetrainJournal(Journal):
    """What the training of a network tells. Only `seconds` and `images_per_second` depend on the clock."""

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
    ):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        steps = recipe.epochs * steps_per_epoch
        super().__init__(folder, state, title, steps, steps_per_epoch, recipe.log_every, console)
        self._optimizer, self._schedule, self._title = optimizer, schedule, title

    def epoch(self) -> None:
        """At the end of an epoch, whose last step always has a line."""
        self._write("epoch", loss=self.state.epoch_loss / self._steps_per_epoch, **self.facts(self.state.step - 1))
        self.state.epoch_loss = 0.0

    def facts(self, step: int) -> dict[str, Any]:
        self._schedule.step_update(step)
        return {"lr": self._optimizer.param_groups[0]["lr"]}

    def diverged(self, step: int, path: OpPath | None = None) -> GreedyNASError:
        return GreedyNASError(
            f"{self._title} diverged: the loss is not a number at step {step}; the last good checkpoint is kept; "
            "lower retrain.lr or set retrain.clip_grad, under another --name"
        )

    def _log(self) -> None:
        self.state.epoch_loss += sum(self.state.recent_losses)
        super()._log()


def _restored(
    saved: Checkpoints | None, network: nn.Module, optimizer: torch.optim.Optimizer, average: Any
) -> RetrainState:
    """What the newest whole checkpoint holds, put where it belongs; else a new state."""
    checkpoint = None if saved is None else saved.load()
    if checkpoint is None:
        return RetrainState()
    assert saved is not None
    tensors, state = checkpoint
    with fitting(saved.folder):
        restored = TypeAdapter(RetrainState).validate_python(state)
        load_training_tensors(network, optimizer, tensors)
        if average is not None:
            load_weights(average.module, tensors, AVERAGED)
    logger.info("going on from step %d", restored.step)
    return restored
