"""The paper's two ways to train a found network from scratch, built from timm's parts.

`sgd` is ProxylessNAS's (Cai et al., 2019), for networks without SE; `rmsprop` is MnasNet's (Tan et al., 2019), for networks
with SE. Everything in them can be set.
"""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from greedynas.data.augmentation import check_randaugment
from greedynas.runtime.errors import GreedyNASError
from greedynas.settings.schema import RetrainSettings

if TYPE_CHECKING:
    from timm.scheduler.scheduler import Scheduler

LARGEST_WARMUP = 1 / 5  # of all epochs


@dataclass(frozen=True)
class Recipe:
    """One training, all numbers resolved."""

    name: str
    epochs: int
    batch_size: int
    lr: float  # the highest, at this batch size
    momentum: float
    weight_decay: float  # not on BatchNorm and biases
    label_smoothing: float
    dropout: float
    ema: float  # decay of the averaged weights; 0: off
    warmup_epochs: float
    # rmsprop alone; with sgd the learning rate follows a cosine to 0
    eps: float | None
    decay_rate: float | None
    decay_epochs: float | None
    # Options of both
    clip_grad: float | None
    randaugment: str | None
    mixup: float
    cutmix: float
    erasing: float
    teacher_weight: float
    temperature: float
    # Bookkeeping
    log_every: int
    checkpoint_minutes: float
    checkpoint_steps: int | None

    def shortened(self, epochs: int) -> "Recipe":
        """The same in fewer epochs."""
        return replace(self, epochs=epochs, warmup_epochs=_warmup(self.warmup_epochs, epochs))


SGD: dict[str, Any] = {
    "epochs": 300,
    "batch_size": 256,
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 4e-5,
    "label_smoothing": 0.1,
    "dropout": 0.1,
    "ema": 0.0,
    "warmup_epochs": 0.0,
    "eps": None,
    "decay_rate": None,
    "decay_epochs": None,
}
RMSPROP: dict[str, Any] = {
    "epochs": 350,
    "batch_size": 512,
    "lr": 0.064,
    "momentum": 0.9,
    "weight_decay": 1e-5,
    "label_smoothing": 0.0,
    "dropout": 0.2,
    "ema": 0.999,
    "warmup_epochs": 5.0,
    "eps": 1e-3,
    "decay_rate": 0.97,
    "decay_epochs": 3.0,
}
RECIPES = {"sgd": SGD, "rmsprop": RMSPROP}


def make_recipe(settings: RetrainSettings) -> Recipe:
    """The settings with the recipe's own values where they say nothing; the learning rate follows the batch size."""
    own = RECIPES[settings.recipe]
    check_randaugment(settings.randaugment)
    values: dict[str, Any] = {field.name: getattr(settings, field.name, None) for field in fields(Recipe)}
    for key, value in own.items():
        if value is None and values[key] is not None:
            raise GreedyNASError(f"retrain.{key} is a setting of rmsprop; the recipe is {settings.recipe}")
        values[key] = value if values[key] is None else values[key]
    values["name"] = settings.recipe
    values["lr"] *= values["batch_size"] / own["batch_size"]
    values["warmup_epochs"] = _warmup(values["warmup_epochs"], values["epochs"])
    return Recipe(**values)


def make_optimizer(network: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, or TensorFlow's RMSProp; no weight decay on BatchNorm and biases."""
    from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]

    numbers: dict[str, Any] = {"lr": recipe.lr, "momentum": recipe.momentum, "weight_decay": recipe.weight_decay}
    if recipe.name == "rmsprop":
        return create_optimizer_v2(network, opt="rmsproptf", eps=recipe.eps, **numbers)
    return create_optimizer_v2(network, opt="sgd" if recipe.momentum else "momentum", **numbers)  # sgd: with Nesterov


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> "Scheduler":
    """Of the learning rate: `step_update(n)` sets it for the update that follows n others."""
    from timm.scheduler import CosineLRScheduler, StepLRScheduler  # type: ignore[attr-defined]

    warmup = round(recipe.warmup_epochs * steps_per_epoch)
    if recipe.decay_epochs is None:
        steps = recipe.epochs * steps_per_epoch - warmup
        return CosineLRScheduler(optimizer, steps, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False)
    every, rate = recipe.decay_epochs * steps_per_epoch, recipe.decay_rate or 1.0
    # Without a prefix, decay is counted from epoch 0 and not from the end of the warm-up.
    return StepLRScheduler(optimizer, every, rate, warmup_t=warmup, warmup_prefix=False, t_in_epochs=False)


def _warmup(epochs: float, all_epochs: int) -> float:
    """A short training has a short warm-up."""
    return min(epochs, LARGEST_WARMUP * all_epochs)
