"""SIGTERM (a machine that is about to be taken away) and Ctrl-C: a training writes a checkpoint before it ends.

The command line works inside `signals_caught`. A training is `unhurried`: it looks at `requested` after every step, saves, and
leaves. So is what must not be interrupted. Everything else has all that it would need on the disk already and ends at once.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGAIN = 1.0  # seconds after which Ctrl-C is meant once more: a scheduler and torchrun both pass a signal on


class Stopped(BaseException):
    """Somebody wants the process to end. Not an Exception: nobody should take it for a fault and carry on."""

    def __init__(self, number: int, told: str = ""):
        super().__init__(told)
        self.number, self.told = number, told

    @property
    def exit_code(self) -> int:
        """As a shell has it: 143 after SIGTERM, 130 after Ctrl-C."""
        return 128 + self.number

    def __str__(self) -> str:
        name = "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name
        return (
            f"stopped by {name}; {self.told or 'what is finished is kept'}; the same command again goes on from there"
        )


class _Wish:
    """What the signals of this process have asked for."""

    number: int | None = None  # the first signal
    since = 0.0  # when it came
    raised = False  # whether it was to end all at once
    unhurried = 0  # how many trainings are inside each other
    owner = -1  # the process that catches them; its workers do not


@contextmanager
def signals_caught() -> Iterator[None]:
    """For the command line, in the main thread."""
    _Wish.number, _Wish.raised, _Wish.unhurried, _Wish.owner = None, False, 0, os.getpid()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]  # shells ignore some on purpose
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
        _Wish.number, _Wish.raised = None, False


def requested() -> int | None:
    """The signal that wants an unhurried training to end."""
    return _Wish.number


def raise_lost() -> None:
    """Where a fault is dealt with: the end that was asked for, if that is what C code has made the fault of."""
    if _Wish.number is not None and _Wish.raised:
        raise Stopped(_Wish.number) from None


@contextmanager
def unhurried() -> Iterator[None]:
    """Signals wait until `requested` is looked at; one that nobody has looked at ends the process after this."""
    _Wish.unhurried += 1
    try:
        yield
    finally:
        _Wish.unhurried -= 1
    if _Wish.number is not None and not _Wish.unhurried:
        raise Stopped(_Wish.number)


def _on_signal(number: int, _: FrameType | None) -> None:
    if os.getpid() != _Wish.owner:  # a worker that has just started; whoever started it will end it
        return
    if not _Wish.unhurried:
        _Wish.number, _Wish.raised = number, True
        raise Stopped(number)
    now = time.monotonic()
    if _Wish.number is None:
        _Wish.number, _Wish.since = number, now
        os.write(2, b"stopping after this step; Ctrl-C to stop at once\n")
    elif number == signal.SIGINT and now - _Wish.since > AGAIN:
        # This costs what has happened since the last checkpoint. A live display has hidden the cursor.
        os.write(2, b"\x1b[?25h" if sys.stderr.isatty() else b"")
        os._exit(128 + number)
