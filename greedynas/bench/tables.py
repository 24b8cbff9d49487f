"""The tables in which the record of `greedynas bench` is printed."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from greedynas.bench.floor import TRAINING
from greedynas.bench.variants import VARIANTS
from greedynas.runtime.text import duration

MEASURES = {"train": "training step", "forward": "forward evaluation", "filter": "filtering", "rank": "ranking"}


def show_bench(record: dict[str, Any], console: Console) -> None:
    machine = record["machine"]
    packages = ", ".join(
        f"{name} {version}" for name, version in machine["versions"].items() if name in ("torch", "triton")
    )
    console.print(
        f"{machine['name']} ({machine['cores']} CPU cores), {packages}; a copy moves "
        f"{machine['copy_bytes_per_second'] / 1e9:,.0f} GB/s; took {duration(record['seconds'])}",
        highlight=False,
    )
    for name, space in record["spaces"].items():
        console.print(space_table(name, space))
        for line in remarks(space["rows"]):
            console.print(f"  {line}", highlight=False, markup=False)
        for row in space["data"]:
            rate = f"{row['images_per_second']:,.0f} images/s" if row["error"] is None else row["error"]
            console.print(f"  images {row['label']}: {rate}", highlight=False, markup=False)
    console.print(
        "Medians without the first runs. Ratios: images/s over those of the other row, on the paths that both ran. "
        f"Floor: activations moved once at the speed of a copy, {TRAINING} times in training. New path: p95 of a path's "
        "first run minus its second.",
        style="dim",
        highlight=False,
    )


def space_table(name: str, space: dict[str, Any]) -> Table:
    title = f"{name}, {space['image_size']} px, batch {space['batch']}"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("")
    for column in ("ms", "images/s", "× fp32", "× bf16 NHWC", "× floor", "memory", "new path", "start-up", "paths"):
        table.add_column(column, justify="right")
    labels = {variant.name: variant.label for variant in VARIANTS}
    for measure, title in MEASURES.items():
        rows = [row for row in space["rows"] if row["measure"] == measure]
        if not rows:
            continue
        table.add_section()
        table.add_row(Text.assemble((title, "bold"), f" {_what(measure, space)}".rstrip()))
        for row in rows:
            style = "bold" if row["variant"] == "greedynas" else None
            table.add_row(f"  {labels[row['variant']]}", *_cells(row), style=style)
    return table


def _what(measure: str, space: dict[str, Any]) -> str:
    if measure == "filter":
        return f"({space['filter_images']:,} images)"
    return f"({space['rank_images']:,} images)" if measure == "rank" else ""


def _cells(row: dict[str, Any]) -> list[str]:
    if row.get("ms") is None:
        return ["left out" if row["skipped"] else "failed"]
    return [
        f"{row['ms']:,.1f}{'*' if row['note'] else ''}{_spread(row.get('rounds_ms'))}",
        f"{row['images_per_second']:,.0f}",
        _times(row["ratio_to_fp32"]),
        _times(row["ratio_to_bf16_nhwc"]),
        f"{row['times_floor']:.1f}",
        "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f} GiB",
        "" if row["new_path_p95_ms"] is None else f"{row['new_path_p95_ms']:+,.0f} ms",
        "" if row["startup_s"] is None else f"{row['startup_s']:.1f} s",
        f"{row['paths']:,}",
    ]


def _spread(rounds: list[float] | None) -> str:
    return "" if not rounds else f" ({min(rounds):,.1f} to {max(rounds):,.1f})"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Return the reasons why rows are missing or not measured in full, each reason once."""
    labels = {variant.name: variant.label for variant in VARIANTS}
    found: dict[str, list[str]] = {}
    for row in rows:
        text = row.get("skipped") or row.get("error") or (f"* {row['note']}" if row.get("note") else None)
        if text is not None:
            where = labels[row["variant"]]
            where = f"{where} ({MEASURES[row['measure']]})" if row.get("error") else where
            found.setdefault(text, []).append(where)
    return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in found.items()]
