"""Share options and ways of printing among verbs."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from greedynas.cli import volume
from greedynas.cli.commands import GENERAL, option, switch
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.terminal import make_console, say

# Panels of the help
BUDGET = "Budget"
DATA = "Data"
NETWORK = "Network"
PRETRAINED = "Pretrained network"
OUTPUT = "Output"
SETTINGS = "Settings"

JsonOption = Annotated[bool, switch("--json", "Print the result as JSON on standard output.", GENERAL)]
SetOption = Annotated[list[str] | None, option("--set", "KEY=VALUE", "Change a setting. Can be repeated.", SETTINGS)]
CallbackOption = Annotated[
    list[str] | None,
    option("--callback", "NAME", "Let a registered callback watch the trainings. Can be repeated.", SETTINGS),
]
TrackOption = Annotated[
    list[str] | None,
    option("--track", "NAME", "Record the run with wandb, mlflow or tensorboard. Can be repeated.", SETTINGS),
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

# Pretrained networks
BaseOption = Annotated[
    str | None,
    option("--base", "NAME", "Search around this pretrained timm network, such as mobilenetv3_large_100.", PRETRAINED),
]
WeightsOption = Annotated[
    str | None,
    option(
        "--weights",
        "PLACE",
        "Weights of the base or teacher: a file, package (installed), cache (timm's own), or auto.",
        PRETRAINED,
    ),
]
ScratchOption = Annotated[
    bool, switch("--scratch", "Train networks from scratch, not around a pretrained one.", PRETRAINED)
]
TaughtByOption = Annotated[
    str | None,
    option(
        "--teacher",
        "NAME",
        "Train from scratch, taught by this pretrained timm network, which is fine-tuned first.",
        PRETRAINED,
    ),
]
DownloadOption = Annotated[
    bool, switch("--download", "Let timm download the weights of the base or teacher into its cache first.", PRETRAINED)
]

# Budgets
FlopsOption = Annotated[
    list[str] | None,
    option("--flops", "N", "Limit on multiply-adds, such as 330M. Repeat it to search a family of networks.", BUDGET),
]
OneFlopsOption = Annotated[list[str] | None, option("--flops", "N", "Limit on multiply-adds, such as 330M.", BUDGET)]
ParamsOption = Annotated[list[str] | None, option("--params", "N", "Limit on parameters, such as 5M.", BUDGET)]
LatencyOption = Annotated[list[str] | None, option("--latency", "TIME", "Limit on latency, such as 80ms.", BUDGET)]
RamOption = Annotated[
    list[str] | None,
    option("--ram", "BYTES", "Limit on the peak of int8 activations, such as 256K (K is 1024 bytes).", BUDGET),
]
FlashOption = Annotated[
    list[str] | None, option("--flash", "BYTES", "Limit on the int8 parameters, such as 1M.", BUDGET)
]
OneRamOption = Annotated[
    str | None, option("--ram", "BYTES", "Limit on the peak of int8 activations, such as 256K.", BUDGET)
]
OneFlashOption = Annotated[str | None, option("--flash", "BYTES", "Limit on the int8 parameters, such as 1M.", BUDGET)]
LatencyTableOption = Annotated[
    Path | None,
    option("--latency-table", "FILE", "Latency table that --latency needs, written by greedynas latency.", BUDGET),
]


def shown_console(as_json: bool = False) -> Console:
    """Return the console for readable output: stderr next to JSON, and wide enough for tables outside a terminal."""
    if not _prints():
        return make_console(quiet=True)
    shown = {**volume.console_options(), "stderr": as_json}
    console = make_console(**shown)
    return console if console.is_terminal else make_console(width=140, **shown)


def pretrained_changes(
    base: str | None, teacher: str | None, weights: str | None, scratch: bool, download: bool
) -> dict[str, object]:
    """Return the settings that the options about a pretrained network stand for, after the download that one asks for."""
    if base is not None and (scratch or teacher is not None):
        other = "--scratch" if scratch else "--teacher"
        raise GreedyNASError(f"{other} trains networks from scratch, and --base searches around one: leave out either")
    if scratch and teacher is None and (weights is not None or download):
        raise GreedyNASError(
            "--scratch uses no pretrained network: leave out --weights and --download, or add --teacher"
        )
    if download:
        from greedynas.jobs.auto_base import BASES
        from greedynas.models.bases.weights import download_weights

        if weights not in (None, "auto", "cache"):
            raise GreedyNASError(
                "--download puts weights into timm's cache: leave out --weights, or give --weights cache"
            )
        download_weights(base or teacher or BASES[0])
    changes: dict[str, object] = {} if base is None else {"space": f"timm:{base}"}
    changes |= {} if teacher is None else {"taught_by": teacher}
    changes |= {} if weights is None else {"weights": weights}
    return changes | ({"scratch": True} if scratch else {})


def tracked(callbacks: list[str] | None, trackers: list[str] | None) -> list[str] | None:
    """Return the names of all callbacks; refuse a tracker that does not exist or is not installed."""
    if not trackers:
        return callbacks
    from greedynas.rundir.trackers.tracker import check_tracker

    for name in trackers:
        check_tracker(name)
    return list(dict.fromkeys([*(callbacks or []), *trackers]))


def split_names(values: list[str] | None) -> list[str] | None:
    """Return the names of an option that may be repeated and whose values may be lists with commas, each name once."""
    if values is None:
        return None
    return list(dict.fromkeys(name.strip() for value in values for name in value.split(",") if name.strip()))


def say_next(console: Console, command: str) -> None:
    """Print the command to run next."""
    console.print(f"Next: {command}", highlight=False, markup=False)


def print_json(facts: dict[str, object]) -> None:
    """Print a result for programs, on standard output."""
    if _prints():
        say(json.dumps(_finite(facts), indent=2, allow_nan=False), lines=True)


def _finite(value: object) -> object:
    """Return the value with None in place of numbers that are not finite, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _prints() -> bool:
    """Return whether this process prints, which is only the first one of several ranks."""
    from greedynas.runtime.parallel import ranks

    return ranks.is_first()


def write_text(file: Path, text: str) -> None:
    """Write a file; raise GreedyNASError if that fails."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GreedyNASError(f"cannot write {file}: {error.strerror}") from None
