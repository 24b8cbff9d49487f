"""What a terminal shows of an export: the table of files, and what a user should know about them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from greedynas.runtime.text import milliseconds
from greedynas.stages.export_files import format_of_entry

LOSS = 0.01  # of accuracy, above which a file gets a line


def report_export(result: dict[str, Any], folder: Path, console: Console) -> None:
    """Print a table of the exported files, and list the files that were left out or not run."""
    table = Table(title=Text(f"Exported {result['model']}"), title_justify="left")
    for column in ("file", "precision", "size", "top-1", "latency", "median ± spread"):
        table.add_column(column, justify="left" if column in ("file", "precision") else "right")
    for entry in result["files"]:
        latency = "" if entry.get("latency_ms") is None else milliseconds(entry["latency_ms"])
        usual = "" if entry.get("latency_median_ms") is None else _usual(entry)
        size = f"{entry['bytes'] / 1e6:,.2f} MB"
        table.add_row(entry["file"], entry["precision"], size, _shown_top1(entry, result), latency, usual)
    table.caption = (
        f"top-1 on {result['images']:,} test images; latency of one image on one thread of "
        f"{result['machine']}{_timed_in(result)}, undisturbed; median and interquartile range of the rounds"
    )
    console.print(table)
    for caveat in result.get("caveats", ()):
        console.print(f"Warning: {caveat}", highlight=False, markup=False)
    for line in () if result.get("withheld") else losses(result["files"]):
        console.print(line, highlight=False, markup=False)
    for entry in result["skipped"]:
        console.print(f"left out: {entry['file']} ({entry['why']})", highlight=False, markup=False)
    for entry in result["files"]:
        if entry.get("top1") is None:
            console.print(f"converted, not run on this machine: {entry['file']}", highlight=False, markup=False)
        if entry.get("agrees"):
            images, worst = entry["agrees"]["images"], entry["agrees"]["max_difference"]
            text = f"{entry['file']} and PyTorch agree within {worst:.1g} in probabilities on {images} images"
            console.print(text, highlight=False, markup=False)
    console.print(f"written to {folder / 'models' / result['model']}", highlight=False, markup=False)


def _shown_top1(entry: dict[str, Any], result: dict[str, Any]) -> str:
    if entry.get("top1") is None:
        return "not run"
    return "withheld" if result.get("withheld") else f"{entry['top1']:.2%}"


def _usual(entry: dict[str, Any]) -> str:
    unit, scale = ("µs", 1000) if 0 < entry["latency_median_ms"] < 0.1 else ("ms", 1)
    return f"{scale * entry['latency_median_ms']:.3g} ± {scale * entry['latency_iqr_ms']:.2g} {unit}"


def _timed_in(result: dict[str, Any]) -> str:
    """Return the names of the runtimes that were timed, as the caption's ` in …`."""
    timed = [format_of_entry(entry) for entry in result["files"] if entry.get("latency_ms") is not None]
    names = dict.fromkeys(format.runtime_name or format.name for format in timed if format is not None)
    return f" in {' or '.join(names)}" if names else ""


def losses(files: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each file that is more than a point less accurate than the reference of its format."""
    for entry in files:
        same = [one for one in files if _format(one) == _format(entry) and one.get("top1") is not None]
        if entry not in same:
            continue
        reference = same[0]
        loss = reference["top1"] - entry["top1"]
        if loss > LOSS:
            instead = _next_best(files, reference, entry)
            yield (
                f"{entry['file']} loses {100 * loss:.1f} points of accuracy against {reference['file']}; "
                f"the next best is {instead}"
            )


def _next_best(files: Sequence[Mapping[str, Any]], reference: Mapping[str, Any], lossy: Mapping[str, Any]) -> str:
    """Return the smallest accurate file of the same format, or of any format if that is only the reference."""
    fine = [one for one in files if one.get("top1") is not None and one["top1"] >= reference["top1"] - LOSS]
    same = [one for one in fine if _format(one) == _format(lossy) and one is not reference]
    best = min(same or fine, key=lambda one: one["bytes"])
    return f"{best['file']} ({best['bytes'] / 1e6:,.2f} MB, {best['top1']:.2%})"


def _format(entry: Mapping[str, Any]) -> str | None:
    format = format_of_entry(dict(entry))  # records of older versions have no names
    return entry.get("format") if format is None else format.name
