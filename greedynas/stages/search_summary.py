"""The summary of searches for the terminal: the chosen networks, how they were chosen, and the fronts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from greedynas.rundir.schemas import Choice, Chosen
from greedynas.runtime.text import cost, count, epochs, milliseconds, percent, points


def describe_choice(chosen: Chosen, objectives: Sequence[str]) -> str | None:
    """Describe how a network was chosen among equals, or return None if it was the only best one or this is unknown."""
    choice = chosen.choice
    if choice is None:
        return None
    what = "accuracy" if choice.best.score is None else "score"
    highest = percent(choice.best.worth)
    if chosen.path == choice.best.path:
        if choice.tied == 1:
            return None
        return f"{choice.tied:,} paths tie at the highest {what}, {highest}; the cheapest of them was chosen."
    errors = "one standard error" if choice.tolerance == 1 else f"{choice.tolerance:g} standard errors"
    tied = f", which {choice.tied:,} paths have" if choice.tied > 1 else ""
    return (
        f"{choice.within:,} paths on the front lie within {errors} ({points(choice.margin)} on {choice.images:,.0f} "
        f"validation images) of the highest {what}, {highest}{tied}. The cheapest of them was chosen"
        f"{_saved(chosen, choice, objectives)}; --set search.tolerance=0 takes the highest {what}."
    )


def _saved(chosen: Chosen, choice: Choice, objectives: Sequence[str]) -> str:
    """Return `, with 11.1M multiply-adds instead of 31.5M` for the first objective in which the choice is cheaper."""
    for name in objectives:
        own, other = getattr(chosen, name), choice.best.cost(name)
        if own is not None and other is not None and own < other:
            return (
                f", with {cost(name, own)} instead of {milliseconds(other) if name == 'latency_ms' else count(other)}"
            )
    return ""


def report_searches(results: list[dict[str, Any]], folder: Path, with_front: bool, console: Console) -> None:
    table = Table(title="Chosen networks", title_justify="left")
    names = [name for name in ("macs", "params", "latency_ms") if name in results[0]["chosen"]]
    scored = ["score"] if "score" in results[0]["chosen"] else []
    accuracy = f"{results[0].get('metric', 'accuracy')} on the supernet"
    titles = ["latency" if name == "latency_ms" else name for name in names]
    for column in ("search", *scored, accuracy, *titles, "evaluated", "rejected", "network"):
        table.add_column(column, justify="left" if column in ("search", "network") else "right")
    for result in results:
        chosen = result["chosen"]
        counts = (f"{len(result['found']):,}", f"{result['rejected']:,}")
        costs = [_format_cost(name, chosen[name]) for name in names]
        shares = [f"{chosen[key]:.4f}" for key in (*scored, "supernet_accuracy")]
        table.add_row(Text(result["name"]), *shares, *costs, *counts, " ".join(chosen["ops"]))
    console.print(table)
    for result in results:
        if "unfinished_epochs" in result:
            trained = f"step {result['supernet_step']:,}, {epochs(result['unfinished_epochs'])}"
            text = f"{result['name']} is preliminary: its supernet is not fully trained ({trained})."
            console.print(text, highlight=False, markup=False)
    for result in results:
        if sentence := describe_result_choice(result):
            name = f"{result['name']}: " if len(results) > 1 else ""
            console.print(f"{name}{sentence}", highlight=False, markup=False)
    for result in results if with_front else ():
        front = Table(title=Text(f"Pareto front of {result['name']}"), title_justify="left")
        for column in (*scored, accuracy, *titles, "path"):
            front.add_column(column, justify="right")
        for entry in result["front"]:
            costs = [_format_cost(name, entry[name]) for name in names]
            shares = [f"{entry[key]:.4f}" for key in (*scored, "accuracy")]
            front.add_row(*shares, *costs, " ".join(str(op) for op in entry["path"]))
        console.print(front)
    console.print(f"written to {folder / 'searches'} and {folder / 'models'}", highlight=False, markup=False)


def _format_cost(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return milliseconds(value) if name == "latency_ms" else f"{value:,}"


def describe_result_choice(result: dict[str, Any]) -> str | None:
    """Describe the choice of a search by its record, see `describe_choice`."""
    chosen = Chosen.model_validate_json(json.dumps(result["chosen"]))
    return describe_choice(chosen, result["objectives"])
