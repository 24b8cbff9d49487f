"""The schemas of the files of a run directory, used by the code that writes them and by the report."""

import base64
import binascii
import json
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from greedynas.runtime.errors import GreedyNASError, first_problem
from greedynas.runtime.files import read_json
from greedynas.runtime.text import clean
from greedynas.spaces.budget import Budget

Bits = NDArray[np.bool_]


def pack_bits(bits: Sequence[bool] | Bits) -> str:
    """Return the bits, eight to a byte, in base64."""
    return base64.b64encode(np.packbits(np.asarray(bits, dtype=bool)).tobytes()).decode("ascii")


def unpack_bits(text: str, count: int) -> Bits:
    """Return the `count` bits in a text of `pack_bits`; raise ValueError if it holds another number of them."""
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    except binascii.Error as error:
        raise ValueError(f"is not base64: {error}") from None
    if len(packed) != -(-count // 8):
        raise ValueError(f"has {len(packed)} bytes, {count} bits need {-(-count // 8)}")
    return np.unpackbits(packed, count=count).astype(bool)


# The versions of the files that greedynas writes: each is raised when older programs could no longer read the file.
VERSIONS = {
    "run": 2,  # config.yaml, and with it the checkpoints
    "data": 2,  # data.jsonl; version 1 was data.json, with counts and a hash of labels
    "arch": 1,
    "search": 1,
    "retrain": 1,
    "test": 1,
    "export": 1,
    "study": 1,
    "bench": 1,
}

Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[int, Field(ge=0, le=2**62)]
Loss = Annotated[float, Field(ge=-1e30, le=1e30)]
Positive = Annotated[float, Field(ge=0, le=1e30)]
Path_ = tuple[Annotated[int, Field(ge=0, le=1000)], ...]
# Only raster images, embedded as data: anything else in place of an image could be a request or a script.
Thumbnail = Annotated[
    str, Field(max_length=500_000, pattern=r"^data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/]+={0,2}$")
]


def _none_for_nan(value: Any) -> Any:
    return None if isinstance(value, float) and isnan(value) else value


# The latency is NaN for a path with an op that the latency table has no timing for.
Latency = Annotated[Positive | None, BeforeValidator(_none_for_nan)]


class Record(BaseModel):
    """The base of all schemas of files and lines, which may have more fields than those that the report reads."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def read_record(file: Path, kind: type[Record]) -> dict[str, Any]:
    """Return the whole content of a file if it is a valid record of this kind; return {} if there is no file."""
    found = read_json(file)
    try:
        if found:
            kind.model_validate_json(json.dumps(found))
    except ValidationError as error:
        raise GreedyNASError(f"{file} is malformed: {first_problem(error)}; repair or remove it") from None
    return found


class Step(Record):
    """A line of supernet training or of retraining."""

    kind: Literal["step"]
    step: Amount
    loss: Loss
    lr: Positive
    epsilon: Share = 0.0
    seconds: Positive | None = None  # of all sessions so far


class Filtering(Record):
    kind: Literal["filter"]
    step: Amount
    kept: tuple[Loss | None, ...]
    rejected: tuple[Loss | None, ...]
    pool_best: Loss | None
    pool_median: Loss | None
    pool_worst: Loss | None


class Epoch(Record):
    kind: Literal["epoch"]
    step: Amount
    epoch: Amount
    pi: Share | None = None
    pool_size: Amount = 0
    stopped: str | None = None
    optimization_images: Amount
    evaluation_images: Amount
    corrected_images: Positive
    val_accuracy: Share | None = None  # None: it was not measured
    measured_ratio: Positive | None = None  # None: it could not be measured
    corrected_images_measured: Positive | None = None
    probabilities: tuple[tuple[Share, ...], ...] = ()  # of the ops of each layer, by a method that learns them


class RetrainEpoch(Record):
    kind: Literal["epoch"]
    step: Amount
    epoch: Amount
    loss: Loss
    lr: Positive
    val_accuracy: Share | None = None  # None: the validation images are trained on


class Other(Record):
    """A kind of line that the report does not show."""

    kind: str


class PoolEntry(Record):
    path: Path_
    loss: Loss | None


class Evaluated(Record):
    """A path that a search evaluated on the supernet."""

    path: Path_
    accuracy: Share
    generation: Amount
    macs: Amount
    params: Amount
    latency_ms: Latency = None
    ram: Amount | None = None  # where memory was limited
    flash: Amount | None = None
    score: Loss | None = None  # with `search.additive`: the score that the search chose by

    @property
    def worth(self) -> float:
        return self.accuracy if self.score is None else self.score

    def cost(self, name: str) -> float | None:
        value = getattr(self, name)
        return None if value is None else float(value)


class Arch(Record):
    """`arch.json`: a network of a space, or a timm model."""

    schema_version: Literal[1] = 1
    model: str | None = None  # the folder under models/
    space: str | None = None
    path: Path_ | None = None
    canonical_path: Path_ | None = None
    ops: tuple[str, ...] = ()
    timm: str | None = None
    macs: Amount | None = None
    params: Amount | None = None
    latency_ms: Latency = None
    ram: Amount | None = None  # bytes in int8, of a search that limited memory
    flash: Amount | None = None
    num_classes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    image_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    supernet_accuracy: Share | None = None
    recipe: str | None = None
    epochs: Amount | None = None
    inherit: bool = False
    teacher: str | None = None
    pretrained: bool | str | None = None
    within: str | None = None  # for a network drawn at random: the search whose budget it keeps


class Asked(Record):
    """The part of `retrain.json` that two trainings are compared by: neither the network nor the seed."""

    recipe: dict[str, bool | int | float | str | None]
    inherit: bool
    teacher: str | None
    sync_bn: bool = False
    hold_out: bool = False


class Choice(Record):
    """The candidates that a search chose from: see `greedy/searchers/choice.py`."""

    tolerance: Positive  # in standard errors
    images: Annotated[float, Field(gt=0, le=1e30)]  # number of images that every accuracy was measured on
    margin: Share  # the largest accepted distance from the best accuracy
    tied: Annotated[int, Field(ge=1, le=2**62)]  # number of evaluated paths that are exactly as good as the best one
    within: Annotated[
        int, Field(ge=1, le=2**62)
    ]  # number of paths on the front that differ from the best one by less than the margin
    best: Evaluated


class Chosen(Arch):
    """The network that a search chose. Searches of earlier versions chose the highest accuracy and have no `choice`."""

    choice: Choice | None = None


class Candidate(Arch):
    """One of the best networks of a search, after its short training."""

    val_top1: Share
    val_macro: Share | None = None  # missing in files of older versions


class Top(Record):
    """`top.json`: the short trainings of the best networks before the long one."""

    schema_version: Literal[1]
    candidates: tuple[Candidate, ...]


class Search(Record):
    """`search.json`; `chosen` is missing while the search is running."""

    schema_version: Literal[1]
    name: str
    space: str
    searcher: str
    supernet_step: Amount | None = None
    unfinished_epochs: Amount | None = None  # of a supernet that was not fully trained
    supernets: Annotated[int, Field(ge=1, le=10**6)] = 1  # each accuracy is the mean over these
    experimental: dict[str, Any] = {}
    metric: Literal["accuracy", "balanced accuracy"] = "accuracy"  # the meaning of `accuracy`
    budget: Budget
    objectives: tuple[Literal["macs", "params", "latency_ms", "ram", "flash"], ...] = Field(min_length=1)
    pool_init: bool
    from_pool: Amount
    rejected: Amount
    found: tuple[Evaluated, ...]
    front: tuple[Evaluated, ...]
    chosen: Chosen | None = None
    seconds: Positive | None = None

    def __repr__(self) -> str:  # without the evaluated paths
        chosen = "" if self.chosen is None else clean(f", chose {' '.join(self.chosen.ops)}")
        return f"Search({self.name!r}, {len(self.found):,} paths of {self.space}{chosen})"

    @property
    def has_scores(self) -> bool:
        return any(entry.score is not None for entry in self.found)

    @property
    def has_latency(self) -> bool:
        return any(entry.latency_ms is not None for entry in self.found)


class Sample(Record):
    image: Thumbnail
    label: Amount
    predicted: Amount
    probability: Share
    top: tuple[tuple[Amount, Share], ...] = ()


class Tested(Record):
    """`test.json`: the result of the single evaluation on the test set."""

    schema_version: Literal[1]
    images: Annotated[int, Field(ge=1, le=2**62)]
    top1: Share
    top5: Share | None = None
    macro: Share
    loss: Loss | None = None
    class_names: tuple[str, ...] = Field(min_length=1)
    per_class: tuple[Share | None, ...]
    confusion: tuple[tuple[Amount, ...], ...]  # rows: the true class
    correct: str | None = (
        None  # packed bits by image, in the order of the test set; missing in runs of earlier versions
    )
    samples: tuple[Sample, ...] = ()
    copies: Amount | None = None  # number of test images that are copies of training images
    absent_classes: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()  # sentences that are shown with every accuracy
    withheld: bool = False  # too many copies: the accuracy is not shown as a result
    seconds: Positive | None = None  # of the training

    @property
    def correct_images(self) -> Bits | None:
        """The bits of `correct`: whether each image was classified correctly, in the order of the test set."""
        return None if self.correct is None else unpack_bits(self.correct, self.images)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        classes = len(self.class_names)
        if len(self.per_class) != classes:
            raise GreedyNASError(f"per_class has {len(self.per_class)} values for {classes} classes")
        if len(self.confusion) != classes or any(len(row) != classes for row in self.confusion):
            raise GreedyNASError(f"confusion should have {classes} rows of {classes} counts")
        named = [(s.label, s.predicted, *(index for index, _ in s.top)) for s in self.samples]
        if any(index >= classes for indices in named for index in indices):
            raise GreedyNASError(f"a sample names a class that is not one of the {classes}")
        try:
            right = self.correct_images
        except ValueError as error:
            raise GreedyNASError(f"correct {error}") from None
        if right is not None and abs(right.mean() - self.top1) > 1e-3:
            raise GreedyNASError(f"correct has {right.mean():.1%} right images, but top1 is {self.top1:.1%}")
        return self


class Finished(Tested):
    """`test.json` with the fields that retraining reads."""

    epochs: Amount
    seconds: Positive
    arch: Arch


class Agreement(Record):
    images: Amount
    max_difference: Positive


class ExportedFile(Record):
    file: str
    format: str | None = None  # missing in files of older versions
    precision: str
    bytes: Amount
    top1: Share | None = None
    latency_ms: Positive | None = None
    latency_median_ms: Positive | None = None  # of the rounds; missing in files of older versions
    latency_iqr_ms: Positive | None = None
    agrees: Agreement | None = None
    companions: dict[str, str] = {}  # SHA-256 of further files that belong to it, by name


class LeftOut(Record):
    file: str
    why: str


class Exported(Record):
    """`export.json`: the exported files of a network."""

    schema_version: Literal[1]
    formats: tuple[str, ...] = ()
    machine: str
    threads: Amount
    images: Amount
    files: tuple[ExportedFile, ...]
    skipped: tuple[LeftOut, ...] = ()
    caveats: tuple[str, ...] = ()
    withheld: bool = False
