"""Recipes: how a found network is trained from scratch. A recipe brings numbers, an optimizer and a learning-rate schedule.

The paper's two recipes are in `greedynas.stages.recipes`. A plugin adds another one:

    from greedynas.settings.recipes import RECIPES, Recipe
    from greedynas.stages.recipes import cosine_schedule

    def adamw(network, recipe):
        return torch.optim.AdamW(network.parameters(), recipe.lr, weight_decay=recipe.weight_decay)

    numbers = {"epochs": 100, "batch_size": 256, "lr": 1e-3, "weight_decay": 0.05, "warmup_epochs": 5.0}
    RECIPES.register("adamw", Recipe(numbers, adamw, cosine_schedule))
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.runtime.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

LARGEST_WARMUP = 1 / 5  # of all epochs
NEEDED = ("epochs", "batch_size", "lr")
LOOP = {"label_smoothing": 0.0, "dropout": 0.0, "ema": 0.0}  # what the loop itself does, with any recipe; 0: off
OPTIONAL = ("momentum", "weight_decay", "warmup_epochs", "eps", "decay_rate", "decay_epochs")
KEYS = (*NEEDED, *LOOP, *OPTIONAL)


class LearningRateSchedule(Protocol):
    """What sets the learning rate of an optimizer, such as a scheduler of timm."""

    def step_update(self, num_updates: int, /) -> None:
        """Set the learning rate of the update that follows `num_updates` others."""


@dataclass(frozen=True)
class ResolvedRecipe:
    """The numbers of one training by a recipe, complete. None is a number that the recipe does not have.

    Example:
        >>> import greedynas
        >>> from greedynas.stages.recipes import make_recipe
        >>> make_recipe(greedynas.RetrainSettings(recipe="sgd", batch_size=512)).lr  # it follows the batch size
        0.1
    """

    name: str
    epochs: int
    batch_size: int
    lr: float  # the highest, at this batch size
    momentum: float | None
    weight_decay: float | None  # not on BatchNorm and biases
    label_smoothing: float
    dropout: float
    ema: float  # decay of the averaged weights; 0: off
    warmup_epochs: float | None
    eps: float | None
    decay_rate: float | None
    decay_epochs: float | None
    # Options of all recipes
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

    def shortened(self, epochs: int) -> "ResolvedRecipe":
        """Return the same recipe with fewer epochs."""
        return replace(self, epochs=epochs, warmup_epochs=limited_warmup(self.warmup_epochs, epochs))


@dataclass(frozen=True)
class Recipe:
    """A way to train a network from scratch.

    Attributes:
        defaults: The recipe's numbers by the keys of the section `retrain`. `epochs`, `batch_size` and `lr` (the highest, at
            that batch size) are needed. A key of OPTIONAL that is missing here does not exist in this recipe: setting it is
            refused.
        make_optimizer: Takes the network and the resolved numbers, and returns the optimizer. All that it remembers between
            steps has to be in its `state` by parameter, as tensors or numbers: that is what checkpoints hold.
        make_schedule: Takes the optimizer, the resolved numbers and the steps of an epoch, and returns what sets the learning
            rate.
        extensible: Whether the learning rates of the first epochs do not depend on how many epochs follow, so that a finished
            training can go on for more.

    Raises:
        GreedyNASError: The numbers lack a needed key, or have one that is not in KEYS.

    Example:
        >>> import greedynas
        >>> from greedynas.stages.recipes import cosine_schedule, sgd_optimizer
        >>> recipe = greedynas.Recipe({"epochs": 100, "batch_size": 128, "lr": 0.1}, sgd_optimizer, cosine_schedule)
        >>> recipe.numbers["epochs"]
        100
    """

    defaults: Mapping[str, Any]
    make_optimizer: Callable[["nn.Module", ResolvedRecipe], "torch.optim.Optimizer"]
    make_schedule: Callable[["torch.optim.Optimizer", ResolvedRecipe, int], LearningRateSchedule]
    extensible: bool = False

    def __post_init__(self) -> None:
        for key in self.defaults:
            if key not in KEYS:
                raise unknown("number of a recipe", key, list(KEYS))
        missing = [key for key in NEEDED if self.defaults.get(key) is None]
        if missing:
            raise GreedyNASError(f"a recipe needs a default for {', '.join(missing)}")

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the default of every key; None where the recipe has no such number."""
        return {**dict.fromkeys(KEYS), **LOOP, **self.defaults}


RECIPES: Registry[Recipe] = Registry(
    "recipe",
    {
        "sgd": "greedynas.stages.recipes:SGD",
        "rmsprop": "greedynas.stages.recipes:RMSPROP",
    },
)


def known_recipe(name: str) -> str:
    """Return the name of a recipe, for settings.

    Args:
        name: What the user wrote.

    Returns:
        The same name.

    Raises:
        GreedyNASError: No recipe has this name.
    """
    if name not in RECIPES:
        raise RECIPES.unknown(name)
    return name


def limited_warmup(epochs: float | None, all_epochs: int) -> float | None:
    """Return the epochs of the warm-up: a short training has a short one."""
    return None if epochs is None else min(epochs, LARGEST_WARMUP * all_epochs)
