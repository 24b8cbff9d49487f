"""The only way to the terminal, for all of the package.

The consoles of `make_console`, `say` and `complain` print nothing that is not clean (see `cleaning`), and take no markup from
strings. `tests/test_terminal.py` holds that nothing is printed by other means. Output for programs (`--json`) is ASCII and
stays exact. Printing never ends the work: see `steady_streams`.
"""

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from greedynas.runtime.text import clean


class CleanConsole(Console):
    """A console that prints strings and texts as they are: in one line each, without escapes, markup and emoji codes.

    A text of several lines is a `rich.console.Group`.
    """

    def __init__(self, **options: Any):
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(clean(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = _clean_text(renderable)
        return super().render(renderable, options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        # A spinner reads markup in a string, whatever the console is set to.
        return super().status(Text(status) if isinstance(status, str) else status, **options)


def _clean_text(text: Text) -> Text:
    """Return a copy that is clean and has the same styles."""
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


def text_column(template: str) -> TextColumn:
    """Return a column of a progress display that takes no markup."""
    return TextColumn(template, markup=False)


def say(text: str, lines: bool = False) -> None:
    """Print a line, or several of them, on standard output."""
    print(clean(text, lines))


def complain(text: str) -> None:
    """Print a line on standard error."""
    print(clean(text), file=sys.stderr, flush=True)


# Streams


@contextmanager
def steady_streams() -> Iterator[None]:
    """Let nothing that happens to standard output or error interrupt the work.

    Characters that the terminal's encoding lacks are printed as `?`. Where nobody reads any more (`greedynas train … | head`,
    a terminal that was closed), output goes nowhere from then on. Raises OSError at the end if standard output is a file that
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
    """A text stream that does not raise. `failure` is what has ended it, if that is worth an error at the end."""

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
        """Send this and the rest nowhere."""
        if error.errno not in (errno.EPIPE, errno.EIO, errno.EBADF):  # nobody reads: that is no failure
            self.failure = self.failure or error
        with suppress(OSError, ValueError):  # a stream of a test has no number
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
