"""The typed shapes of the files of a run directory, used by those who write them and by the report."""

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
from greedynas.spaces.budget import Budget

Bits = NDArray[np.bool_]


def pack_bits(bits: Sequence[bool] | Bits) -> str:
    """Return the bits, eight to a byte, in base64."""
    return base64.b64encode(np.packbits(np.asarray(bits, dtype=bool)).tobytes()).decode("ascii")


def unpack_bits(text: str, count: int) -> Bits:
    """Return the `count` bits that `pack_bits` has written; raise ValueError if the text does not hold that many."""
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    except binascii.Error as error:
        raise ValueError(f"is not base64: {error}") from None
    if len(packed) != -(-count // 8):
        raise ValueError(f"has {len(packed)} bytes, {count} bits need {-(-count // 8)}")
    return np.unpackbits(packed, count=count).astype(bool)


# The versions of the files that greedynas writes: each grows when older programs could no longer read the file.
VERSIONS = {
    "run": 2,  # config.yaml, and with it the checkpoints
    "data": 2,  # data.jsonl; the first one was data.json, which held counts and a hash of labels
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
# Only raster images, as data: anything else in an image's place could be a request or a script.
Thumbnail = Annotated[
    str, Field(max_length=500_000, pattern=r"^data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/]+={0,2}$")
]


def _none_for_nan(value: Any) -> Any:
    return None if isinstance(value, float) and isnan(value) else value


# Of a path with an op that the table has no timing for, the latency is not a number.
Latency = Annotated[Positive | None, BeforeValidator(_none_for_nan)]


class Record(BaseModel):
    """Of a file or a line that the other stages write; they may write more than the report shows."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def read_record(file: Path, kind: type[Record]) -> dict[str, Any]:
    """What a stage wrote into a file for itself, all of it, if it is such a record; nothing where there is no file."""
    found = read_json(file)
    try:
        if found:
            kind.model_validate_json(json.dumps(found))
    except ValidationError as error:
        raise GreedyNASError(f"{file} is malformed: {first_problem(error)}; mend or remove it") from None
    return found


class Step(Record):
    """A line of supernet training or of retraining."""

    kind: Literal["step"]
    step: Amount
    loss: Loss
    lr: Positive
    epsilon: Share = 0.0


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
    measured_ratio: Positive | None = None  # None: it could not be measured
    corrected_images_measured: Positive | None = None


class RetrainEpoch(Record):
    kind: Literal["epoch"]
    step: Amount
    epoch: Amount
    loss: Loss
    lr: Positive


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
    score: Loss | None = None  # with `search.additive`: what the search chose by

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
    num_classes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    image_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    supernet_accuracy: Share | None = None
    recipe: str | None = None
    epochs: Amount | None = None
    inherit: bool = False
    teacher: str | None = None
    pretrained: bool | str | None = None
    within: str | None = None  # of a network drawn at random: the search whose budget it keeps


class Asked(Record):
    """`retrain.json` as far as two trainings are compared by it: not the network, not the seed."""

    recipe: dict[str, bool | int | float | str | None]
    inherit: bool
    teacher: str | None
    sync_bn: bool = False


class Choice(Record):
    """What a search chose from: see `choosing.py`."""

    tolerance: Positive  # in standard errors
    images: Annotated[float, Field(gt=0, le=1e30)]  # behind every accuracy
    margin: Share  # how far below the best a path may lie
    tied: Annotated[int, Field(ge=1, le=2**62)]  # evaluated paths that are exactly as good as the best
    within: Annotated[int, Field(ge=1, le=2**62)]  # paths on the front that the images cannot tell from the best
    best: Evaluated


class Chosen(Arch):
    """The network that a search chose. Searches of earlier versions took the highest accuracy and say no more."""

    choice: Choice | None = None


class Candidate(Arch):
    """One of the best found networks after its short training."""

    val_top1: Share
    val_macro: Share | None = None  # missing in files of older versions


class Top(Record):
    """`top.json`: the short trainings before the long one."""

    schema_version: Literal[1]
    candidates: tuple[Candidate, ...]


class Search(Record):
    """`search.json`; `chosen` is missing while the search is running."""

    schema_version: Literal[1]
    name: str
    space: str
    searcher: str
    supernets: Annotated[int, Field(ge=1, le=10**6)] = 1  # of which each accuracy is the mean
    experimental: dict[str, Any] = {}
    metric: Literal["accuracy", "balanced accuracy"] = "accuracy"  # what `accuracy` is
    budget: Budget
    objectives: tuple[Literal["macs", "params", "latency_ms"], ...] = Field(min_length=1)
    pool_init: bool
    from_pool: Amount
    rejected: Amount
    found: tuple[Evaluated, ...]
    front: tuple[Evaluated, ...]
    chosen: Chosen | None = None
    seconds: Positive | None = None

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
    """`test.json`: what the one look at the test set gave."""

    schema_version: Literal[1]
    images: Annotated[int, Field(ge=1, le=2**62)]
    top1: Share
    top5: Share | None = None
    macro: Share
    loss: Loss | None = None
    class_names: tuple[str, ...] = Field(min_length=1)
    per_class: tuple[Share | None, ...]
    confusion: tuple[tuple[Amount, ...], ...]  # rows: the true class
    correct: str | None = None  # by image, in the order of the test set; runs of earlier versions have none
    samples: tuple[Sample, ...] = ()
    copies: Amount | None = None  # of training images among the test images
    absent_classes: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()  # sentences that belong beside every accuracy
    withheld: bool = False  # too many copies: the accuracy is not shown as a result

    @property
    def correct_images(self) -> Bits | None:
        """Which images were classified correctly, in the order of the test set."""
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
            raise GreedyNASError(f"a sample names a class beyond the {classes} there are")
        try:
            right = self.correct_images
        except ValueError as error:
            raise GreedyNASError(f"correct {error}") from None
        if right is not None and abs(right.mean() - self.top1) > 1e-3:
            raise GreedyNASError(f"correct says that {right.mean():.1%} are right, top1 is {self.top1:.1%}")
        return self


class Finished(Tested):
    """The same as retraining reads it."""

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
    agrees: Agreement | None = None
    companions: dict[str, str] = {}  # SHA-256 of further files that belong to it, by name


class LeftOut(Record):
    file: str
    why: str


class Exported(Record):
    """`export.json`."""

    schema_version: Literal[1]
    formats: tuple[str, ...] = ()
    machine: str
    threads: Amount
    images: Amount
    files: tuple[ExportedFile, ...]
    skipped: tuple[LeftOut, ...] = ()
    caveats: tuple[str, ...] = ()
    withheld: bool = False
