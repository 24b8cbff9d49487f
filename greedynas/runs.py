"""The run directory: configuration, log, metrics, checkpoints. Nothing in it is executed when it is loaded."""

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from greedynas import __version__, distributed, stopping
from greedynas.cleaning import logger as logger
from greedynas.config import Config, validated
from greedynas.data import Data, DataSettings
from greedynas.errors import GreedyNASError
from greedynas.fetching import Told, stored_settings
from greedynas.files import TEMPORARY, read_json, write_atomically
from greedynas.locks import Lock
from greedynas.manifest import read_manifest, refuse_other_identity, times_changed, write_manifest
from greedynas.reading import names_a_folder
from greedynas.yamlfiles import read_yaml

SCHEMA_VERSION = 1
KEEP = 2  # checkpoints, unless it is said otherwise
# Settings that do not change what is computed: they may differ when a run is resumed.
FREE = {"train.checkpoint_minutes", "train.checkpoint_steps", "train.keep_checkpoints", "data.workers", "device"}
FREE |= {"data.root", "data.download"}  # where images lie does not count: `check_data` compares the images
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")  # of searches and models in a run
Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]  # tensors by name, and everything else
DAMAGE = (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError)  # what reading a bad one raises
_CHECKPOINT = re.compile(r"step-(\d+)-([0-9a-f]{16})\.safetensors")


class _Log(logging.FileHandler):
    """A disk that is too full for a line of the log must not end a training, nor print a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class Run:
    """One run on disk. Opening it takes a lock that ends with the process, however that ends."""

    named = Told()

    def __init__(self, folder: Path):
        self.folder = folder
        self.supernet = folder / "supernet"
        self.metrics = folder / "metrics.jsonl"
        self._saved = Checkpoints(self.supernet)
        refuse_links(folder)
        self._lock = Lock(folder)
        try:
            self._log = _Log(folder / "log.txt", encoding="utf-8")
        except OSError as error:
            self._lock.close()
            raise GreedyNASError(f"cannot write to {folder}: {error.strerror}") from None
        logger.setLevel(logging.INFO)
        self._log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(self._log)

    @classmethod
    def start(cls, folder: Path, config: Config) -> "Run":
        """A new run, or the same one again: other settings in a directory that has a run are refused with a list."""
        _refuse_other_ranks(folder, config)
        if not distributed.is_first():
            return _Followed(folder)
        ours = {".lock", "log.txt", "config.yaml", f"config.yaml{TEMPORARY}"}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            refuse_links(folder)
            if not (folder / "config.yaml").exists() and {entry.name for entry in folder.iterdir()} - ours:
                raise GreedyNASError(f"{folder} is not empty and not a greedynas run; name another --out")
            (folder / ".lock").touch()
        except OSError as error:
            raise GreedyNASError(f"cannot write to {folder}: {error.strerror}") from None
        run = cls(folder)
        try:
            if (folder / "config.yaml").exists():
                refuse_differences(folder, run.config(), config)
            write_atomically(folder / "config.yaml", config_text(config).encode())
            run._saved.keep = config.train.keep_checkpoints
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, folder: Path, named: Told | None = None) -> "Run":
        """A run that exists; `named` is what the command line says about its images."""
        _refuse_other_ranks(folder, read_run_config(folder))
        run = cls(folder) if distributed.is_first() else _Followed(folder)
        run.named = named or Told()
        return run

    def config(self) -> Config:
        return read_config(self.folder)

    def image_settings(self) -> DataSettings:
        """Return how the images of this run are read, by its own settings and the command line."""
        return stored_settings(self.config().data, self.named, self.folder)

    def close(self) -> None:
        logger.removeHandler(self._log)
        with suppress(OSError):  # a full disk
            self._log.close()
        self._lock.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_data(self, data: Data) -> None:
        """Refuse other images than the run began with; what they are is written down when it begins."""
        refuse_other_machines(data)
        kept = read_manifest(self.folder)
        if kept is None:
            self._check_labels(data)
        else:
            refuse_other_identity(kept, data.manifest, self.folder)
        if kept is None or times_changed(kept, data.manifest):
            write_manifest(self.folder, data.manifest)

    def _check_labels(self, data: Data) -> None:
        """All that a run of an older version can be compared by."""
        before, now = read_json(self.folder / "data.json"), data.labels_identity()
        changed = differences({key: before.get(key) for key in now}, now) if before else {}
        if changed:
            raise GreedyNASError(
                f"the data is not the same as when {self.folder} was begun ({'; '.join(changed.values())}): bring it back, "
                "or name another --out"
            )

    # Checkpoints of the supernet

    def save_checkpoint(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self._saved.save(step, tensors, state)

    def keep_checkpoints(self, steps: frozenset[int]) -> None:
        """Those after these steps stay when newer ones come."""
        self._saved.lasting = steps

    def checkpoints(self) -> list[Path]:
        """Newest first."""
        return self._saved.files()

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that is whole."""
        return self._saved.load()


