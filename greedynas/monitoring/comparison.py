"""Runs side by side: a table for the terminal, and one page with the fronts of all runs on one picture."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from greedynas.data.manifest import read_manifest
from greedynas.monitoring.status import stage_of, status_from
from greedynas.reporting.cells import Table, make_table
from greedynas.reporting.charts import PALETTE, Chart, figure, line, shown, thinned
from greedynas.reporting.facts import Facts, Model, read_facts
from greedynas.reporting.model_charts import standard_error
from greedynas.reporting.pages import render_page
from greedynas.reporting.worth import CHANCE, difference_error
from greedynas.rundir.schemas import Search, Tested
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import write_atomically
from greedynas.runtime.text import count, duration, milliseconds, percent, points
from greedynas.spaces.budget import limits

MOST_RUNS = 20
COSTS = {"macs": "multiply-adds", "params": "parameters", "latency_ms": "predicted latency (ms)"}
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Compared:
    """A run in a comparison."""

    name: str  # as short as it is unique
    facts: Facts
    images: str | None  # the identity of its images

    @property
    def search(self) -> Search | None:
        """The search of the chosen network, or the first one."""
        return self.facts.search_of(self.facts.chosen) or next(iter(self.facts.searches), None)

    @property
    def test(self) -> Tested | None:
        """The test of the chosen network, unless its result is withheld."""
        test = None if self.facts.chosen is None else self.facts.chosen.test
        return None if test is None or test.withheld else test


def read_compared(folders: Sequence[Path]) -> list[Compared]:
    """Read the runs of a comparison.

    Raises:
        GreedyNASError: A folder is not a run, a run is damaged or named twice, or there are too many.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise GreedyNASError("a run is named twice; name each run once")
    if len(folders) > MOST_RUNS:
        raise GreedyNASError(f"at most {MOST_RUNS} runs can be compared, got {len(folders)}")
    names = _short_names(folders)
    found = []
    for name, folder in zip(names, folders, strict=True):
        manifest = None
        facts = read_facts(folder)
        manifest = read_manifest(folder)
        found.append(Compared(name, facts, None if manifest is None else manifest.digest()))
    return found


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the folders, as many as tell all of them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def comparison_table(runs: Sequence[Compared]) -> Table:
    """Return the table of a comparison: one row for each run."""
    chosen = [run.facts.chosen for run in runs]
    columns = {
        "run": [run.name for run in runs],
        "stage": [stage_of(run.facts) for run in runs],
        "top-1 on test": [_top1(run) for run in runs],
        "best on the supernet": [_best_on_supernet(run.search) for run in runs],
        "multiply-adds": [count(one.arch.macs) if one and one.arch.macs is not None else "" for one in chosen],
        "parameters": [count(one.arch.params) if one and one.arch.params is not None else "" for one in chosen],
        "latency": [milliseconds(one.arch.latency_ms) if one and one.arch.latency_ms else "" for one in chosen],
        "budget": [limits(run.search.budget) or "none" if run.search is not None else "" for run in runs],
        "space": _if_different([run.facts.space.name for run in runs]),
        "sampler": _if_different([run.facts.config.train.sampler for run in runs]),
        "epochs": [str(status_from(run.facts).epochs) for run in runs],
        "corrected images": [_cost(run.facts) for run in runs],
        "training": [_seconds(run.facts) for run in runs],
    }
    words = {"stage", "budget", "space", "sampler"}
    return make_table(columns, words, note=" ".join(remarks(runs)), title="Runs side by side")


def _if_different(values: list[str]) -> list[str]:
    """Return the values, or empty ones, whose column is left out, if all are the same."""
    return values if len(set(values)) > 1 else [""] * len(values)


def _top1(run: Compared) -> str:
    test = run.test
    if test is None:
        withheld = run.facts.chosen is not None and run.facts.chosen.test is not None
        return "withheld" if withheld else ""
    return f"{percent(test.top1)} ± {100 * CHANCE * standard_error(test):.1f}"


def _best_on_supernet(search: Search | None) -> str:
    return "" if search is None or not search.found else percent(max(entry.accuracy for entry in search.found))


def _cost(facts: Facts) -> str:
    training = facts.training
    return count(training.epochs[-1].corrected_images) if training is not None and training.epochs else ""


def _seconds(facts: Facts) -> str:
    training = facts.training
    steps = training.steps if training is not None else ()
    return duration(steps[-1].seconds) if steps and steps[-1].seconds is not None else ""


def remarks(runs: Sequence[Compared]) -> list[str]:
    """Return what has to be known to read a comparison: different images, and differences that can be chance."""
    found = []
    if len({run.images for run in runs if run.images is not None}) > 1:
        found.append(
            "These runs do not have the same images or the same split, so their accuracies are not comparable exactly."
        )
    tested = [(run, run.test) for run in runs if run.test is not None]
    tested.sort(key=lambda pair: -pair[1].top1)
    if len(tested) >= 2:
        (first, own), (second, other) = tested[:2]
        difference, error = own.top1 - other.top1, difference_error(own, [other])
        chance = difference <= CHANCE * error
        equal = f"{first.name} and {second.name} do equally well on the test images."
        found.append(
            equal
            if difference == 0
            else f"{first.name} is ahead of {second.name} by {points(difference)}"
            + (
                ", a difference that chance can give."
                if chance
                else f"; the standard error of this difference is {points(error)}."
            )
        )
    if any(run.search is not None for run in runs):
        found.append(
            "Accuracies on a supernet rank the paths of that supernet; those of two supernets are not comparable exactly."
        )
    return found


