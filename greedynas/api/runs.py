"""Run directories as objects that can be listed, compared and read. Nothing is written, and no lock is taken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from greedynas.data.datasets import Data, open_data
from greedynas.reporting.facts import Facts, Model, read_facts
from greedynas.rundir.schemas import Search
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.text import count, percent
from greedynas.settings.schema import Config
from greedynas.spaces.paths import OpPath
from greedynas.stages.run import read_data

STAGES = ("started", "trained", "searched", "retrained", "exported")


@dataclass(frozen=True, repr=False)
class RunRecord:
    """A run directory as it is now. Each property reads the files once.

    Attributes:
        folder: The run directory.

    Example:
        >>> import greedynas
        >>> run = greedynas.open_run("runs/photos")
        >>> run.stage, run.best.name, len(run.pool) > 0
        ('exported', 'macs-5M', True)
    """

    folder: Path

    @cached_property
    def facts(self) -> Facts:
        """Everything that the report is made of, checked."""
        return read_facts(self.folder)

    @property
    def config(self) -> Config:
        """The settings."""
        return self.facts.config

    @property
    def stage(self) -> str:
        """How far the run has come: "started", "trained", "searched", "retrained" or "exported"."""
        chosen, training = self.facts.chosen, self.facts.training
        if chosen is not None and chosen.export is not None:
            return "exported"
        if chosen is not None and chosen.test is not None:
            return "retrained"
        if chosen is not None:
            return "searched"
        finished = training is not None and bool(training.epochs) and training.epochs[-1].stopped is not None
        return "trained" if finished else "started"

    @property
    def epochs(self) -> int:
        """The epochs of supernet training that are over."""
        training = self.facts.training
        return training.epochs[-1].epoch if training is not None and training.epochs else 0

    @property
    def pool(self) -> list[OpPath]:
        """The candidate pool, best path first."""
        return [entry.path for entry in self.facts.pool]

    @property
    def searches(self) -> dict[str, Search]:
        """The searches by name: `.found`, `.front`, `.chosen` of each."""
        return {search.name: search for search in self.facts.searches}

    @property
    def models(self) -> dict[str, Model]:
        """The networks by name: `.arch`, and `.test` and `.export` where they are trained and exported."""
        return {model.name: model for model in self.facts.models}

    @property
    def best(self) -> Model | None:
        """The chosen network; None before a search."""
        return self.facts.chosen

    @property
    def top1(self) -> float | None:
        """The accuracy of the chosen network on the test set; None before it is retrained."""
        best = self.best
        return None if best is None or best.test is None else best.test.top1

    @property
    def bytes(self) -> int:
        """What the run takes on disk."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file() and not file.is_symlink())

    def data(self, device: str = "cpu", source: Any = None) -> Data:
        """Open the images of the run, with its own split.

        Args:
            device: Where batches go.
            source: The images, where the run did not read them from disk or they were moved: what `open_data` takes.

        Returns:
            The images: `.train`, `.val`, `.test()`, `.class_names`.

        Raises:
            GreedyNASError: If these are not the images that the run began with.
        """
        if source is None:
            return read_data(self.config, choose_device(device), self.folder)
        return open_images(source, self.config, self.folder, device)

    def summary(self) -> dict[str, Any]:
        """Return what tells the run from others, as plain data. A run that cannot be read has the stage "unreadable"."""
        try:
            return self._summary()
        except GreedyNASError as error:
            names = ("space", "sampler", "epochs", "searches", "model", "macs", "params", "top1")
            return {"run": str(self.folder), "stage": "unreadable", **dict.fromkeys(names), "problem": str(error)}

    def _summary(self) -> dict[str, Any]:
        best = self.best
        return {
            "run": str(self.folder),
            "stage": self.stage,
            "space": self.facts.space.name,
            "sampler": self.config.train.sampler,
            "epochs": self.epochs,
            "searches": sorted(self.searches),
            "model": None if best is None else best.name,
            "macs": None if best is None else best.arch.macs,
            "params": None if best is None else best.arch.params,
            "top1": self.top1,
        }

    def __repr__(self) -> str:
        facts = self.summary()
        accuracy = "" if facts["top1"] is None else f", {percent(facts['top1'])} top-1"
        return f"RunRecord({str(self.folder)!r}, {facts['stage']}{accuracy})"


class RunRecords(Sequence[RunRecord]):
    """Several runs. Shown as a table in notebooks and by `str`."""

    def __init__(self, runs: Sequence[RunRecord]):
        self._runs = list(runs)

    def __getitem__(self, index: Any) -> Any:
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(self._runs)

    def compare(self) -> list[dict[str, Any]]:
        """Return a summary of each run, the most accurate first, those without an accuracy last."""
        return sorted(
            (run.summary() for run in self), key=lambda row: -1.0 if row["top1"] is None else -row["top1"] - 1
        )

    def _rows(self) -> list[list[str]]:
        rows = []
        for facts in (run.summary() for run in self):
            macs = "" if facts["macs"] is None else count(facts["macs"])
            top1 = "" if facts["top1"] is None else percent(facts["top1"])
            rows.append(
                [
                    facts["run"],
                    facts["stage"],
                    *(facts[name] or "" for name in ("space", "sampler", "model")),
                    macs,
                    top1,
                ]
            )
        return rows

    def __repr__(self) -> str:
        table = [["run", "stage", "space", "sampler", "model", "macs", "top-1"], *self._rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("run", "stage", "space", "sampler", "model", "macs", "top-1"))
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self._rows())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def open_images(source: Any, config: Config, folder: Path, device: str) -> Data:
    """Open images that are handed over, split and augmented as the settings of a run say."""
    return open_data(
        source,
        space=config.space,
        settings=config.data,
        seed=config.seed,
        device=choose_device(device),
        folder=folder,
    )


def open_run(folder: str | Path) -> RunRecord:
    """Return a run directory as an object.

    Args:
        folder: The run directory.

    Returns:
        The run: its settings, pool, searches and models.

    Raises:
        GreedyNASError: If there is no run.

    Example:
        >>> import greedynas
        >>> greedynas.open_run("runs/photos").stage
        'exported'
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise GreedyNASError(f"{folder} is not a run directory (it has no config.yaml); greedynas train makes one")
    return RunRecord(folder)


def runs(folder: str | Path = "runs") -> RunRecords:
    """Return the runs below a folder, in the order of their names.

    Args:
        folder: A folder of run directories; those in folders below it are found as well.

    Returns:
        A sequence of runs. `.compare()` gives their summaries, the most accurate first.

    Raises:
        GreedyNASError: If there is no such folder.

    Example:
        >>> import greedynas
        >>> [row["model"] for row in greedynas.runs("runs/").compare()]
        ['macs-5M']
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise GreedyNASError(f"there is no folder {folder}")
    found = sorted(file.parent for file in folder.rglob("config.yaml") if "parts" not in file.relative_to(folder).parts)
    return RunRecords([RunRecord(run) for run in found])
