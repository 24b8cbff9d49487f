"""The content of a run directory, read and checked for the report; an error names the malformed file in one line."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from greedynas.rundir.run_directory import refuse_links
from greedynas.rundir.schemas import (
    Arch,
    Asked,
    Candidate,
    Epoch,
    Exported,
    Filtering,
    Other,
    PoolEntry,
    Record,
    RetrainEpoch,
    Search,
    Step,
    Tested,
    Top,
)
from greedynas.runtime.errors import GreedyNASError, first_problem
from greedynas.runtime.files import read_bytes
from greedynas.runtime.text import clean, percent
from greedynas.runtime.yaml_files import read_yaml
from greedynas.settings.schema import Config
from greedynas.spaces.latency import LatencyTable, load_latency_table
from greedynas.spaces.paths import canonical
from greedynas.spaces.space import Space, load_space, space_names
from greedynas.stages.run import read_run_config


@dataclass(frozen=True)
class Training:
    """The supernet's metrics."""

    steps: tuple[Step, ...]
    filterings: tuple[Filtering, ...]
    epochs: tuple[Epoch, ...]


@dataclass(frozen=True)
class Model:
    """A trained or untrained network: a folder in models/."""

    name: str
    arch: Arch
    space: Space | None  # of its path; None for timm models and for unknown spaces
    steps: tuple[Step, ...]  # of retraining
    epochs: tuple[RetrainEpoch, ...]
    test: Tested | None = None
    export: Exported | None = None
    top: tuple[Candidate, ...] = ()  # the candidates of its short trainings
    asked: Asked | None = None  # the requested training

    def __repr__(self) -> str:  # without every step of its training
        what = " ".join(self.arch.ops) or self.arch.timm or "unknown ops"
        tested = "untrained" if self.test is None else "withheld" if self.test.withheld else percent(self.test.top1)
        return clean(f"Model({self.name!r}, {what}, {tested})")


@dataclass(frozen=True)
class Facts:
    """Everything that a report can show."""

    folder: Path
    config: Config
    config_text: str
    versions: dict[str, Any]
    training: Training | None
    pool: tuple[PoolEntry, ...]
    searches: tuple[Search, ...]
    networks: dict[str, int]  # number of distinct networks that each search evaluated
    models: tuple[Model, ...]
    chosen: Model | None  # the network at the top of the run
    latency: LatencyTable | None  # of the machine of the run

    @property
    def space(self) -> Space:
        return self.config.space

    @property
    def seconds(self) -> float | None:
        """The seconds of all trainings and searches of the run together, or None if none is known."""
        known = [one.seconds for one in self.searches]
        known += [model.test.seconds for model in self.models if model.test is not None]
        known += [self.training.steps[-1].seconds] if self.training is not None and self.training.steps else []
        found = [seconds for seconds in known if seconds is not None]
        return sum(found) if found else None

    def path_of(self, search: Search) -> tuple[int, ...] | None:
        """Return the path of the network that a search led to, which short trainings may have chosen instead of it."""
        model = next((model for model in self.models if model.name == search.name), None)
        arch = model.arch if model is not None else search.chosen
        return arch.path if arch is not None else None

    def search_of(self, model: Model | None) -> Search | None:
        """Return the search that found a model: the one of the same name, or else one that chose the same path."""
        if model is None or model.arch.within is not None:
            return None  # a random network counts as drawn, even if a search has found the same one
        by_name = [search for search in self.searches if search.name == model.name]
        same = [
            s for s in self.searches if s.chosen is not None and model.arch.path and s.chosen.path == model.arch.path
        ]
        return next(iter(by_name + same), None)


Validated = TypeVar("Validated", bound=BaseModel)
_POOL = TypeAdapter(tuple[PoolEntry, ...])
_KINDS: dict[str, type[Record]] = {"step": Step, "filter": Filtering, "epoch": Epoch}


def read_facts(folder: Path) -> Facts:
    """Read the facts of a run; stages that were not run are left empty. No lock is taken, so stages may be running."""
    config = read_run_config(folder)
    refuse_links(folder)
    file = folder / "config.yaml"
    versions = read_yaml(file, "config file").get("versions")
    searches = tuple(_read_search(file, config.space) for file in sorted((folder / "searches").glob("*/search.json")))
    models = tuple(_read_model(file.parent, config) for file in sorted((folder / "models").glob("*/arch.json")))
    pool_file = folder / "supernet" / "pool.json"
    pool = _checked(pool_file, _POOL.validate_json) if pool_file.is_file() else ()
    _check_paths([entry.path for entry in pool], config.space, pool_file)
    return Facts(
        folder=folder,
        config=config,
        config_text=file.read_text(encoding="utf-8"),
        versions=versions if isinstance(versions, dict) else {},
        training=_read_training(folder / "metrics.jsonl"),
        pool=pool,
        searches=searches,
        networks={search.name: _distinct(search, config.space) for search in searches},
        models=models,
        chosen=_chosen(folder / "arch.json", config, models),
        latency=load_latency_table(table) if (table := folder / "latency.json").is_file() else None,
    )


