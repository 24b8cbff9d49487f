"""Files that hold the old or the new version after a crash, never half of one; and records that can be truncated."""

import errno
import json
import os
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks

TEMPORARY = ".tmp"
MAX_ARRAYS = 2**31  # bytes, unpacked
MAX_JSON = 100_000_000  # bytes; ten times as much as the longest likely search writes


def write_atomically(file: Path, data: bytes) -> None:
    """Write a file so that it is complete at any moment: write to a temporary file, flush it to disk, rename it.

    With several ranks, only the first one writes.
    """
    if not ranks.is_first():
        return
    temporary = file.with_name(file.name + TEMPORARY)
    try:
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, file)  # noqa: PTH105 (the tests interrupt it by this name)
    except OSError as error:
        with suppress(OSError):  # half a file must not fill a full disk
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(file)) from None
    _sync_folder(file.parent)


def move_atomically(source: Path, file: Path) -> None:
    """Replace a file by a complete one that is already on disk, in the same file system."""
    if ranks.is_first():
        os.replace(source, file)  # noqa: PTH105 (the tests interrupt it by this name)
        _sync_folder(file.parent)


def write_json(file: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_atomically(file, (json.dumps(value, indent=1) + "\n").encode())


def read_bytes(file: Path, most: int = MAX_JSON) -> bytes:
    """Return the bytes of an untrusted file; refuse one with more than `most` bytes without reading it."""
    try:
        if file.stat().st_size > most:
            raise GreedyNASError(f"{file} cannot be read: it is larger than {most:,} bytes")
        return file.read_bytes()
    except OSError as error:
        raise GreedyNASError(f"{file} cannot be read: {error.strerror or error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that `write_json` wrote, or an empty one if there is no such file."""
    if not file.exists():
        return {}
    try:
        found = json.loads(read_bytes(file).decode("utf-8"))
    except GreedyNASError:
        raise
    except (ValueError, RecursionError) as error:
        raise GreedyNASError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise GreedyNASError(f"{file} cannot be read: it does not hold a JSON object")
    return found


def read_arrays(file: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return arrays of an untrusted .npz file; refuse pickles and files that would unpack to gigabytes.

    Raises whatever NumPy and zipfile raise for a damaged file.
    """
    with zipfile.ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MAX_ARRAYS:
            raise ValueError(f"it unpacks to more than {MAX_ARRAYS:,} bytes")
    with np.load(file, allow_pickle=False) as found:
        return {name: found[name] for name in names}


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk: only then a rename in it survives a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some file systems need no flush and refuse it
            raise OSError(error.errno, error.strerror or str(error), str(folder)) from None
    finally:
        os.close(handle)


class Records:
    """A JSON-lines file that grows. A checkpoint stores its length; a resumed run truncates it to that length."""

    def __init__(self, file: Path, length: int = 0):
        file.touch()
        self._handle = file.open("r+b")
        length = min(length, file.stat().st_size)
        self._handle.truncate(length)
        self._handle.seek(length)

    def write(self, **record: Any) -> None:
        """Append a record as one line."""
        self._handle.write((json.dumps(record) + "\n").encode())

    def flush(self) -> int:
        """Pass everything that was written to the operating system and return the length of the file."""
        self._handle.flush()
        return self._handle.tell()

    def sync(self) -> None:
        """Wait until everything that was flushed is on disk. Any thread may call this."""
        os.fsync(self._handle.fileno())

    def close(self) -> None:
        """Close the file."""
        self._handle.close()
