"""SIGTERM (such as before a machine is preempted) and Ctrl-C: a training writes a checkpoint before it ends.

The command line runs inside `signals_caught`. A training runs inside `unhurried`: it checks `requested` after every
step, saves a checkpoint and ends. Code that must not be interrupted runs inside `unhurried`, too. All other code has
its results on disk already and ends at once.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGAIN = 1.0  # seconds after which another Ctrl-C counts: a scheduler and torchrun may both pass the same signal on


class Stopped(BaseException):
    """A request to end the process. It is no Exception, so that no handler mistakes it for a failure."""

    def __init__(self, number: int, note: str = ""):
        super().__init__(note)
        self.number, self.note = number, note

    @property
    def exit_code(self) -> int:
        """The exit code by the convention of shells: 143 after SIGTERM, 130 after Ctrl-C."""
        return 128 + self.number

    def __str__(self) -> str:
        name = "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name
        note = self.note or "finished work is kept"
        return f"stopped by {name}; {note}; give the same command again to resume from there"


class _Request:
    """The request of the signals that this process has received."""

    number: int | None = None  # the first signal
    since = 0.0  # when it arrived
    raised = False  # whether it ends the process at once
    unhurried = 0  # how many `unhurried` contexts are active
    owner = -1  # the process that catches signals; its workers do not


@contextmanager
def signals_caught() -> Iterator[None]:
    """Catch SIGTERM and Ctrl-C inside this context; only the main thread of the command line may enter it."""
    _Request.number, _Request.raised, _Request.unhurried, _Request.owner = None, False, 0, os.getpid()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [
        number for number in SIGNALS if before[number] is not signal.SIG_IGN
    ]  # shells ignore some signals on purpose
    for number in caught:
        signal.signal(number, _on_signal)
    try:
        yield
    except Exception:
        raise_lost()
        raise
    finally:
        for number in caught:
            signal.signal(number, before[number])
        _Request.number, _Request.raised = None, False


def requested() -> int | None:
    """Return the signal that asks an unhurried training to end, or None."""
    return _Request.number


def raise_lost() -> None:
    """Raise the requested stop again after a signal: C code may have turned it into the error being handled."""
    if _Request.number is not None and _Request.raised:
        raise Stopped(_Request.number) from None


@contextmanager
def unhurried() -> Iterator[None]:
    """Defer signals inside this context, which checks `requested`; a pending one ends the process afterwards."""
    _Request.unhurried += 1
    try:
        yield
    finally:
        _Request.unhurried -= 1
    if _Request.number is not None and not _Request.unhurried:
        raise Stopped(_Request.number)


def _on_signal(number: int, _: FrameType | None) -> None:
    if os.getpid() != _Request.owner:  # a worker that has just started; its parent will end it
        return
    if not _Request.unhurried:
        _Request.number, _Request.raised = number, True
        raise Stopped(number)
    now = time.monotonic()
    if _Request.number is None:
        _Request.number, _Request.since = number, now
        os.write(2, b"stopping after this step; Ctrl-C to stop at once\n")
    elif number == signal.SIGINT and now - _Request.since > AGAIN:
        # The steps since the last checkpoint are lost. A live display has hidden the cursor: show it again.
        os.write(2, b"\x1b[?25h" if sys.stderr.isatty() else b"")
        os._exit(128 + number)