class _Followed(Run):
    """A run as ranks other than the first see it: that one has the lock and the log, and writes for all."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.supernet = folder / "supernet"
        self._saved = Checkpoints(self.supernet)

    def close(self) -> None:
        pass

    def check_data(self, data: Data) -> None:
        refuse_other_machines(data)


class Checkpoints:
    """Checkpoints of one training: one file each, named after its step and its content. Those of certain steps stay."""

    def __init__(self, folder: Path, keep: int = KEEP):
        self.folder, self.keep = folder, keep
        self.lasting: frozenset[int] = frozenset()
        self._damaged: set[Path] = set()

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint and drop all but it, lasting ones and the newest earlier one that is not known to be damaged.

        One of the same step says less (it was saved before the end of its epoch), later ones were damaged.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"state": json.dumps(state)})
        digest = hashlib.sha256(data).hexdigest()[:16]
        new = self.folder / f"step-{step:09d}-{digest}.safetensors"
        write_atomically(new, data)
        others = [file for file in self.files() if file != new]
        earlier = [file for file in others if step_of(file) < step and file not in self._damaged]
        keep = {*earlier[: self.keep - 1], *(file for file in earlier if step_of(file) in self.lasting)}
        for file in others:
            if file not in keep:
                file.unlink()
        for file in self.folder.glob(f"*{TEMPORARY}"):  # left by a crash
            file.unlink()

    def files(self) -> list[Path]:
        """Newest first."""
        files = self.folder.glob("step-*.safetensors") if self.folder.is_dir() else []
        return sorted((file for file in files if _CHECKPOINT.fullmatch(file.name)), reverse=True)

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; rank 0 reads it for all."""
        tensors, state = (self._newest() if distributed.is_first() else None) or (None, None)
        state = distributed.broadcast(state)
        return None if state is None else (distributed.broadcast_tensors(tensors), state)

    def _newest(self) -> Checkpoint | None:
        """A damaged one is named and passed over."""
        files = self.files()
        for file in files:
            try:
                return read_checkpoint(file)
            except DAMAGE as error:
                self._damaged.add(file)
                logger.warning("checkpoint %s is damaged (%s); going back to the one before", file.name, error)
        if files:
            logger.warning("no checkpoint is whole; starting from the beginning")
        return None


def _refuse_other_ranks(folder: Path, config: Config) -> None:
    """All ranks of a run must have the same directory and the same settings.

    Images may lie in another folder on another machine: they are compared themselves (`refuse_other_machines`).
    """
    facts = {"run directory": str(folder.absolute()), **flattened(config)}
    if names_a_folder(config.data.source):
        facts = {key: value for key, value in facts.items() if not key.endswith(("data.source", "data.root"))}
    distributed.refuse_difference(facts, f"give every machine the same files, and the same {folder}")


def step_of(file: Path) -> int:
    return int(file.name.split("-")[1])


def read_checkpoint(file: Path) -> Checkpoint:
    try:
        return _read_checkpoint(file)
    except DAMAGE:
        stopping.raise_lost()  # nothing is wrong with the file
        raise


def _read_checkpoint(file: Path) -> Checkpoint:
    match = _CHECKPOINT.fullmatch(file.name)
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()[:16]
    if match is None or digest != match[2]:
        raise ValueError("its content does not fit its name")
    with safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
        return tensors, json.loads(handle.metadata()["state"])


def refuse_links(folder: Path) -> None:
    """A run that somebody else packed must not make us write, or wait, outside of it: no links out of it, no pipes."""
    home = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for entry in (Path(parent, name) for name in (*folders, *files)):
            if entry.is_symlink() and not entry.resolve().is_relative_to(home):
                raise GreedyNASError(f"{entry} is a link out of the run directory; put what it points to in its place")
            if not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
                raise GreedyNASError(f"{entry} is neither a file nor a folder; remove it")


def read_run_config(folder: Path) -> Config:
    """The settings of a run, without taking its lock."""
    if not (folder / "config.yaml").is_file():
        raise GreedyNASError(f"{folder} is not a run directory (it has no config.yaml); greedynas train makes one")
    return read_config(folder)


def read_config(folder: Path) -> Config:
    data = read_yaml(folder / "config.yaml", "config file")
    if data.pop("schema_version", None) != SCHEMA_VERSION:
        raise GreedyNASError(
            f"{folder}/config.yaml is not of schema version {SCHEMA_VERSION}; it needs another greedynas"
        )
    data.pop("versions", None)
    config = validated(data, f"{folder}/config.yaml")
    # A run directory may be somebody else's: it is the command line that allows downloads.
    return config.model_copy(update={"data": config.data.model_copy(update={"download": False})})


def config_text(config: Config) -> str:
    data = {"schema_version": SCHEMA_VERSION, **config.model_dump(mode="json"), "versions": versions()}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def versions() -> dict[str, Any]:
    """What the results may depend on besides the settings."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "greedynas": __version__,  # also where only its folder is on the path
    }
    for package in ("torch", "torchvision", "timm", "triton", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {"threads": torch.get_num_threads(), "cuda": torch.version.cuda}


def refuse_other_machines(data: Data) -> None:
    """Refuse machines with other images than the first one has. One rank of each has read them."""
    digest = data.identity()["digest"] if distributed.local_rank() == 0 else None
    if len({seen for seen in distributed.gather_words(digest) if seen is not None}) > 1:
        raise GreedyNASError("the machines of this run do not have the same images: give each of them the same files")


def refuse_differences(folder: Path, old: Config, new: Config) -> None:
    # Other searches and other models only add to a run.
    extends = ("search.", "retrain.")
    changed = differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    if names_a_folder(old.data.source) and names_a_folder(new.data.source):
        changed.pop("data.source", None)  # the images are compared, not where they lie
    told = "; ".join(text for key, text in changed.items() if key not in FREE and not key.startswith(extends))
    if told:
        raise GreedyNASError(
            f"{folder} holds a run with other settings: {told:.600}. Name another --out, or use the same settings"
        )


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """The keys, dotted, whose values are not the same, and how each of them differs."""
    before, after = dict(_flatten(old)), dict(_flatten(new))
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return {key: f"{key} is {before.get(key)!r} there, {after.get(key)!r} here" for key in changed}


def flattened(config: Config) -> dict[str, Any]:
    """Return the settings by their dotted names."""
    return dict(_flatten(config.model_dump(mode="json")))


def _flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flatten(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner
