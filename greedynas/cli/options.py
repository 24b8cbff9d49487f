"""Share what several verbs use: options that mean the same everywhere, and ways of printing."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from greedynas.cli.commands import GENERAL, option, switch
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.terminal import make_console, say

# Panels of the help
BUDGET = "Budget"
DATA = "Data"
NETWORK = "Network"
OUTPUT = "Output"
SETTINGS = "Settings"

JsonOption = Annotated[bool, switch("--json", "Print the result as JSON on standard output.", GENERAL)]
SetOption = Annotated[list[str] | None, option("--set", "KEY=VALUE", "Change a setting. Can be repeated.", SETTINGS)]
CallbackOption = Annotated[
    list[str] | None,
    option("--callback", "NAME", "Let a registered callback watch the trainings. Can be repeated.", SETTINGS),
]
SeedOption = Annotated[int | None, option("--seed", "N", "Seed of all random numbers.", SETTINGS, min=0)]
RunArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")]
PresetArgument = Annotated[
    str,
    typer.Argument(
        metavar="PRESET", help="A preset (auto, fashion, cifar10, imagenet, imagenet-se) or a YAML file of settings."
    ),
]
OutOption = Annotated[
    Path | None, option("--out", "DIR", "Write to this run directory. Run the same command again to resume.", OUTPUT)
]
ModelOption = Annotated[
    str | None, option("--model", "NAME", "Use this network in DIR/models instead of the one chosen last.", NETWORK)
]

# Images
DataOption = Annotated[
    str | None,
    option(
        "--data",
        "SOURCE",
        "A folder with train/ and val/ or test/, a folder of class folders, a timm dataset name, or fashion.",
        DATA,
    ),
]
NamedDataOption = Annotated[
    str | None, option("--data", "SOURCE", "Images of the run, if they were moved or are downloaded by name.", DATA)
]
DataRootOption = Annotated[
    str | None,
    option("--data-root", "DIR", "Folder of a dataset that is downloaded by name, if the run sets data.root.", DATA),
]

# Budgets
FlopsOption = Annotated[
    list[str] | None,
    option("--flops", "N", "Limit on multiply-adds, such as 330M. Repeat it to search a family of networks.", BUDGET),
]
OneFlopsOption = Annotated[list[str] | None, option("--flops", "N", "Limit on multiply-adds, such as 330M.", BUDGET)]
ParamsOption = Annotated[list[str] | None, option("--params", "N", "Limit on parameters, such as 5M.", BUDGET)]
LatencyOption = Annotated[list[str] | None, option("--latency", "TIME", "Limit on latency, such as 80ms.", BUDGET)]
LatencyTableOption = Annotated[
    Path | None,
    option("--latency-table", "FILE", "Latency table that --latency needs, written by greedynas latency.", BUDGET),
]


def shown_console(as_json: bool = False) -> Console:
    """Return the console for people: stderr beside JSON, and wide enough for tables where it is not a terminal."""
    if not _speaks():
        return make_console(quiet=True)
    console = make_console(stderr=as_json)
    return console if console.is_terminal else make_console(width=140, stderr=as_json)


def say_next(console: Console, command: str) -> None:
    """Print the command that comes next."""
    console.print(f"Next: {command}", highlight=False, markup=False)


def print_json(facts: dict[str, object]) -> None:
    """Print a result for programs, on standard output."""
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
    """Return whether this process prints: of several ranks, only the first one does."""
    from greedynas.runtime.parallel import ranks

    return ranks.is_first()


def write_text(file: Path, text: str) -> None:
    """Write a file; raise GreedyNASError if that fails."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GreedyNASError(f"cannot write {file}: {error.strerror}") from None
