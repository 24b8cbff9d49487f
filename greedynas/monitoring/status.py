"""The state of a run from outside: what is finished, what is running, how far it is. Nothing is written or locked."""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from rich.console import Console

from greedynas.reporting.cells import Table, make_table, rich_table
from greedynas.reporting.facts import Facts, read_facts
from greedynas.rundir.locks import is_locked
from greedynas.rundir.progress import progress_files
from greedynas.rundir.schemas import Amount, Positive, Record
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_bytes
from greedynas.runtime.text import clean, count, duration, percent, size
from greedynas.spaces.budget import limits

LAST_LINES = 3  # of the log
LOG_BYTES = 8192  # of its end that are read
BESIDE = (".lock", "log.txt", "metrics.jsonl")  # a run has at least one of them besides its config.yaml
MOST = 1_000_000  # bytes of a progress file
Words = Annotated[str, Field(max_length=1000)]


class Progressing(Record):
    """`progress.json`: how far a stage is."""

    stage: Words
    unit: Words
    done: Amount
    total: Amount
    seconds_left: Positive | None = None
    line: Words
    updated: Positive
    details: tuple[Words, ...] = Field(default=(), max_length=50)

    @property
    def share(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 0.0


@dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    Attributes:
        run: The run directory.
        stage: The last finished stage: "started", "trained", "searched", "retrained", "exported", or "unreadable".
        running: Whether a process works on it.
        progress: How far the running or interrupted stage is; None between stages.
    """

    run: str
    stage: str
    running: bool = False
    progress: Progressing | None = None
    space: str | None = None
    sampler: str | None = None
    epochs: int = 0
    max_epochs: int | None = None
    pool: int = 0
    pi: float | None = None
    val_accuracy: float | None = None  # of the pool's best path after the last epoch
    searches: dict[str, str] = field(default_factory=dict)  # the budget of each
    models: dict[str, float | None] = field(default_factory=dict)  # the test accuracy of each
    model: str | None = None
    macs: int | None = None
    params: int | None = None
    supernet_accuracy: float | None = None
    top1: float | None = None
    withheld: bool = False
    bytes: int = 0
    log: tuple[str, ...] = ()
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        facts = asdict(self)
        facts["progress"] = None if self.progress is None else self.progress.model_dump(mode="json")
        return facts

    @property
    def budget(self) -> str:
        """The limits of the searches in words."""
        return "; ".join(dict.fromkeys(self.searches.values()))

    @property
    def best(self) -> str:
        """The best accuracy that is known, and what it was measured on."""
        if self.withheld:
            return "withheld"
        if self.top1 is not None:
            return f"{percent(self.top1)} test"
        if self.supernet_accuracy is not None:
            return f"{percent(self.supernet_accuracy)} supernet"
        return "" if self.val_accuracy is None else f"{percent(self.val_accuracy)} supernet"

    @property
    def now(self) -> str:
        """What is going on, in a few words."""
        if self.progress is None:
            return "running" if self.running else ""
        what = f"{self.progress.stage} {self.progress.share:.0%}"
        if not self.running:
            return f"stopped at {what}"
        left = self.progress.seconds_left
        return what if left is None else f"{what}, {duration(left)} left"


def stage_of(facts: Facts) -> str:
    """Return the last finished stage of a run."""
    chosen, training = facts.chosen, facts.training
    if chosen is not None and chosen.export is not None:
        return "exported"
    if chosen is not None and chosen.test is not None:
        return "retrained"
    if chosen is not None:
        return "searched"
    finished = training is not None and bool(training.epochs) and training.epochs[-1].stopped is not None
    return "trained" if finished else "started"


def status_of(folder: Path) -> RunStatus:
    """Return the state of a run.

    Raises:
        GreedyNASError: If the folder is not a run directory, or a file of it is malformed.
    """
    return status_from(read_facts(folder))


def status_from(facts: Facts) -> RunStatus:
    """Return the state of a run whose facts were read."""
    folder, chosen, training = facts.folder, facts.chosen, facts.training
    last = training.epochs[-1] if training is not None and training.epochs else None
    test = None if chosen is None else chosen.test
    accuracies = [epoch.val_accuracy for epoch in training.epochs] if training is not None else []
    return RunStatus(
        run=str(folder),
        stage=stage_of(facts),
        running=is_locked(folder),
        progress=newest_progress(folder),
        space=facts.space.name,
        sampler=facts.config.train.sampler,
        epochs=0 if last is None else last.epoch,
        max_epochs=facts.config.train.max_epochs,
        pool=len(facts.pool),
        pi=None if last is None else last.pi,
        val_accuracy=next((one for one in reversed(accuracies) if one is not None), None),
        searches={search.name: limits(search.budget) or "no limit" for search in facts.searches},
        models={
            model.name: None if model.test is None or model.test.withheld else model.test.top1 for model in facts.models
        },
        model=None if chosen is None else chosen.name,
        macs=None if chosen is None else chosen.arch.macs,
        params=None if chosen is None else chosen.arch.params,
        supernet_accuracy=None if chosen is None else chosen.arch.supernet_accuracy,
        top1=None if test is None or test.withheld else test.top1,
        withheld=test is not None and test.withheld,
        bytes=size_of(folder),
        log=last_lines(folder / "log.txt"),
    )


def newest_progress(folder: Path) -> Progressing | None:
    """Return how far the current or interrupted stage is; a file that another program has written is ignored."""
    found = []
    for file in progress_files(folder):
        try:
            found.append(Progressing.model_validate_json(read_bytes(file, MOST)))
        except (ValidationError, GreedyNASError):
            continue
    return max(found, key=lambda one: one.updated, default=None)


def last_lines(file: Path) -> tuple[str, ...]:
    """Return the last lines of a log, cleaned."""
    try:
        with file.open("rb") as handle:
            handle.seek(max(0, file.stat().st_size - LOG_BYTES))
            text = handle.read(LOG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(clean(line)[:300] for line in text.splitlines() if line.strip())[-LAST_LINES:]


def size_of(folder: Path) -> int:
    """Return the size of a folder on disk in bytes; links are not followed."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() and not file.is_symlink() else 0
        except OSError:  # removed in the meantime
            continue
    return total


def run_folders(folder: Path) -> list[Path]:
    """Return the run directories at and below a folder, ordered by name; the parts of studies are left out."""
    if not folder.is_dir():
        raise GreedyNASError(f"there is no folder {folder}; name one with run directories, such as runs/")
    found = sorted(file.parent for file in folder.rglob("config.yaml") if "parts" not in file.relative_to(folder).parts)
    # Other programs have a config.yaml too, and trackers keep copies of that of a run.
    return [run for run in found if any(os.path.lexists(run / name) for name in BESIDE)]


def statuses(folder: Path) -> list[RunStatus]:
    """Return the state of every run at and below a folder; a run that cannot be read has the stage "unreadable"."""
    found = []
    for run in run_folders(folder):
        try:
            found.append(status_of(run))
        except GreedyNASError as error:
            found.append(RunStatus(str(run), "unreadable", bytes=size_of(run), problem=str(error)))
    return found


def runs_table(found: list[RunStatus]) -> Table:
    """Return the table of `greedynas runs`."""
    columns = {
        "run": [one.run for one in found],
        "stage": [one.stage for one in found],
        "now": [one.now for one in found],
        "epochs": ["" if one.max_epochs is None else f"{one.epochs}/{one.max_epochs}" for one in found],
        "budget": [one.budget for one in found],
        "best": [one.best for one in found],
        "multiply-adds": ["" if one.macs is None else count(one.macs) for one in found],
        "size": [size(one.bytes) for one in found],
    }
    return make_table(columns, {"stage", "now", "budget"})


def show_runs(found: list[RunStatus], folder: Path, console: Console) -> None:
    """Print a table of runs, and a line about each that cannot be read."""
    if not found:
        console.print(f"there are no runs in {folder}", highlight=False, markup=False)
        return
    console.print(rich_table(runs_table(found)))
    for one in found:
        if one.problem is not None:
            console.print(f"unreadable: {one.problem}", highlight=False, markup=False, soft_wrap=True)


def show_status(one: RunStatus, console: Console) -> None:
    """Print the state of a run."""
    lines = [f"{one.run}: {one.stage}, {'running' if one.running else 'not running'}, {size(one.bytes)}"]
    if one.progress is not None:
        age = max(time.time() - one.progress.updated, 0.0)
        when = f"{duration(age)} ago" if one.running else f"it was interrupted {duration(age)} ago"
        lines.append(f"{one.progress.line} ({when})")
    state = [f"{one.epochs} of at most {one.max_epochs} epochs"]
    state += [f"{one.pool} paths in the pool"] if one.pool else []
    state += [f"π = {one.pi:.3f}"] if one.pi is not None else []
    state += [f"accuracy {percent(one.val_accuracy)}"] if one.val_accuracy is not None else []
    lines.append(f"supernet   {one.space}, {one.sampler}: {', '.join(state)}")
    lines += [f"search     {name}: {budget}" for name, budget in one.searches.items()]
    lines += [
        f"network    {name}: {'not tested' if top1 is None else f'{percent(top1)} top-1 on test images'}"
        f"{' (chosen)' if name == one.model else ''}"
        for name, top1 in one.models.items()
    ]
    lines += [f"log        {line}" for line in one.log]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def to_json(found: list[RunStatus]) -> list[dict[str, Any]]:
    """Return the states of runs as plain data."""
    return [json.loads(json.dumps(one.to_json())) for one in found]
