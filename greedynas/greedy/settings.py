"""The settings of supernet training and search, with the paper's values as defaults."""

from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from greedynas.greedy.searchers import SEARCHERS
from greedynas.models.batchnorm import BN_MODES
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.registry import Registry
from greedynas.spaces.budget import Budget

# Samplers decide which paths the next updates of a supernet train. Each has a file in `samplers/`. Those in `methods/` also
# learn how good the ops are (architecture parameters).
SAMPLERS: Registry = Registry(
    "sampler",
    {
        "greedy": "greedynas.greedy.samplers.greedy:Greedy",
        "uniform": "greedynas.greedy.samplers.uniform:Uniform",
        "fair": "greedynas.greedy.samplers.fair:Fair",
        "darts": "greedynas.greedy.methods.darts:Darts",
        "fbnet": "greedynas.greedy.methods.fbnet:FBNet",
        "proxyless": "greedynas.greedy.methods.proxyless:Proxyless",
        "proxyless-reinforce": "greedynas.greedy.methods.proxyless:ProxylessReinforce",
        "mdenas": "greedynas.greedy.methods.mdenas:MdeNAS",
        "single-path": "greedynas.greedy.methods.single_path:SinglePath",
    },
)

# Evaluators give a search the accuracies of paths. They are built from (net, data, settings, seed, precision).
EVALUATORS: Registry = Registry("evaluator", {"supernet": "greedynas.greedy.validation:SupernetAccuracies"})

Fraction = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e30)]  # fits into float32, with room for products
Positive = Annotated[float, Field(gt=0, le=1e30)]
Count = Annotated[int, Field(ge=1, le=10**9)]
AtLeastTwo = Annotated[int, Field(ge=2, le=10**9)]  # images: one has no variance


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

    sampler: str = "greedy"  # greedy, uniform, fair, a method with architecture parameters, or one of a plugin
    limits: Budget | None = None  # costs within which paths are explored; null: all paths
    whole_every: Count | None = None  # after every n-th draw, one more update trains the most expensive path
    # Methods with architecture parameters: darts, fbnet, proxyless, proxyless-reinforce, mdenas, single-path
    target: Budget | None = None  # upper limits that the expected cost is pulled to; null: those of `limits`
    latency_table: str | None = None  # file with the latencies of ops, which a target of latency needs
    cost_weight: Amount | None = None  # weight of the cost in the objective; null: the method's own
    arch_lr: Positive | None = None  # learning rate of architecture parameters; null: the method's own
    # Algorithm 1
    m: Count = 10  # paths sampled for each filtering
    k: Count = 5  # paths of these that are kept and trained
    filter_images: Count = 1000  # validation images that rank the paths, class-balanced, new for every filtering
    bn: BatchNormMode = "batch"  # BatchNorm statistics in filtering
    bn_images: AtLeastTwo = 1000  # images that share the statistics of bn: batch
    calibration_images: AtLeastTwo = 256  # training images of bn: recalibrate
    # Candidate pool
    pool_size: Count = 1000  # paths in the pool
    epsilon: Fraction = 0.8  # final probability of sampling from the pool, rising linearly from 0 after warm-up
    warmup: Annotated[int | float, Field(ge=0, le=10**12)] = (
        10_000  # first steps, with uniform sampling: a number (int) or a share of all steps (float)
    )
    alpha: Fraction = 0.08  # training stops after the epoch in which at most this share of the pool is new
    # Ablation
    filtering: bool = True  # false: all sampled paths are trained (m = k)
    pool_sampling: bool = True  # false: ε = 0
    stopping: bool = True  # false: training ends at max_epochs
    # Optimization
    max_epochs: Count = 60  # training ends after these epochs at the latest; all schedules depend on it
    batch_size: AtLeastTwo = 1024
    lr: Positive = 0.12  # initial learning rate, with cosine decay over max_epochs
    lr_end: Fraction = 0.0  # final learning rate as a share of the initial one; 1: a constant rate
    lr_warmup: Fraction = 0.0  # share of the steps in which the learning rate rises linearly from near 0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Amount = 4e-5  # not on BatchNorm and biases
    decay_all: bool = False  # true: weight decay on BatchNorm and biases too
    zero_residuals: bool = False  # true: residual blocks start as identities
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    clip_grad: Positive | None = None  # largest norm of the gradient
    teacher_weight: Fraction = 0.5  # share of the distance to the teacher in the loss, if there is a teacher
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0  # of the teacher's and the paths' probabilities
    sync_bn: bool = False  # true: several ranks use the BatchNorm statistics of the whole batch
    # Bookkeeping
    log_every: Count = 20  # steps
    # validation images on which a path is evaluated after every epoch, for people; train, run and demo take 1000
    accuracy_images: Annotated[int, Field(ge=0, le=10**9)] = 0
    checkpoint_minutes: Positive = 5.0
    checkpoint_steps: Count | None = None  # additional checkpoints at multiples of this number of steps
    keep_checkpoints: AtLeastTwo = 2  # number of newest checkpoints to keep; `study ranking` uses all that exist

    @field_validator("sampler")
    @classmethod
    def _known(cls, sampler: str) -> str:
        if sampler not in SAMPLERS:
            raise SAMPLERS.unknown(sampler)
        return sampler

    @field_validator("limits")
    @classmethod
    def _without_latency(cls, limits: Budget | None) -> Budget | None:
        if limits is not None and "latency_ms" in limits.limits():
            raise GreedyNASError("train.limits takes limits on multiply-adds and parameters, not on latency")
        return limits

    @field_validator("target")
    @classmethod
    def _with_upper_limits(cls, target: Budget | None) -> Budget | None:
        if target is not None and (not target.limits() or any(high is None for _, high in target.limits().values())):
            raise GreedyNASError("train.target takes upper limits: max_macs, max_params, max_latency_ms")
        return target

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.target is not None and "latency_ms" in self.target.limits() and self.latency_table is None:
            raise GreedyNASError(
                "train.target has a latency, which needs train.latency_table, written by greedynas latency"
            )
        if self.k > self.m:
            raise GreedyNASError(f"train.k = {self.k} must be at most train.m = {self.m}")
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
        """Return the settings with `filter_images` limited to the number of validation images."""
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

    # evolution, model, aging, local, …; fronts use evolution; null: evolution, or derivation after a method
    searcher: str | None = None
    population: Annotated[int, Field(ge=2, le=100_000)] = 50
    generations: Annotated[int, Field(ge=1, le=100_000)] = 20  # including the initial one
    bn: BatchNormMode = "batch"  # BatchNorm statistics of the evaluated paths
    bn_images: AtLeastTwo = 500  # images that share the statistics of bn: batch
    calibration_images: Count = 256  # training images of bn: recalibrate
    evaluator: str = "supernet"  # supernet, or the name of a plugin's evaluator; it gives the accuracy of a path
    # Not in the paper: the cheapest path within this many standard errors of the best is chosen; 0: the most accurate
    tolerance: Annotated[float, Field(ge=0, le=1000)] = 1.0

    @field_validator("evaluator")
    @classmethod
    def _known(cls, evaluator: str) -> str:
        if evaluator not in EVALUATORS:
            raise EVALUATORS.unknown(evaluator)
        return evaluator

    @field_validator("searcher")
    @classmethod
    def _known_searcher(cls, searcher: str | None) -> str | None:
        if searcher is not None and searcher not in SEARCHERS:
            raise SEARCHERS.unknown(searcher)
        return searcher
