"""The number of threads that PyTorch computes with, lowered while other processes keep CPUs busy.

The threads of an operation wait for the slowest one. If another process holds its CPU, all of them stand still for a few
milliseconds in every operation: beside one busy process on two CPUs, two threads are two to eighty times slower than one.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from greedynas.runtime.text import logger

FIXED_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # environment variables with which a user fixes the number
LOOK_SECONDS = 2.0  # time between two looks at the load
FEWER_AFTER, MORE_AFTER = 2, 5  # looks in a row that have to agree; a short disturbance changes nothing
Reading = tuple[float, float]  # CPU seconds of all processes on our CPUs, and of this process with its children


class ThreadKeeper:
    """Watches the load of the machine and sets the number of threads.

    A number that the user has fixed, by an environment variable, by `torch.set_num_threads` or by the setting `threads`,
    is never changed.
    """

    def __init__(
        self,
        read: Callable[[], Reading | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpus: int | None = None,
    ):
        self._read, self._clock = read or cpu_seconds, clock
        self._cpus = cpus or len(usable_cpus())
        self._most = self._set = torch.get_num_threads()
        self._fixed = any(os.environ.get(name) for name in FIXED_BY) or self._most < 2
        self._before: tuple[float, Reading] | None = None
        self._opinions: list[int] = []  # the numbers of threads that the last looks wanted

    def fix(self, threads: int) -> None:
        """Use this number of threads from now on."""
        torch.set_num_threads(threads)
        self._fixed = True

    def look(self) -> None:
        """Look at the load, at most every few seconds, and change the number of threads if it has lasted."""
        now = self._clock()
        if self._fixed or (self._before is not None and now - self._before[0] < LOOK_SECONDS):
            return
        if torch.get_num_threads() != self._set:  # somebody else has set it
            self._fixed = True
            return
        reading, before = self._read(), self._before
        if reading is None:
            self._fixed = True  # this system does not tell the load
            return
        self._before = (now, reading)
        if before is None:
            return
        everything, ours = (new - old for new, old in zip(reading, before[1], strict=True))
        others = max(0.0, everything - ours) / (now - before[0])
        self._consider(others)

    def _consider(self, others: float) -> None:
        """Change the number of threads if enough looks agree; `others` is the number of CPUs that others keep busy."""
        wanted = min(max(round(self._cpus - others), 1), self._most)
        self._opinions = [*self._opinions[1 - MORE_AFTER :], wanted]
        recent = self._opinions[-FEWER_AFTER:]
        threads = self._set
        if len(recent) == FEWER_AFTER and max(recent) < self._set:
            threads = max(recent)
        elif len(self._opinions) == MORE_AFTER and min(self._opinions) > self._set:
            threads = min(self._opinions)
        if threads != self._set:
            logger.info(
                "%d instead of %d threads from here on: other processes keep %.1f of %d CPUs busy",
                threads, self._set, others, self._cpus,
            )  # fmt: skip
            torch.set_num_threads(threads)
            self._set = threads


_keeper: ThreadKeeper | None = None


def adapt_threads() -> None:
    """Lower the number of threads while other processes keep CPUs busy. It is called at every step and costs nothing."""
    global _keeper
    _keeper = _keeper or ThreadKeeper()
    _keeper.look()


def fix_threads(threads: int) -> None:
    """Use a fixed number of threads from now on, whatever the load."""
    global _keeper
    _keeper = _keeper or ThreadKeeper()
    _keeper.fix(threads)


def usable_cpus() -> list[int]:
    """Return the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_seconds() -> Reading | None:
    """Return the CPU time of all processes on our CPUs and that of this process, or None if the system does not tell.

    Processes that yield to this one (`nice`) are not counted, for they do not hold it up.
    """
    try:
        ticks = os.sysconf("SC_CLK_TCK")
        ours = {f"cpu{number}" for number in usable_cpus()}
        everything = 0.0
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name in ours:
                user, nice, system, _, _, interrupts, soft_interrupts = map(int, fields[:7])
                everything += user + system + interrupts + soft_interrupts + (nice if os.nice(0) > 0 else 0)
        return everything / ticks, _own_seconds(ticks)
    except (OSError, ValueError, AttributeError):
        return None


def _own_seconds(ticks: int) -> float:
    """Return the CPU time of this process and its children, such as the workers that load images."""
    total = sum(os.times()[:4])
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended, or this kernel does not list children
            for child in (thread / "children").read_text(encoding="ascii").split():
                with suppress(OSError):  # the child has ended
                    fields = Path(f"/proc/{child}/stat").read_text(encoding="utf-8", errors="replace")
                    total += sum(map(int, fields.rpartition(")")[2].split()[11:13])) / ticks
    return total
