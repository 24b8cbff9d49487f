"""Everything that can be set, with its defaults: presets and config files are YAML, `--set key=value` changes one value."""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from greedynas.data import DataSettings
from greedynas.errors import GreedyNASError, unknown
from greedynas.fetching import Told, stored_settings
from greedynas.space import Space, first_problem, load_space
from greedynas.yamlfiles import parse_value, read_yaml

PRESETS = Path(__file__).parent / "presets"
AUTO = "auto"  # the preset that looks at the data and the machine, see `auto.py`
EXTENDING = ("search", "retrain")  # sections whose changes only add to a run

Fraction = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e30)]  # what float32 can hold, with room for products
Positive = Annotated[float, Field(gt=0, le=1e30)]
Count = Annotated[int, Field(ge=1, le=10**9)]
AtLeastTwo = Annotated[int, Field(ge=2, le=10**9)]  # images: statistics of one alone are no statistics


Sampler = Literal["greedy", "uniform", "fair"]


class TrainSettings(BaseModel):
    """Supernet training (Algorithms 1 and 2). The defaults are the paper's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampler: Sampler = "greedy"
    # Algorithm 1
    m: Count = 10  # paths sampled for each filtering
    k: Count = 5  # of them kept and trained
    filter_images: Count = 1000  # validation images that rank them, class-balanced, new for every filtering
    bn: Literal["batch", "recalibrate", "running"] = "batch"  # BatchNorm statistics in filtering
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
    split_after_identity: bool = False  # a layer has other weights behind an identity
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    clip_grad: Positive | None = None  # largest norm of the gradient
    sync_bn: bool = False  # with several ranks: BatchNorm statistics of the whole batch, not of each rank's share
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0  # decay of averaged weights, which a search then evaluates; 0: off
    # Supernets on which a search evaluates every path, to average
    supernets: Count = 1  # one after the other from fresh weights, each for its part of max_epochs
    snapshots: Count = 1  # of each of them: the last, the others evenly since the end of its warm-up
    # Bookkeeping
    log_every: Count = 20  # steps
    checkpoint_minutes: Positive = 5.0
    checkpoint_steps: Count | None = None  # besides: every so many steps
    keep_checkpoints: AtLeastTwo = 2  # the newest ones; `study ranking` looks at all that are there

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
    """Search on the trained supernet (Algorithm 3). The defaults are the paper's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    population: Annotated[int, Field(ge=2, le=100_000)] = 50
    generations: Annotated[int, Field(ge=1, le=100_000)] = 20  # the initial one among them
    bn: Literal["batch", "recalibrate", "running"] = "batch"  # BatchNorm statistics of the evaluated paths
    bn_images: AtLeastTwo = 500  # images that share the statistics of bn: batch
    calibration_images: Count = 256  # training images of bn: recalibrate
    additive: Fraction = 0.0  # of the score that a network is chosen by: an additive model of all evaluated paths
    # Not in the paper: the cheapest path within so many standard errors of the best is chosen; 0: the most accurate
    tolerance: Annotated[float, Field(ge=0, le=1000)] = 1.0


class RetrainSettings(BaseModel):
    """Training of the found network from scratch. None: the recipe's own value (see `recipes.py`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Literal["sgd", "rmsprop"] = "sgd"
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
    # rmsprop alone
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
    """A run's settings, complete: what `config.yaml` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # the preset or file it started from
    space: Space  # written out, so that a run does not depend on the file it came from
    image_size: Annotated[int, Field(ge=1)] | None = None  # None: the space's own
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of training; auto: bf16 on a GPU
    engine: Literal["auto", "off"] = "auto"  # off: plain PyTorch on a GPU too
    eval_precision: Literal["auto", "fp32", "bf16"] = "auto"  # of evaluation; auto: bf16 on a GPU, or a CPU that has it
    expect: Expectation | None = None
    asked: Asked | None = None
    reasons: tuple[str, ...] = ()  # why the settings were chosen so
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    samplers: dict[Sampler, dict[str, Any]] = {}  # what suits another sampler better: counts when that one is chosen
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

    @model_validator(mode="after")
    def _samplers_have_settings_of_training(self) -> Self:
        for sampler, own in self.samplers.items():
            try:
                TrainSettings.model_validate({**self.train.model_dump(), **own})
            except ValidationError as error:
                raise GreedyNASError(f"samplers.{sampler}.{first_problem(error)}") from None
        return self


def extends(key: str) -> bool:
    """Return whether a change of this setting, by dotted key, only adds to a run."""
    return key.partition(".")[0] in EXTENDING


def preset_names() -> list[str]:
    """What stands in for a config file: those that ship, and `auto`, which is made for the data it is given."""
    return sorted([AUTO, *(file.stem for file in PRESETS.glob("*.yaml"))])


