"""Output on the terminal, for the whole package.

The consoles of `make_console`, `say` and `complain` print only cleaned text (see `text.clean`), and take no markup from
strings. `tests/runtime/test_terminal.py` checks that nothing is printed by other means. Output for programs (`--json`)
is ASCII and stays exact. A failure to print never ends the work: see `steady_streams`.
"""

import errno
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from greedynas.runtime.text import clean, duration, logger

LINE_SECONDS = 30.0  # between two lines of progress where there is no bar


class CleanConsole(Console):
    """A console that prints each text as one line, with escaped control characters and no markup or emoji codes.

    Use a `rich.console.Group` for a text of several lines.
    """

    def __init__(self, line_seconds: float = LINE_SECONDS, **options: Any):
        super().__init__(**{"markup": False, "emoji": False, **options})
        self.line_seconds = line_seconds  # between two lines of progress where there is no bar

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(clean(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = _clean_text(renderable)
        return super().render(renderable, options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        # In a notebook a spinner would leave empty output, and a warning if ipywidgets is not installed.
        if isinstance(status, str) and (self.is_jupyter or not self.is_terminal) and not self.quiet:
            return _StatusLines(status, self)
        # A spinner interprets markup in a string, whatever the options of the console.
        return super().status(Text(status) if isinstance(status, str) else status, **options)


class _StatusLines(Status):
    """A status where there is no terminal, or in a notebook: a line now and then instead of a spinner."""

    def __init__(self, what: str, console: CleanConsole):
        super().__init__(Text(what), console=console)
        self._what, self._shown_on = what, console
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._report, name="status", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _report(self) -> None:
        start = time.monotonic()
        while not self._done.wait(self._shown_on.line_seconds):
            text = f"{self._what}: {duration(time.monotonic() - start)} so far"
            self._shown_on.print(text, highlight=False, markup=False, soft_wrap=True)
            logger.info("%s", text, extra={"progress": True})


def _clean_text(text: Text) -> Text:
    """Return a cleaned copy of a text with the same styles."""
    cuts = sorted({0, len(text), *(at for span in text.spans for at in (span.start, span.end))})
    result = text.blank_copy()
    for part in text.divide(cuts[1:-1]):
        part.plain, styles = clean(part.plain), part.spans
        part.spans = [type(span)(0, len(part.plain), span.style) for span in styles]
        result.append_text(part)
    return result


def make_console(**options: Any) -> Console:
    """Return a console for people; options are those of `rich.console.Console`."""
    return CleanConsole(**options)


def say(text: str, lines: bool = False) -> None:
    """Print a line, or several of them, on standard output."""
    print(clean(text, lines))


def complain(text: str) -> None:
    """Print a line on standard error."""
    print(clean(text), file=sys.stderr, flush=True)


def ask(question: str) -> bool:
    """Ask a question on standard error and return whether the answer on standard input is yes."""
    sys.stderr.write(clean(question))
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        complain("")
    return answer.strip().lower() in ("y", "yes")


# Streams


@contextmanager
def steady_streams() -> Iterator[None]:
    """Keep failures of standard output and standard error from interrupting the work inside this context.

    Characters that the terminal's encoding lacks are printed as `?`. Once the reader is gone (`greedynas train … |
    head`, a closed terminal), further output is dropped. Raises OSError at the end if standard output is a file that
    could not be written.
    """
    before = sys.stdout, sys.stderr
    out, err = _Steady(sys.stdout), _Steady(sys.stderr)
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before
        if out.failure is not None:
            raise OSError(out.failure.errno, out.failure.strerror, "standard output") from None


class _Steady:
    """A text stream that does not raise. `failure` is the error to raise at the end, if there is one."""

    def __init__(self, stream: TextIO | None):
        # A process may have been started without the stream.
        self._stream = stream if stream is not None else open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        self.failure: OSError | None = None
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Drop this output and all further output."""
        if error.errno not in (errno.EPIPE, errno.EIO, errno.EBADF):  # a reader that is gone is no failure
            self.failure = self.failure or error
        with suppress(OSError, ValueError):  # a stream of a test has no file descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
