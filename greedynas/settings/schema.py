"""The schema of all settings of a run, as stored in `config.yaml`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import to_jsonable_python

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
from greedynas.runtime.errors import GreedyNASError
from greedynas.settings.experiments import hooks_of
from greedynas.settings.recipes import known_recipe
from greedynas.spaces.space import Space, load_space

AUTO = "auto"  # the preset that chooses settings for the data and the machine (`jobs/auto.py`)
BASE = "base"  # the name in models/ of the fine-tuned network that a space is made around
TEACHER = "teacher"  # that of a fine-tuned network that teaches networks which are trained from scratch
EXTENDING = ("search", "retrain")  # sections whose changes only add to a run


class RetrainSettings(BaseModel):
    """The section `retrain` of the settings: how the found network is trained. None means the value of the recipe.

    Example:
        >>> import greedynas
        >>> greedynas.RetrainSettings(recipe="rmsprop", epochs=100).epochs
        100
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str = "sgd"  # sgd, rmsprop, or the name of a plugin's recipe
    epochs: Count | None = None
    batch_size: AtLeastTwo | None = None
    lr: Positive | None = None  # learning rate at the recipe's batch size; it is scaled to the real batch size
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: Amount | None = None  # not on BatchNorm and biases
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None  # decay of the averaged weights; 0: off
    warmup_epochs: Amount | None = None  # at most a fifth of all epochs
    clip_grad: Positive | None = None  # largest norm of the gradient
    sync_bn: bool = False  # true: several ranks use the BatchNorm statistics of the whole batch
    hold_out: bool = False  # true: validation images are not trained on, but give an accuracy after every epoch
    # Of the built-in recipes, only rmsprop has these
    eps: Positive | None = None  # rmsprop: epsilon
    decay_rate: Annotated[float, Field(gt=0, le=1)] | None = None  # rmsprop: learning rate factor per decay_epochs
    decay_epochs: Positive | None = None  # rmsprop: epochs between two decays of the learning rate
    # Augmentation, besides the crops and flips of `data`
    randaugment: str | None = None  # timm's notation, such as rand-m9-mstd0.5
    mixup: Annotated[float, Field(ge=0, le=1000)] = 0.0  # both parameters of the Beta distribution; 0: off
    cutmix: Annotated[float, Field(ge=0, le=1000)] = 0.0  # both parameters of the Beta distribution; 0: off
    erasing: Fraction = 0.0  # probability of timm's random erasing
    # Initial weights, and distillation
    inherit: bool = False  # true: training starts from the supernet's weights
    teacher: str | None = None  # a timm model that was trained in this run, for distillation
    teacher_weight: Fraction = 0.5  # weight of the distillation loss
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0  # temperature of distillation
    # number of best networks that get a short training; the best of them on validation images gets the long one
    top: Annotated[int, Field(ge=1, le=1000)] = 1
    top_epochs: Count | None = None  # epochs of the short trainings; None: a tenth of the epochs
    # Bookkeeping
    log_every: Count = 20  # steps
    checkpoint_minutes: Positive = 5.0
    checkpoint_steps: Count | None = None  # additional checkpoints at multiples of this number of steps

    @field_validator("recipe")
    @classmethod
    def _known(cls, recipe: str) -> str:
        return known_recipe(recipe)


class AdaptSettings(RetrainSettings):
    """The section `adapt` of the settings: how a pretrained network is fine-tuned before a space around it is searched."""

    recipe: str = "finetune"