def charts_of(runs: Sequence[Compared]) -> dict[str, Chart]:
    """Return the charts of a comparison by name, without those that have no data."""
    charts: dict[str, Chart | None] = {f"front_{cost}": _fronts(runs, cost) for cost in COSTS}
    charts["tested"] = _tested(runs)
    charts["losses"] = _losses(runs)
    return {name: chart for name, chart in charts.items() if chart is not None}


def _fronts(runs: Sequence[Compared], cost: str) -> Chart | None:
    """Return the Pareto fronts of all runs in one chart."""
    traces = []
    for i, run in enumerate(runs):
        search = run.search
        if search is None or (cost not in search.objectives and cost != "macs"):
            continue
        front = sorted(
            ((entry.cost(cost), entry.worth) for entry in search.front if entry.cost(cost) is not None),
            key=lambda pair: pair[0] or 0.0,
        )
        if front:
            name = shown(run.name, 40)
            traces.append(
                line(
                    [x or 0.0 for x, _ in front],
                    [y for _, y in front],
                    name,
                    PALETTE[i % len(PALETTE)],
                    mode="lines+markers",
                    line={"dash": DASHES[(i // len(PALETTE)) % len(DASHES)], "shape": "hv"},
                    marker={"size": 7, "color": PALETTE[i % len(PALETTE)]},
                    hovertemplate=f"{name}<br>%{{x:.4s}} {COSTS[cost]}<br>%{{y:.1%}} on the supernet<extra></extra>",
                )
            )
    if not traces:
        return None
    chart = figure(
        *traces,
        height=460,
        showlegend=True,
        hovermode="closest",
        xaxis={"title": {"text": COSTS[cost]}, "tickformat": "" if cost == "latency_ms" else "~s"},
        yaxis={"title": {"text": "accuracy on the supernet"}, "tickformat": "~%"},
    )
    label = f"Line chart: the Pareto fronts of {len(traces)} runs, accuracy on the supernet against {COSTS[cost]}."
    return Chart(chart, label, "Each line is the front of one run; its accuracies come from its own supernet.")


def _tested(runs: Sequence[Compared]) -> Chart | None:
    """Return the chart of all tested networks of all runs, the chosen ones as stars."""
    traces = []
    for i, run in enumerate(runs):
        models = [(model, model.test) for model in run.facts.models if model.test is not None and model.arch.macs]
        models = [(model, test) for model, test in models if not test.withheld]
        if not models:
            continue
        colour, name = PALETTE[i % len(PALETTE)], shown(run.name, 40)
        traces.append(
            go.Scatter(
                x=[model.arch.macs for model, _ in models],
                y=[test.top1 for _, test in models],
                error_y={"array": [round(CHANCE * standard_error(test), 5) for _, test in models], "thickness": 1.2},
                mode="markers",
                name=name,
                text=[_hover(run, model, test) for model, test in models],
                hovertemplate="%{text}<extra></extra>",
                marker={
                    "size": [14 if model is run.facts.chosen else 8 for model, _ in models],
                    "symbol": ["star" if model is run.facts.chosen else "circle" for model, _ in models],
                    "color": colour,
                },
            )
        )
    if not traces:
        return None
    chart = figure(
        *traces,
        height=420,
        showlegend=True,
        hovermode="closest",
        xaxis={"title": {"text": "multiply-adds"}, "tickformat": "~s"},
        yaxis={"title": {"text": "top-1 on test images"}, "tickformat": "~%"},
    )
    label = f"Scatter chart: test accuracy against multiply-adds of the networks of {len(traces)} runs."
    return Chart(chart, label, "Stars are the chosen networks. Bars: 95% confidence intervals for the test images.")


def _hover(run: Compared, model: Model, test: Tested) -> str:
    return f"{shown(run.name, 40)}: {shown(model.name, 40)}<br>{percent(test.top1)}, {count(model.arch.macs or 0)} multiply-adds"


def _losses(runs: Sequence[Compared]) -> Chart | None:
    """Return the training losses of all supernets."""
    traces = []
    for i, run in enumerate(runs):
        training = run.facts.training
        if training is not None and training.steps:
            xs, ys = thinned([one.step for one in training.steps], [one.loss for one in training.steps])
            name = shown(run.name, 40)
            hover = f"{name}<br>step %{{x:,.0f}}: loss %{{y:.3f}}<extra></extra>"
            traces.append(line(xs, ys, name, PALETTE[i % len(PALETTE)], hovertemplate=hover))
    if not traces:
        return None
    axes: dict[str, Any] = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "training loss"}}}
    chart = figure(*traces, showlegend=True, **axes)
    return Chart(chart, f"Line chart: the training losses of {len(traces)} supernets.")


def write_comparison(runs: Sequence[Compared], file: Path) -> Path:
    """Write the page of a comparison, which opens offline.

    Raises:
        GreedyNASError: The file cannot be written.
    """
    title = f"{len(runs)} runs side by side"
    page = render_page("compare.html", charts_of(runs), title=title, remarks=remarks(runs), runs=comparison_table(runs))
    try:
        write_atomically(file, page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise GreedyNASError(f"cannot write {file}: {error.strerror}") from None
    return file


def comparison_facts(runs: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return a comparison as plain data."""
    rows = []
    for run in runs:
        front = [] if run.search is None else run.search.front
        facts = status_from(run.facts).to_json()
        names = ("run", "stage", "space", "sampler", "epochs", "searches", "model", "macs", "params", "top1", "bytes")
        rows.append(
            {name: facts[name] for name in names}
            | {"images": run.images, "front": [json.loads(entry.model_dump_json()) for entry in front]}
        )
    return rows