def _read_training(file: Path) -> Training | None:
    records = list(_lines(file, _KINDS))
    if not records:
        return None
    return Training(
        steps=tuple(record for record in records if isinstance(record, Step)),
        filterings=tuple(record for record in records if isinstance(record, Filtering)),
        epochs=tuple(record for record in records if isinstance(record, Epoch)),
    )


def _read_search(file: Path, space: Space) -> Search:
    search = _read(file, Search)
    if search.space != space.name:
        raise GreedyNASError(f"{file} is a search of the space {search.space!r}, but the run uses {space.name!r}")
    _check_paths([entry.path for entry in (*search.found, *search.front)], space, file)
    return search.model_copy(update={"name": file.parent.name})


def _distinct(search: Search, space: Space) -> int:
    """Count the distinct networks of a search; paths that differ only in the place of identities are one network."""
    return len({canonical(path, space) for path in {entry.path for entry in search.found}})


def _read_model(folder: Path, config: Config) -> Model:
    arch = _read(folder / "arch.json", Arch)
    top = _if_there(folder / "top.json", Top)
    records = list(_lines(folder / "metrics.jsonl", {"step": Step, "epoch": RetrainEpoch}))
    return Model(
        name=folder.name,
        arch=arch,
        space=_space_of(arch, config, folder / "arch.json"),
        steps=tuple(record for record in records if isinstance(record, Step)),
        epochs=tuple(record for record in records if isinstance(record, RetrainEpoch)),
        test=_if_there(folder / "test.json", Tested),
        export=_if_there(folder / "export.json", Exported),
        top=top.candidates if top is not None else (),
        asked=_if_there(folder / "retrain.json", Asked),
    )


def _chosen(file: Path, config: Config, models: Sequence[Model]) -> Model | None:
    """Return the model that the `arch.json` at the top of the run describes."""
    if not file.is_file():
        return None
    arch = _read(file, Arch)
    for model in models:
        if arch.model == model.name or (arch.model is None and arch.path and arch.path == model.arch.path):
            return model
    return Model(arch.model or "found", arch, _space_of(arch, config, file), (), ())


def _space_of(arch: Arch, config: Config, file: Path) -> Space | None:
    """Return the space of a network, at its own image size and number of classes."""
    if arch.space is None or arch.path is None:
        return None
    known = {config.space.name: config.space}
    if arch.space not in known and arch.space in space_names():
        known[arch.space] = load_space(arch.space)
    if arch.space not in known:
        return None
    try:
        channels = config.space.image_channels
        size = None if known[arch.space].sizes else arch.image_size  # else the path chooses its image size
        space = known[arch.space].adapt(arch.num_classes, size, image_channels=channels)
    except GreedyNASError as error:
        raise GreedyNASError(f"{file}: {error}") from None
    _check_paths([arch.path, arch.canonical_path or arch.path], space, file)
    return space


def _check_paths(paths: Sequence[Sequence[int]], space: Space, file: Path) -> None:
    layers = len(space.layers)
    if wrong := next((path for path in paths if len(path) != layers), None):
        raise GreedyNASError(f"{file}: a path of {space.name} has {layers} ops, but one in the file has {len(wrong)}")
    try:
        space.check_paths(paths) if paths else None
    except GreedyNASError as error:
        raise GreedyNASError(f"{file}: {error}") from None


def _read(file: Path, kind: type[Validated]) -> Validated:
    return _checked(file, kind.model_validate_json)


def _if_there(file: Path, kind: type[Validated]) -> Validated | None:
    return _read(file, kind) if file.is_file() else None


def _lines(file: Path, kinds: dict[str, type[Record]]) -> Iterator[Record]:
    """Yield the records of a JSON-lines file, except a last line without a line break, which is still being written."""
    if not file.is_file():
        return
    for number, line in enumerate(io.BytesIO(read_bytes(file)), start=1):
        if not line.endswith(b"\n"):
            return
        if line.strip():
            kind = _validated(f"{file}, line {number}", Other.model_validate_json, line).kind
            if kind in kinds:
                yield _validated(f"{file}, line {number}", kinds[kind].model_validate_json, line)


def _checked(file: Path, validate: Any) -> Any:
    return _validated(str(file), validate, read_bytes(file))


def _validated(where: str, validate: Any, data: bytes) -> Any:
    try:
        return validate(data)
    except ValidationError as error:
        raise GreedyNASError(f"{where} is malformed: {first_problem(error)}; repair or remove it") from None
