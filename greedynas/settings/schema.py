"""All settings of a run, complete: what `config.yaml` holds."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from greedynas.data.settings import DataSettings
from greedynas.greedy.settings import (
    Amount,
    AtLeastTwo,
    Count,
    Fraction,
    Positive,
    SearchSettings,
    TrainSettings,
)
from greedynas.rundir.callbacks import CALLBACKS
from greedynas.settings.experiments import hooks_of
from greedynas.settings.recipes import known_recipe
from greedynas.spaces.space import Space, load_space

AUTO = "auto"  # the preset that looks at the data and the machine, see `auto.py`
EXTENDING = ("search", "retrain")  # sections whose changes only add to a run


class RetrainSettings(BaseModel):
    """The section `retrain` of the settings: how the found network is trained from scratch. None is the recipe's own value.

    Example:
        >>> import greedynas
        >>> greedynas.RetrainSettings(recipe="rmsprop", epochs=100).epochs
        100
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str = "sgd"  # sgd, rmsprop, or one of a plugin
    epochs: Count | None = None
    batch_size: AtLeastTwo | None = None
    lr: Positive | None = None  # at the recipe's batch size; it follows the real one
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: Amount | None = None  # not on BatchNorm and biases
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None  # decay of the averaged weights; 0: off
    warmup_epochs: Amount | None = None  # at most a fifth of all epochs
    clip_grad: Positive | None = None  # largest norm of the gradient
    sync_bn: bool = False  # with several ranks: BatchNorm statistics of the whole batch, not of each rank's share
    # Of the recipes that ship, rmsprop alone
    eps: Positive | None = None
    decay_rate: Annotated[float, Field(gt=0, le=1)] | None = None  # the learning rate times this,
    decay_epochs: Positive | None = None  # every so many epochs
    # Augmentation, besides the crops and flips of `data`
    randaugment: str | None = None  # timm's notation, such as rand-m9-mstd0.5
    mixup: Annotated[float, Field(ge=0, le=1000)] = 0.0  # both parameters of its Beta distribution
    cutmix: Annotated[float, Field(ge=0, le=1000)] = 0.0
    erasing: Fraction = 0.0  # probability of timm's random erasing
    # Where the weights start from, and what they learn from besides the labels
    inherit: bool = False  # start from the supernet's weights
    teacher: str | None = None  # a timm model that was trained in this run: distillation
    teacher_weight: Fraction = 0.5  # of its part of the loss
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    # The N best found networks get a short training; the best on validation images gets the long one
    top: Annotated[int, Field(ge=1, le=1000)] = 1
    top_epochs: Count | None = None  # None: a tenth of the epochs
    # Bookkeeping
    log_every: Count = 20  # steps
    checkpoint_minutes: Positive = 5.0
    checkpoint_steps: Count | None = None  # besides: every so many steps

    @field_validator("recipe")
    @classmethod
    def _known(cls, recipe: str) -> str:
        return known_recipe(recipe)


class Expectation(BaseModel):
    """What the plan assumes before the data is read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_images: Count
    epochs: Count  # where training is expected to stop


class Asked(BaseModel):
    """What was asked for where the settings were chosen for the data, the machine and the time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str
    hours: float | None = None
    changes: dict[str, Any] = {}

    def chose(self, key: str) -> bool:
        """Return whether `auto` chose the value of a setting, by dotted key, and not the user."""
        return self.preset == AUTO and key not in self.changes

    def told(self) -> str:
        hours = "" if self.hours is None else f" --hours {self.hours:g}"
        changes = "".join(f" {key}={value}" for key, value in sorted(self.changes.items()))
        return f"{self.preset}{hours}{changes}"


class Config(BaseModel):
    """The complete settings of a run: what its `config.yaml` holds.

    Example:
        >>> import greedynas
        >>> config = greedynas.load_config("cifar10", {"train.max_epochs": 10})
        >>> config.space.name, config.train.max_epochs, config.train.sampler
        ('macro', 10, 'greedy')
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # the preset or file it started from
    space: Space  # written out, so that a run does not depend on the file it came from
    image_size: Annotated[int, Field(ge=1)] | None = None  # None: the space's own
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of training; auto: bf16 on a GPU
    engine: Literal["auto", "off"] = "auto"  # off: plain PyTorch on a GPU too
    eval_precision: Literal["auto", "fp32", "bf16"] = "auto"  # of evaluation; auto: bf16 on a GPU, or a CPU that has it
    callbacks: tuple[str, ...] = ()  # what watches trainings, by name
    expect: Expectation | None = None
    asked: Asked | None = None
    reasons: tuple[str, ...] = ()  # why the settings were chosen so
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    experimental: dict[str, Any] = {}  # ideas that are not in the paper, by name; see greedynas.experimental
    rivals: dict[str, str] = {}  # presets with which a study trains other samplers
    study_epochs: Count | None = None  # the most epochs of a study with these settings, whatever its cost allows
    search: SearchSettings = SearchSettings()
    retrain: RetrainSettings = RetrainSettings()

    @field_validator("space", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return load_space(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _at_this_size(self) -> Self:
        if self.image_size is not None and self.image_size != self.space.image_size:
            object.__setattr__(self, "space", self.space.adapt(image_size=self.image_size))
        return self

    @field_validator("callbacks")
    @classmethod
    def _known_callbacks(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in CALLBACKS:
                raise CALLBACKS.unknown(name)
        return names

    @model_validator(mode="after")
    def _known_experiments(self) -> Self:
        hooks_of(self.experimental)
        return self


def extends(key: str) -> bool:
    """Return whether a change of this setting, by dotted key, only adds to a run."""
    return key.partition(".")[0] in EXTENDING
