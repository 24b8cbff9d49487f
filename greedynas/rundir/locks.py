"""Locks that let only one process at a time work in a directory.

The lock is one of the operating system (`flock`) and ends with its process, even if that is killed. It is held on both
the directory and a file `.lock` in it, because the file may be removed and some network disks cannot lock a directory.
"""

import errno
import os
import time
import weakref
from pathlib import Path

from greedynas.runtime.errors import GreedyNASError

try:
    import fcntl
except ImportError:
    raise GreedyNASError("greedynas runs on Linux and macOS; on Windows, use it in WSL") from None

# Errors of disks that cannot lock a directory, because they lock only files open for writing or have no such locks.
UNFIT = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


AGAIN = 0.05  # seconds after which a lock that is taken is tried once more


def is_locked(folder: Path) -> bool:
    """Return whether a process works in a directory, without keeping it from others for longer than a moment."""
    try:
        file = os.open(folder / ".lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(file)


class Lock:
    """An exclusive lock on a directory, which this process holds until `close`."""

    def __init__(self, folder: Path):
        self._files: list[int] = []
        _locks.add(self)
        try:
            self._take(folder, folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
            self._take(folder, folder, os.O_RDONLY, may_fail=True)
        except BaseException:
            self.close()
            raise

    def _take(self, folder: Path, place: Path, how: int, may_fail: bool = False) -> None:
        try:
            file = os.open(place, how | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if may_fail:
                return
            raise GreedyNASError(f"cannot write to {folder}: {error.strerror}") from None
        self._files.append(file)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(AGAIN)  # `is_locked` of another process may have had it for a moment
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GreedyNASError(f"{folder} is in use by another greedynas process") from None
        except OSError as error:
            if not (may_fail and error.errno in UNFIT):
                raise GreedyNASError(
                    f"cannot lock {folder}: {error.strerror}; use a disk that has file locks"
                ) from None

    def close(self) -> None:
        """Release the lock."""
        while self._files:
            os.close(self._files.pop())

    def __del__(self) -> None:
        self.close()


# A lock lasts as long as any process has its file open, and workers that outlive a killed parent must not keep it.
_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _close_all() -> None:
    for lock in tuple(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_all)