class Expectation(BaseModel):
    """The assumptions of an estimate before the data is read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_images: Count
    epochs: Count  # the number of epochs after which training is expected to stop


class Asked(BaseModel):
    """The user's request from which the settings were chosen for the data, the machine and the time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str
    hours: float | None = None
    changes: dict[str, Any] = {}

    @field_validator("changes", mode="before")
    @classmethod
    def _as_stored(cls, changes: dict[str, Any]) -> Any:
        """Convert objects to the values that `config.yaml` holds, so that the same request is equal when it is repeated."""
        return to_jsonable_python(changes, fallback=_plain)

    def chose(self, key: str) -> bool:
        """Return whether `auto`, not the user, chose the value of a setting, given by its dotted key."""
        return self.preset == AUTO and key not in self.changes

    def told(self) -> str:
        """Return the request as it would be written on the command line."""
        hours = "" if self.hours is None else f" --hours {self.hours:g}"
        changes = "".join(f" {key}={_shown(value)}" for key, value in sorted(self.changes.items()))
        return f"{self.preset}{hours}{changes}"


def _plain(value: Any) -> Any:
    """Return a number or an array of NumPy as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise GreedyNASError(f"{value!r:.80} cannot be the value of a setting: it cannot be stored with the run")


def _shown(value: Any) -> str:
    """Return a value for a message; of a space, its name is enough."""
    return str(value.get("name", value) if isinstance(value, dict) else value)


class Config(BaseModel):
    """The complete settings of a run, as stored in its `config.yaml`.

    Example:
        >>> import greedynas
        >>> config = greedynas.load_config("cifar10", {"train.max_epochs": 10})
        >>> config.space.name, config.train.max_epochs, config.train.sampler
        ('macro', 10, 'greedy')
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # the preset or file from which the settings were loaded
    space: Space  # stored as a whole, so that a run does not depend on the file of the space
    image_size: Annotated[int, Field(ge=1)] | None = None  # None: that of the space
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")] = "auto"
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None  # of a CPU; None: all, fewer while others keep it busy
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # precision of training; auto: bf16 on GPUs and CPUs with it
    engine: Literal["auto", "off"] = "auto"  # off: plain PyTorch, without our kernels, gradients and allocator set-up
    eval_precision: Literal["auto", "fp32", "bf16"] = "auto"  # for evaluation; auto: bf16 on GPUs and CPUs with it
    callbacks: tuple[str, ...] = ()  # names of the callbacks that observe trainings
    expect: Expectation | None = None  # assumptions of an estimate before the data is read
    asked: Asked | None = None  # the user's request, where settings were chosen for the data
    reasons: tuple[str, ...] = ()  # reasons for the chosen settings
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    experimental: dict[str, Any] = {}  # ideas that are not in the paper, by name; see greedynas.experimental
    rivals: dict[str, str] = {}  # presets with which a study trains other samplers
    study_epochs: Count | None = None  # largest number of epochs of a study, even if its cost would allow more
    search: SearchSettings = SearchSettings()
    retrain: RetrainSettings = RetrainSettings()
    # With a pretrained network: one that a space is made around (`space.base`), or a teacher
    scratch: bool = False  # true: the preset auto uses no pretrained weights
    taught_by: str | None = (
        None  # a timm network that is fine-tuned and teaches networks which are trained from scratch
    )
    weights: Annotated[str, Field(min_length=1, max_length=4096)] = "auto"  # package, cache, auto (either), or a file
    adapt: AdaptSettings = AdaptSettings()

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
    def _one_teacher(self) -> Self:
        if self.taught_by is None:
            return self
        if self.space.base is not None:
            raise ValueError(
                f"the networks around {self.space.base} are taught by it: taught_by (--teacher) is for networks that are "
                "trained from scratch"
            )
        if self.retrain.teacher is None:
            object.__setattr__(self, "retrain", self.retrain.model_copy(update={"teacher": TEACHER}))
        return self

    @property
    def pretrained(self) -> tuple[str, str] | None:
        """The pretrained network that is fine-tuned first, by its name in models/ and in timm; None if there is none."""
        if self.space.base is not None:
            return BASE, self.space.base
        return None if self.taught_by is None else (TEACHER, self.taught_by)

    @model_validator(mode="after")
    def _known_experiments(self) -> Self:
        hooks_of(self.experimental)
        return self


def extends(key: str) -> bool:
    """Return whether changing a setting, given by its dotted key, only adds to a run."""
    return key.partition(".")[0] in EXTENDING
