"""The progress of a long stage: a bar in terminals and notebooks, a line now and then in pipes and in log files.

The same lines go to `log.txt`, and `progress.json` beside the metrics of the stage holds the newest state for other
processes (`greedynas status`, `greedynas watch`). A thread writes both, so they stay current during a step that takes
minutes.
"""

import json
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any, Self

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from greedynas.runtime.terminal import LINE_SECONDS
from greedynas.runtime.text import clean, duration, logger

FILE = "progress.json"
FIRST_LINE = 10.0  # seconds until the first line, if lines are not more frequent
FILE_BYTES = 4096
FILE_SECONDS = 3.0  # between two versions of `progress.json`
NOTEBOOK_SECONDS = 0.5  # between two updates of the bar in a notebook
WINDOW = 240  # samples, at least a second apart, from which the time left is estimated
BARS = (8, 40)  # smallest and largest width of the bar
NARROW = 56  # columns below which the time left is written in fewer words
AT_MOST = "at most "
NAME = 6  # columns that are left of the stage's name in a narrow terminal


class Progress:
    """The display of how far a stage is. Enter it, and call `update` as often as you like.

    Args:
        console: Where progress is shown; None or a quiet one: nowhere.
        what: The name of the stage.
        total: The number of steps of the whole stage.
        done: The number of steps that an earlier session has done.
        unit: What a step is called, in the singular.
        folder: The folder of `progress.json`; None: it is not written.
        work: The cost of the whole stage, if steps do not cost the same, in the unit of `update`.
        may_end_early: Whether the stage may take fewer steps.
    """

    def __init__(
        self,
        console: Console | None,
        what: str,
        total: int,
        done: int = 0,
        *,
        unit: str = "step",
        folder: Path | None = None,
        work: float | None = None,
        may_end_early: bool = False,
    ):
        self.what, self.total, self.done, self.unit = what, total, done, unit
        self.details: tuple[str, ...] = ()
        self._facts: dict[str, Any] = {}
        self._console = None if console is None or console.quiet else console
        self._file = None if folder is None else folder / FILE
        self._work_total = float(total) if work is None else work
        self._early = may_end_early
        self._seconds: float = getattr(console, "line_seconds", LINE_SECONDS)
        self._samples: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._started = self._updated = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._notebook: Any = None
        self._shown = 0.0
        self._written = False

    def __enter__(self) -> Self:
        console = self._console
        if console is not None and console.is_jupyter:
            self._notebook = _notebook_display(self)
        elif console is not None and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, get_renderable=lambda: self, refresh_per_second=4)
            self._live.start()
        self._thread = threading.Thread(target=self._report, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.stop()
        if self._notebook is not None:
            self._notebook.update(self)
        if self._written and kind is None and self._file is not None:  # after a failure it says how far the stage was
            with suppress(OSError):
                os.remove(self._file)  # noqa: PTH107 (the tests interrupt files of results by `unlink`)

    def advance(self, done: int) -> None:
        """Set the number of finished steps. This is cheap."""
        self.done = done

    def update(self, done: int, details: Sequence[str] = (), work: float | None = None, **facts: Any) -> None:
        """Set the state of the stage.

        Args:
            done: The number of finished steps.
            details: Texts about the state, the most important first; a narrow terminal shows only the first ones.
            work: The cost of the finished steps; None: one for each.
            facts: Values for `progress.json`.
        """
        now = time.monotonic()
        self.done, self.details, self._facts, self._updated = done, tuple(details), facts, now
        if not self._samples or now - self._samples[-1][0] >= 1:
            self._samples.append((now, float(done) if work is None else work))
        if self._notebook is not None and now - self._shown > NOTEBOOK_SECONDS:
            self._shown = now
            self._notebook.update(self)

    def seconds_left(self) -> float | None:
        """Return an estimate of the time until the stage is finished, or None while too little is known."""
        if len(self._samples) < 2:
            return None
        (first, before), (last, work) = self._samples[0], self._samples[-1]
        if work <= before:
            return None
        left = (self._work_total - work) * (last - first) / (work - before)
        return max(left - (time.monotonic() - last), 0.0)

    def time_left(self) -> str:
        """Return the time left as text, such as `at most 12 min left`."""
        if self.done >= self.total:
            return f"took {duration(self._updated - self._started)}"
        seconds = self.seconds_left()
        if seconds is None:
            return "time left unknown"
        return f"{AT_MOST if self._early else ''}{duration(seconds)} left"

    def line(self) -> str:
        """Return the state as one line of text."""
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        count = f"{self.unit} {self.done:,} of {self.total:,}{share}"
        return f"{self.what}: {', '.join([count, *self.details, self.time_left()])}"

    def to_json(self) -> dict[str, Any]:
        """Return the state as it is written to `progress.json`."""
        return {
            "stage": self.what,
            "unit": self.unit,
            "done": self.done,
            "total": self.total,
            "seconds_left": self.seconds_left(),
            "details": list(self.details),
            **self._facts,
            "line": self.line(),
            "updated": time.time(),
            "process": os.getpid(),
            "host": platform.node(),
        }

    def _report(self) -> None:
        """Print and write lines until the stage ends. This runs in a thread."""
        start = time.monotonic()
        line, file = start + min(FIRST_LINE, self._seconds), start + FILE_SECONDS
        while not self._stop.wait(min(1.0, self._seconds / 2)):
            now = time.monotonic()
            if now >= line:
                line = now + self._seconds
                self._say()
            if now >= file:
                file = now + FILE_SECONDS
                self._write()

    def _say(self) -> None:
        text = self.line()
        if self._console is not None and self._live is None and self._notebook is None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        logger.info("%s", text, extra={"progress": True})

    def _write(self) -> None:
        if self._file is None:
            return
        # In one write of always the same length, so that readers see the old or the new state and a kill leaves no other file.
        data = json.dumps(self.to_json()).encode().ljust(FILE_BYTES)
        with suppress(OSError):  # a full disk must not end a training for this
            file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(file, data, 0)
                os.ftruncate(file, len(data))
            finally:
                os.close(file)
            self._written = True

    # Displays

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the bar: its count and the time left always, its details as far as they fit."""
        count, left = f"{self.done:,}/{self.total:,}", self.time_left()
        what, width = clean(self.what), options.max_width - 1
        if width < NARROW:
            left = left.removeprefix(AT_MOST)
        room = width - cell_len(count) - cell_len(left) - 4
        if cell_len(what) + 1 + BARS[0] > room:
            what = _shortened(what, max(NAME, room - BARS[0] - 1))
        free = room - cell_len(what) - BARS[0]
        after = [count, left]
        for detail in self.details:
            if cell_len(detail) + 2 > free:
                break
            free -= cell_len(detail) + 2
            after.append(clean(detail))
        bar = ProgressBar(total=max(self.total, 1), completed=self.done, width=max(3, min(BARS[0] + free, BARS[1])))
        row = Table.grid(padding=(0, 1))
        for _ in range(3):
            row.add_column(no_wrap=True)
        row.add_row(Text(what), bar, Text("  ".join(after)))
        yield row

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return the bar for notebooks."""
        text = clean(self.line())
        bar = f'<progress value="{self.done}" max="{max(self.total, 1)}" style="width: 16em"></progress>'
        return {"text/plain": text, "text/html": f"<div>{bar} {escape(text)}</div>"}


def _notebook_display(shown: Progress) -> Any:
    """Display an object in the notebook and return the handle that updates it."""
    from IPython.display import display  # a notebook has it

    return display(shown, display_id=True)


def _shortened(text: str, width: int) -> str:
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"


def progress_files(folder: Path) -> Iterator[Path]:
    """Yield the progress files of all stages in a run directory."""
    for pattern in (FILE, f"searches/*/{FILE}", f"models/*/{FILE}", f"models/*/top/*/{FILE}"):
        yield from folder.glob(pattern)
