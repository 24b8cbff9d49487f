"""Run directories as objects that can be listed, compared and read. Nothing is written and no lock is taken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from greedynas.data.datasets import Data, open_data
from greedynas.monitoring.status import run_folders, size_of, stage_of
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
    """A run directory in its current state, whose files are read once.

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
        """The checked facts of the run, from which the report is made."""
        return read_facts(self.folder)

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self.facts.config

    @property
    def stage(self) -> str:
        """The last finished stage: "started", "trained", "searched", "retrained" or "exported"."""
        return stage_of(self.facts)

    @property
    def epochs(self) -> int:
        """The number of finished epochs of supernet training."""
        training = self.facts.training
        return training.epochs[-1].epoch if training is not None and training.epochs else 0

    @property
    def pool(self) -> list[OpPath]:
        """The paths of the candidate pool, best path first."""
        return [entry.path for entry in self.facts.pool]

    @property
    def searches(self) -> dict[str, Search]:
        """The searches by name, each with `.found`, `.front` and `.chosen`."""
        return {search.name: search for search in self.facts.searches}

    @property
    def models(self) -> dict[str, Model]:
        """The networks by name, each with `.arch`, and with `.test` and `.export` once it is trained and exported."""
        return {model.name: model for model in self.facts.models}

    @property
    def best(self) -> Model | None:
        """The chosen network, or None before a search."""
        return self.facts.chosen

    @property
    def top1(self) -> float | None:
        """The accuracy of the chosen network on the test set.

        It is None before the network is retrained, and where it is withheld, because too many test images are copies of
        training images (see `.caveats`).
        """
        best = self.best
        return None if best is None or best.test is None or best.test.withheld else best.test.top1

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences that belong beside the test accuracy, such as one on copies of training images in the test set."""
        best = self.best
        return () if best is None or best.test is None else best.test.caveats

    @property
    def bytes(self) -> int:
        """The size of the run on disk in bytes."""
        return size_of(self.folder)

    def data(self, device: str = "cpu", source: Any = None) -> Data:
        """Open the images of the run with the run's own split.

        Args:
            device: The device of the batches.
            source: The images as `open_data` takes them, if the run did not read them from disk or they were moved.

        Returns:
            The images: `.train`, `.val`, `.test()`, `.class_names`.

        Raises:
            GreedyNASError: If these are not the images that the run was started with.
        """
        if source is None:
            return read_data(self.config, choose_device(device), self.folder)
        return open_images(source, self.config, self.folder, device)

    def summary(self) -> dict[str, Any]:
        """Return the main facts of the run as plain data. A run that cannot be read has the stage "unreadable"."""
        try:
            return self._summary()
        except GreedyNASError as error:
            names = ("space", "sampler", "epochs", "searches", "model", "macs", "params", "top1")
            facts: dict[str, Any] = {
                "run": str(self.folder),
                "stage": "unreadable",
                **dict.fromkeys(names),
                "caveats": [],
            }
            return facts | {"problem": str(error)}

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
            "caveats": list(self.caveats),
        }

    def __repr__(self) -> str:
        facts = self.summary()
        accuracy = "" if facts["top1"] is None else f", {percent(facts['top1'])} top-1"
        return f"RunRecord({str(self.folder)!r}, {facts['stage']}{accuracy})"


class RunRecords(Sequence[RunRecord]):
    """A sequence of runs, shown as a table in notebooks and by `str`."""

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
    """Open given images, split and augmented by the settings of a run."""
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
        The run, with its settings, pool, searches and models.

    Raises:
        GreedyNASError: If the folder is not a run directory.

    Example:
        >>> import greedynas
        >>> greedynas.open_run("runs/photos").stage
        'exported'
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise GreedyNASError(f"{folder} is not a run directory (it has no config.yaml); make one with greedynas train")
    return RunRecord(folder)


def runs(folder: str | Path = "runs") -> RunRecords:
    """Return the runs below a folder, ordered by name.

    Args:
        folder: A folder with run directories, which may be in subfolders.

    Returns:
        A sequence of runs. `.compare()` gives their summaries, the most accurate first.

    Raises:
        GreedyNASError: If the folder does not exist.

    Example:
        >>> import greedynas
        >>> [row["model"] for row in greedynas.runs("runs/").compare()]
        ['macs-5M']
    """
    return RunRecords([RunRecord(run) for run in run_folders(Path(folder))])
