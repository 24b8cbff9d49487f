"""One process at a time in a directory.

The lock is the system's (`flock`) and ends with its process, however that ends. It is held on the directory itself and on a
file `.lock` in it: somebody may remove the file, and some network disks cannot lock a directory.
"""

import errno
import os
import weakref
from pathlib import Path

from greedynas.runtime.errors import GreedyNASError

try:
    import fcntl
except ImportError:
    raise GreedyNASError("greedynas runs on Linux and macOS; on Windows, use it in WSL") from None

# What a disk answers that cannot lock a directory, because it needs one that is open for writing or has no such locks.
UNFIT = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


class Lock:
    """A directory that this process has for itself until it is closed."""

    def __init__(self, folder: Path):
        self._files: list[int] = []
        _locks.add(self)
        try:
            self._take(folder, folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_APPEND)
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
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GreedyNASError(f"{folder} is in use by another greedynas process") from None
        except OSError as error:
            if not (may_fail and error.errno in UNFIT):
                raise GreedyNASError(
                    f"cannot lock {folder}: {error.strerror}; use a disk that has file locks"
                ) from None

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def __del__(self) -> None:
        self.close()


# A lock lasts as long as any process has its file open: workers that outlive a killed parent must not keep it.
_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _close_all() -> None:
    for lock in tuple(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_all)
