"""Recipes describe how a found network is trained from scratch: by numbers, an optimizer and a learning rate schedule.

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

LARGEST_WARMUP = 1 / 5  # as a share of all epochs
NEEDED = ("epochs", "batch_size", "lr")
LOOP = {"label_smoothing": 0.0, "dropout": 0.0, "ema": 0.0}  # done by the training loop with any recipe; 0: off
OPTIONAL = ("momentum", "weight_decay", "warmup_epochs", "eps", "decay_rate", "decay_epochs")
KEYS = (*NEEDED, *LOOP, *OPTIONAL)


class LearningRateSchedule(Protocol):
    """An object that sets the learning rate of an optimizer, such as a scheduler of timm."""

    def step_update(self, num_updates: int, /) -> None:
        """Set the learning rate of the next update, after `num_updates` earlier ones."""


@dataclass(frozen=True)
class ResolvedRecipe:
    """The complete numbers of one training by a recipe. A number that the recipe does not have is None.

    Example:
        >>> import greedynas
        >>> from greedynas.stages.recipes import make_recipe
        >>> make_recipe(greedynas.RetrainSettings(recipe="sgd", batch_size=512)).lr  # it follows the batch size
        0.1
    """

    name: str
    epochs: int
    batch_size: int
    lr: float  # the highest learning rate, at this batch size
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
            that batch size) are required. A key of OPTIONAL that is missing here does not exist in this recipe, and
            setting it is refused.
        make_optimizer: A function that takes the network and the resolved numbers, and returns the optimizer. All that
            it keeps between steps must be in its `state` by parameter, as tensors or numbers, for checkpoints.
        make_schedule: A function that takes the optimizer, the resolved numbers and the steps of an epoch, and returns
            the schedule of the learning rate.
        extensible: Whether the learning rates of the first epochs are independent of the number of epochs that follow,
            so that a finished training can be continued.

    Raises:
        GreedyNASError: A required key is missing from the numbers, or a key is not in KEYS.

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
        """The default of every key, or None if the recipe has no such number."""
        return {**dict.fromkeys(KEYS), **LOOP, **self.defaults}


RECIPES: Registry[Recipe] = Registry(
    "recipe",
    {
        "sgd": "greedynas.stages.recipes:SGD",
        "rmsprop": "greedynas.stages.recipes:RMSPROP",
        "finetune": "greedynas.stages.recipes:FINETUNE",
    },
)


def known_recipe(name: str) -> str:
    """Return the name of a recipe if it is known, for the validation of settings.

    Args:
        name: The name.

    Returns:
        The same name.

    Raises:
        GreedyNASError: No recipe has this name.
    """
    if name not in RECIPES:
        raise RECIPES.unknown(name)
    return name


def limited_warmup(epochs: float | None, all_epochs: int) -> float | None:
    """Return the epochs of the warm-up, limited to a share of all epochs."""
    return None if epochs is None else min(epochs, LARGEST_WARMUP * all_epochs)
