"""The run directory on disk: its lock, its log, its checkpoints, and checks of its content."""

import logging
import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from greedynas._version import __version__
from greedynas.rundir.checkpoints import Checkpoint, Checkpoints
from greedynas.rundir.locks import Lock
from greedynas.runtime.cpu.allocator import allocator_name
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")  # names of searches and models in a run


class RunDirectory:
    """A directory that only one process works in: its lock, its log and the checkpoints of its supernet.

    The lock ends with the process, even if that is killed. With several ranks, the first one has the lock and the log
    and writes for all.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.supernet = folder / "supernet"
        self._checkpoints = Checkpoints(self.supernet)
        self._lock: Lock | None = None
        if ranks.is_first():
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

    def close(self) -> None:
        """Release the lock and close the log."""
        if self._lock is not None:
            logger.removeHandler(self._log)
            with suppress(OSError):  # a full disk
                self._log.close()
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Checkpoints of the supernet

    def save_checkpoint(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint of the supernet and remove those that it replaces."""
        self._checkpoints.save(step, tensors, state)

    def keep_checkpoints(self, steps: frozenset[int]) -> None:
        """Keep the checkpoints of these steps when newer ones are written."""
        self._checkpoints.lasting = steps

    def checkpoints(self) -> list[Path]:
        """Return the files of the supernet's checkpoints, newest first."""
        return self._checkpoints.files()

    def load_checkpoint(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None."""
        return self._checkpoints.load()


class _Log(logging.FileHandler):
    """A log handler that neither ends a training nor prints a traceback if the disk is full."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def refuse_links(folder: Path) -> None:
    """Refuse links out of a run directory and special files in it, with which we would write elsewhere or wait."""
    home = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for entry in (Path(parent, name) for name in (*folders, *files)):
            if entry.is_symlink() and not entry.resolve().is_relative_to(home):
                raise GreedyNASError(
                    f"{entry} is a link out of the run directory; replace it by the file or folder that it points to"
                )
            if not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
                raise GreedyNASError(f"{entry} is neither a file nor a folder; remove it")


def versions() -> dict[str, Any]:
    """Return the versions and the environment that results may depend on besides the settings."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "greedynas": __version__,  # known even if greedynas is not installed but only on the path
    }
    for package in ("torch", "torchvision", "timm", "triton", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    environment = {"threads": torch.get_num_threads(), "allocator": allocator_name(), "cuda": _cuda()}
    return found | environment


def _cuda() -> str | None:
    """Return the version of CUDA, or None on a machine whose GPU PyTorch does not use."""
    return torch.version.cuda if torch.cuda.is_available() else None


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Return the dotted keys whose values differ, each with a text that shows both values."""
    before, after = dict(flatten(old)), dict(flatten(new))
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return {key: f"{key} is {before.get(key)!r} there, {after.get(key)!r} here" for key in changed}


def flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and the values of nested dictionaries."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from flatten(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner
