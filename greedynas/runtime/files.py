"""Files that are either the old or the new version after a crash, never half of one; and records that can be cut back."""

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
MAX_JSON = 100_000_000  # bytes; the longest search that is likely has a tenth of that


def write_atomically(file: Path, data: bytes) -> None:
    """Write beside, flush to the disk, rename over: at any moment `file` is whole. Of several ranks the first one writes."""
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
    """Put a file that is whole and on the disk in the place of another one, in the same file system."""
    if ranks.is_first():
        os.replace(source, file)  # noqa: PTH105 (the tests interrupt it by this name)
        _sync_folder(file.parent)


def write_json(file: Path, value: Any) -> None:
    write_atomically(file, (json.dumps(value, indent=1) + "\n").encode())


def read_bytes(file: Path, most: int = MAX_JSON) -> bytes:
    """Return the content of a JSON file, which may be somebody else's; one of more bytes than that is refused unread."""
    try:
        if file.stat().st_size > most:
            raise GreedyNASError(f"{file} cannot be read: it is larger than {most:,} bytes")
        return file.read_bytes()
    except OSError as error:
        raise GreedyNASError(f"{file} cannot be read: {error.strerror or error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """An object that was written by `write_json`; an empty one if there is no such file."""
    if not file.exists():
        return {}
    try:
        found = json.loads(read_bytes(file).decode("utf-8"))
    except GreedyNASError:
        raise
    except (ValueError, RecursionError) as error:
        raise GreedyNASError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise GreedyNASError(f"{file} cannot be read: it holds no object")
    return found


def read_arrays(file: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Arrays of an .npz file, which may be somebody else's: without pickles, and not if it would unpack to gigabytes.

    Raises what NumPy and zipfile raise for a damaged one.
    """
    with zipfile.ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MAX_ARRAYS:
            raise ValueError(f"it unpacks to more than {MAX_ARRAYS:,} bytes")
    with np.load(file, allow_pickle=False) as found:
        return {name: found[name] for name in names}


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # of disks that do this by themselves
            raise OSError(error.errno, error.strerror or str(error), str(folder)) from None
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
        """Everything written is the system's to keep; returns the length."""
        self._handle.flush()
        return self._handle.tell()

    def sync(self) -> None:
        """What was flushed is on the disk. Any thread may call this."""
        os.fsync(self._handle.fileno())

    def close(self) -> None:
        self._handle.close()