def load_config(source: str | Path, changes: dict[str, Any] | None = None, section: str = "train") -> Config:
    """A preset by name or a YAML file, with changes by (dotted) key.

    A bare key such as `lr` means the one of `section`, else the only section that has it.
    """
    if str(source) == AUTO:
        from greedynas.auto import auto_config

        return auto_config(changes or {}, section=section)[0]
    if str(source) in preset_names():
        data = read_yaml(PRESETS / f"{source}.yaml", "config file")
    elif Path(source).is_file():
        data = read_yaml(Path(source), "config file")
    else:
        raise unknown("preset", str(source), [*preset_names(), "or a YAML file"])
    of_a_run = "schema_version" in data
    for key in ("schema_version", "versions"):  # the config.yaml of a run is a config like any other,
        data.pop(key, None)
    changes = changes or {}
    config = changed({"name": Path(source).stem, **data}, changes, str(source), section)
    return _of_a_run(config, changes, str(source), section) if of_a_run else config


def _of_a_run(config: Config, changes: dict[str, Any], source: str, section: str) -> Config:
    """Return the settings of a run, but that nothing is fetched which the changes do not ask for: it may be somebody else's."""
    places = resolved(changes, section)
    told = Told(places.get("data.source"), places.get("data.root"), bool(places.get("data.download")))
    return config.model_copy(update={"data": stored_settings(config.data, told, source)})


def changed(data: dict[str, Any], changes: dict[str, Any], source: str, section: str = "train") -> Config:
    """The settings of a config file with changes by (dotted) key. Another sampler brings along what suits it."""
    places = {tuple(key.split(".")): value for key, value in resolved(changes, section).items()}
    sampler = places.get(("train", "sampler"))
    if sampler is not None:
        data = {**data, "train": suiting(data, sampler)}
    for path, value in places.items():
        place = data
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise GreedyNASError(f"{'.'.join(path[:-1])} in {source} is not a section")
        place[path[-1]] = value
    return validated(data, source)


def suiting(data: dict[str, Any], sampler: Any) -> Any:
    """The section `train` of a config file for a sampler: if it is not the file's own, with what `samplers` has for it."""
    train, samplers = data.get("train", {}), data.get("samplers")
    if not isinstance(train, dict) or not isinstance(samplers, dict) or train.get("sampler", "greedy") == sampler:
        return train  # what is wrong here is told when all is there
    own = samplers.get(sampler) if isinstance(sampler, str) else None
    return {**train, **own} if isinstance(own, dict) else train


def changed_section(config: Config, section: str, changes: dict[str, Any]) -> Any:
    """One section of a run's settings with changes to it alone."""
    current = getattr(config, section)
    for key in changes:
        path = resolve_key(key, section)
        if path[0] != section:
            raise GreedyNASError(f"{'.'.join(path)} is fixed in this run; here only {section}.* can be set")
    values = {resolve_key(key, section)[1]: value for key, value in changes.items()}
    try:
        return type(current).model_validate({**current.model_dump(), **values})
    except ValidationError as error:
        raise GreedyNASError(f"{section}.{first_problem(error)}") from None


def validated(data: dict[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden" and problem["loc"][0] != "space":
            raise GreedyNASError(f"{source}: {_unknown_setting(key)}") from None
        raise GreedyNASError(f"{source}: {first_problem(error)}") from None


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """`["lr=0.1", "data.flip=false"]` -> values by key, read as YAML."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise GreedyNASError(f"--set takes key=value, got {assignment!r}")
        try:
            value = parse_value(text)
        except ValueError as error:
            raise GreedyNASError(f"--set {key.strip()}: cannot read the value {text!r:.100} ({error!s:.200})") from None
        if repr(changes.setdefault(key.strip(), value)) != repr(value):  # not a number is not equal to itself
            raise GreedyNASError(f"--set {key.strip()} is given twice: {changes[key.strip()]!r:.60} and {value!r:.60}")
    return changes


def all_keys() -> list[str]:
    """Every setting by its dotted name."""
    keys = []
    for name, field in Config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        keys += [name] if inner is None or name == "space" else [f"{name}.{key}" for key in inner]
    return keys


def resolve_key(key: str, section: str) -> list[str]:
    keys = all_keys()
    candidates = [name for name in keys if name == key or name.endswith(f".{key}")]
    for exact in (key, f"{section}.{key}"):
        if exact in keys:
            return exact.split(".")
    if len(candidates) == 1:
        return candidates[0].split(".")
    if candidates:
        raise GreedyNASError(f"setting {key!r} is ambiguous: {' or '.join(candidates)}")
    raise GreedyNASError(_unknown_setting(key))


def resolved(changes: dict[str, Any], section: str) -> dict[str, Any]:
    """Return changes by the full names of their settings; two names of one setting must not say different things."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        name = ".".join(resolve_key(key, section))
        if repr(found.setdefault(name, value)) != repr(value):
            raise GreedyNASError(f"{name} is set twice: {found[name]!r:.60} and {value!r:.60}")
    return found


def _unknown_setting(key: str) -> str:
    keys = all_keys()
    short = {name.rpartition(".")[2]: name for name in keys}
    near = get_close_matches(key, keys, n=1) or [short[name] for name in get_close_matches(key, list(short), n=1)]
    hint = f"; did you mean {near[0]!r}?" if near else f"; settings: {', '.join(keys)}"
    return f"unknown setting {key!r}{hint}"
