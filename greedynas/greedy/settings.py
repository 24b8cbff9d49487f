"""Settings of supernet training and search, with the paper's values as defaults."""

from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from greedynas.models.batchnorm import BN_MODES
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.registry import Registry

# Which paths the next updates of a supernet train. Each sampler is a file in `samplers/`.
SAMPLERS: Registry = Registry(
    "sampler",
    {
        "greedy": "greedynas.greedy.samplers.greedy:Greedy",
        "uniform": "greedynas.greedy.samplers.uniform:Uniform",
        "fair": "greedynas.greedy.samplers.fair:Fair",
    },
)

Fraction = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e30)]  # what float32 can hold, with room for products
Positive = Annotated[float, Field(gt=0, le=1e30)]
Count = Annotated[int, Field(ge=1, le=10**9)]
AtLeastTwo = Annotated[int, Field(ge=2, le=10**9)]  # images: statistics of one alone are no statistics


def _known_mode(name: str) -> str:
    if name not in BN_MODES:
        raise BN_MODES.unknown(name)
    return name


BatchNormMode = Annotated[str, AfterValidator(_known_mode)]


class TrainSettings(BaseModel):
    """The section `train` of the settings (Algorithms 1 and 2). The defaults are the paper's, except for `bn`.

    Example:
        >>> import greedynas
        >>> settings = greedynas.TrainSettings(max_epochs=20)
        >>> settings.m, settings.k, settings.pool_size, settings.alpha
        (10, 5, 1000, 0.08)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampler: str = "greedy"  # greedy, uniform, fair, or one of a plugin
    # Algorithm 1
    m: Count = 10  # paths sampled for each filtering
    k: Count = 5  # of them kept and trained
    filter_images: Count = 1000  # validation images that rank them, class-balanced, new for every filtering
    bn: BatchNormMode = "batch"  # BatchNorm statistics in filtering
    bn_images: AtLeastTwo = 1000  # images that share the statistics of bn: batch
    calibration_images: AtLeastTwo = 256  # training images of bn: recalibrate
    # Candidate pool
    pool_size: Count = 1000
    epsilon: Fraction = 0.8  # probability of sampling from the pool at the end; 0 when warm-up ends, linear in between
    warmup: Annotated[int | float, Field(ge=0, le=10**12)] = (
        10_000  # steps of uniform sampling first (an int), or a share of all (a float)
    )
    alpha: Fraction = 0.08  # stop at the end of the epoch in which no more than this share of the pool is new
    # Ablation
    filtering: bool = True  # off: all sampled paths are trained (m = k)
    pool_sampling: bool = True  # off: ε = 0
    stopping: bool = True  # off: train to max_epochs
    # Optimization
    max_epochs: Count = 60
    batch_size: AtLeastTwo = 1024
    lr: Positive = 0.12  # cosine decay over max_epochs,
    lr_end: Fraction = 0.0  # down to this share of it; 1: a constant rate
    lr_warmup: Fraction = 0.0  # share of the steps in which the rate rises to that, linearly from near 0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Amount = 4e-5  # not on BatchNorm and biases,
    decay_all: bool = False  # unless this is on
    zero_residuals: bool = False  # blocks with a residual start as identities
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    clip_grad: Positive | None = None  # largest norm of the gradient
    sync_bn: bool = False  # with several ranks: BatchNorm statistics of the whole batch, not of each rank's share
    # Bookkeeping
    log_every: Count = 20  # steps
    checkpoint_minutes: Positive = 5.0
    checkpoint_steps: Count | None = None  # besides: every so many steps
    keep_checkpoints: AtLeastTwo = 2  # the newest ones; `study ranking` looks at all that are there

    @field_validator("sampler")
    @classmethod
    def _known(cls, sampler: str) -> str:
        if sampler not in SAMPLERS:
            raise SAMPLERS.unknown(sampler)
        return sampler

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.k > self.m:
            raise GreedyNASError(f"train.k = {self.k} paths cannot be kept of train.m = {self.m}")
        if self.pool_size < self.k:
            raise GreedyNASError(
                f"train.pool_size = {self.pool_size} is smaller than the train.k = {self.k} paths of one filtering"
            )
        if isinstance(self.warmup, float) and self.warmup > 1:
            raise GreedyNASError(
                f"train.warmup = {self.warmup} as a share must be at most 1 (write an integer for steps)"
            )
        return self

    def limited_to(self, val_images: int) -> "TrainSettings":
        """Return the settings with no more filter images than there are validation images."""
        return self.model_copy(update={"filter_images": min(self.filter_images, val_images)})


class SearchSettings(BaseModel):
    """The section `search` of the settings (Algorithm 3). The defaults are the paper's, except for `tolerance` and `bn`.

    Example:
        >>> import greedynas
        >>> settings = greedynas.SearchSettings()
        >>> settings.population * settings.generations
        1000
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    population: Annotated[int, Field(ge=2, le=100_000)] = 50
    generations: Annotated[int, Field(ge=1, le=100_000)] = 20  # the initial one among them
    bn: BatchNormMode = "batch"  # BatchNorm statistics of the evaluated paths
    bn_images: AtLeastTwo = 500  # images that share the statistics of bn: batch
    calibration_images: Count = 256  # training images of bn: recalibrate
    evaluator: str = "supernet"  # what gives the accuracy of a path: supernet, or one of a plugin
    # Not in the paper: the cheapest path within so many standard errors of the best is chosen; 0: the most accurate
    tolerance: Annotated[float, Field(ge=0, le=1000)] = 1.0
