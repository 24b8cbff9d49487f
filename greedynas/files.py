"""Files that are either the old or the new version after a crash, never half of one; and records that can be cut back."""

import json
import os
from pathlib import Path
from typing import Any

from greedynas.errors import GreedyNASError

TEMPORARY = ".tmp"


def write_atomically(file: Path, data: bytes) -> None:
    """Write beside, flush to the disk, rename over: at any moment `file` is whole."""
    temporary = file.with_name(file.name + TEMPORARY)
    with temporary.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, file)  # noqa: PTH105 (the tests interrupt it by this name)
    _sync_folder(file.parent)


def write_json(file: Path, value: Any) -> None:
    write_atomically(file, (json.dumps(value, indent=1) + "\n").encode())


def read_json(file: Path) -> dict[str, Any]:
    """An object that was written by `write_json`; an empty one if there is no such file."""
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise GreedyNASError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise GreedyNASError(f"{file} cannot be read: it holds no object")
    return found


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Records:
    """A JSON-lines file that grows. A checkpoint remembers how long it was; a resumed run cuts it back to that."""

    def __init__(self, file: Path, length: int = 0):
        file.touch()
        self._handle = file.open("r+b")
        length = min(length, file.stat().st_size)
        self._handle.truncate(length)
        self._handle.seek(length)

    def write(self, **record: Any) -> None:
        self._handle.write((json.dumps(record) + "\n").encode())

    def flush(self) -> int:
        """Everything written is on the disk; returns the length."""
        self._handle.flush()
        os.fsync(self._handle.fileno())
        return self._handle.tell()

    def close(self) -> None:
        self._handle.close()
