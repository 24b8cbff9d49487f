"""What the verbs of the command line share: the application, options that mean the same everywhere, ways of printing."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.terminal import make_console, say

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="key=value, as often as you like.")]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Of every random stream.")]
RunArgument = Annotated[Path, typer.Argument(help="A run directory.")]
PresetArgument = Annotated[
    str, typer.Argument(help="A preset (auto, fashion, cifar10, imagenet, imagenet-se) or a YAML file.")
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", help="A folder with train/ and val/ or test/, a folder of class folders, a timm name, or fashion."
    ),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="The run directory; the same command again resumes.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="A network in DIR/models; the one last chosen if not given.")
]

# Images of a run that exists
NamedDataOption = Annotated[
    str | None, typer.Option("--data", help="Its images, if they are elsewhere now or fetched by name.")
]
DataRootOption = Annotated[
    str | None, typer.Option("--data-root", help="Where a data set by name is kept, if the run has data.root.")
]

# Budgets
FlopsOption = Annotated[
    list[str] | None, typer.Option("--flops", help="At most so many multiply-adds: 330M. Several give a family.")
]
ParamsOption = Annotated[list[str] | None, typer.Option("--params", help="At most so many parameters: 5M.")]
LatencyOption = Annotated[list[str] | None, typer.Option("--latency", help="At most so long: 80ms. Needs a table.")]
LatencyTableOption = Annotated[Path | None, typer.Option("--latency-table", help="From greedynas latency.")]


def shown_console(as_json: bool = False) -> Console:
    """Where people read: stderr beside JSON, and wide enough for the tables where the output is not a terminal."""
    if not _speaks():
        return make_console(quiet=True)
    console = make_console(stderr=as_json)
    return console if console.is_terminal else make_console(width=140, stderr=as_json)


def say_next(console: Console, command: str) -> None:
    console.print(f"Next: {command}", highlight=False, markup=False)


def print_json(facts: dict[str, object]) -> None:
    if _speaks():
        say(json.dumps(_finite(facts), indent=2, allow_nan=False), lines=True)


def _finite(value: object) -> object:
    """Return the value with null for numbers that are not finite: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _speaks() -> bool:
    """Of several ranks the first one does."""
    from greedynas.runtime.parallel import ranks

    return ranks.is_first()


def write_text(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GreedyNASError(f"cannot write {file}: {error.strerror}") from None
