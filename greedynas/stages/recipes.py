"""The paper's two recipes for training a found network from scratch, built from timm's parts.

`sgd` is the recipe of ProxylessNAS (Cai et al., 2019), for networks without SE; `rmsprop` is that of MnasNet (Tan et
al., 2019), for networks with SE. Every number can be set. `greedynas.settings.recipes` explains what a recipe is and
how to add one.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from greedynas.data.augmentation import check_randaugment
from greedynas.runtime.errors import GreedyNASError
from greedynas.settings.recipes import RECIPES, LearningRateSchedule, Recipe, ResolvedRecipe, limited_warmup
from greedynas.settings.schema import RetrainSettings

if TYPE_CHECKING:
    from timm.scheduler.scheduler import Scheduler


def make_recipe(settings: RetrainSettings) -> ResolvedRecipe:
    """Return the numbers of a training: those of the settings, and the recipe's own where a setting is not given.

    The learning rate is scaled in proportion to the batch size.

    Args:
        settings: The section `retrain` of the settings.

    Returns:
        All numbers of the training.

    Raises:
        GreedyNASError: A setting is given that the recipe does not have, or `randaugment` is not in timm's notation.
    """
    own = RECIPES[settings.recipe].numbers
    check_randaugment(settings.randaugment)
    values: dict[str, Any] = {field.name: getattr(settings, field.name, None) for field in fields(ResolvedRecipe)}
    for key, value in own.items():
        if value is None and values[key] is not None:
            raise _refused(key, settings.recipe)
        values[key] = value if values[key] is None else values[key]
    values["name"] = settings.recipe
    values["lr"] *= values["batch_size"] / own["batch_size"]
    values["warmup_epochs"] = limited_warmup(values["warmup_epochs"], values["epochs"])
    return ResolvedRecipe(**values)


def make_optimizer(network: nn.Module, recipe: ResolvedRecipe) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe for the weights of a network.

    Args:
        network: The network to train.
        recipe: The resolved recipe, which names the registered one.

    Returns:
        A new optimizer.
    """
    return RECIPES[recipe.name].make_optimizer(network, recipe)


def make_schedule(
    optimizer: torch.optim.Optimizer, recipe: ResolvedRecipe, steps_per_epoch: int
) -> LearningRateSchedule:
    """Return the learning-rate schedule of a recipe: `step_update(n)` sets the rate of the update after the first n.

    Args:
        optimizer: The optimizer whose learning rate is set.
        recipe: The resolved recipe, which names the registered one.
        steps_per_epoch: Updates in an epoch.

    Returns:
        The schedule.
    """
    return RECIPES[recipe.name].make_schedule(optimizer, recipe, steps_per_epoch)


# Parts of both recipes, which other recipes may use as well


def sgd_optimizer(network: nn.Module, recipe: ResolvedRecipe) -> torch.optim.Optimizer:
    """Return SGD with Nesterov momentum, without weight decay on BatchNorm and biases."""
    return _timm_optimizer(
        "sgd" if recipe.momentum else "momentum", network, recipe
    )  # timm's sgd uses Nesterov momentum


def rmsprop_optimizer(network: nn.Module, recipe: ResolvedRecipe) -> torch.optim.Optimizer:
    """Return TensorFlow's RMSProp, without weight decay on BatchNorm and biases."""
    return _timm_optimizer("rmsproptf", network, recipe, eps=recipe.eps)


def cosine_schedule(optimizer: torch.optim.Optimizer, recipe: ResolvedRecipe, steps_per_epoch: int) -> "Scheduler":
    """Return a schedule that follows a cosine to 0, updated at every step, after a linear warm-up from 0."""
    from timm.scheduler import CosineLRScheduler  # type: ignore[attr-defined]

    warmup = round((recipe.warmup_epochs or 0) * steps_per_epoch)
    steps = recipe.epochs * steps_per_epoch - warmup
    return CosineLRScheduler(optimizer, steps, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False)


def step_schedule(optimizer: torch.optim.Optimizer, recipe: ResolvedRecipe, steps_per_epoch: int) -> "Scheduler":
    """Return a schedule that scales the rate by `decay_rate` every `decay_epochs`, after a linear warm-up from 0."""
    from timm.scheduler import StepLRScheduler  # type: ignore[attr-defined]

    warmup = round((recipe.warmup_epochs or 0) * steps_per_epoch)
    every, rate = (recipe.decay_epochs or 1) * steps_per_epoch, recipe.decay_rate or 1.0
    # Without a prefix, the decay counts from epoch 0 and not from the end of the warm-up.
    return StepLRScheduler(optimizer, every, rate, warmup_t=warmup, warmup_prefix=False, t_in_epochs=False)  # type: ignore[arg-type]


SGD = Recipe(
    {
        "epochs": 300,
        "batch_size": 256,
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 4e-5,
        "label_smoothing": 0.1,
        "dropout": 0.1,
        "ema": 0.0,
        "warmup_epochs": 0.0,
    },
    sgd_optimizer,
    cosine_schedule,
)
RMSPROP = Recipe(
    {
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
    },
    rmsprop_optimizer,
    step_schedule,
    extensible=True,
)


# For weights that were trained before: a small learning rate, and the average of the last weights.
FINETUNE = Recipe(
    {
        "epochs": 20,
        "batch_size": 32,
        "lr": 0.005,
        "momentum": 0.9,
        "weight_decay": 4e-5,
        "label_smoothing": 0.1,
        "dropout": 0.1,
        "ema": 0.99,
        "warmup_epochs": 0.0,
    },
    sgd_optimizer,
    cosine_schedule,
)


def _timm_optimizer(name: str, network: nn.Module, recipe: ResolvedRecipe, **more: Any) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]

    numbers: dict[str, Any] = {
        "lr": recipe.lr,
        "momentum": recipe.momentum or 0.0,
        "weight_decay": recipe.weight_decay or 0.0,
    }
    return create_optimizer_v2(network, opt=name, **numbers, **more)


def _refused(key: str, recipe: str) -> GreedyNASError:
    owners = [name for name, one in (("sgd", SGD), ("rmsprop", RMSPROP)) if key in one.defaults and name != recipe]
    return GreedyNASError(f"retrain.{key} is a setting of {' and '.join(owners)}; the recipe is {recipe}")
