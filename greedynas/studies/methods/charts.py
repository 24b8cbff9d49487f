"""The charts of `study methods`, and those that `study ablation` shares with it."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from greedynas.reporting.charts import BLUE, GREEN, GREY, OCHRE, ORANGE, PURPLE, Chart, figure, line
from greedynas.studies.methods.paper import NO_SUPERNET, PAPER_TOP1
from greedynas.studies.study import Panel

COLOURS = {"random": GREY, "uniform": BLUE, "uniform-E": PURPLE, "fair": GREEN, "fair-E": OCHRE, "greedy": ORANGE}
# Points have the names of their methods, so that colours may repeat.
COLOURS |= {"darts": BLUE, "fbnet": GREEN, "proxyless": PURPLE, "proxyless-reinforce": PURPLE, "mdenas": OCHRE}
COLOURS |= {"single-path": GREY}
# Table 1: corrected #optimization in millions of images.
PAPER_COST = {"uniform": 147.6, "uniform-E": 89.8, "fair": 184.5, "greedy": 89.7}
BINS = 12
POINTS = "One point per seed; the bar is the mean with its 95% interval."  # the legend of `points_chart`


def methods_panels(results: dict[str, Any]) -> list[Panel]:
    note = "" if results["reference"] is None else "Ours: the accuracy of the ground truth replaces retraining."
    panels = [
        Panel(
            "Tables 1 and 7: the networks that each method finds",
            {
                "The paper (ImageNet)": points_chart(
                    {name: [value] for name, value in PAPER_TOP1.items()}, {}, "top-1, %", "One network each."
                ),
                "Ours": _our_points(results),
            },
            note,
        ),
        Panel("Cost", {"The paper (ImageNet)": _paper_cost(), "Ours": _our_cost(results)}, note),
    ]
    if "systematic" in results:
        panels += _systematic_panels(results["systematic"])
    return panels


def _our_points(results: dict[str, Any]) -> Chart:
    """Draw all contestants, but not the random network if there are others: it is far behind and would squeeze their
    scale."""
    values = values_of(results["rows"])
    caption = POINTS
    if len(values) > 1 and NO_SUPERNET in values:
        del values[NO_SUPERNET]
        mean = results["contestants"][NO_SUPERNET]["top1"]["mean"]
        caption += f" Not drawn: the {NO_SUPERNET}, mean {mean:.2f}."
    return points_chart(values, results["contestants"], "top-1, %", caption)


def values_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["contestant"], []).append(row["top1"])
    return found


def points_chart(
    values: Mapping[str, list[float]],
    summaries: Mapping[str, Any],
    axis: str,
    caption: str,
    colours: Mapping[str, str] = COLOURS,
) -> Chart:
    """Draw a row of points for each contestant, the first at the top, with its mean and its interval if there is
    one."""
    traces: list[Any] = []
    for name, numbers in values.items():
        colour = colours.get(name.partition(",")[0], GREY)
        summary = summaries.get(name, {}).get("top1")
        if summary is not None and summary["low"] is not None:
            half = summary["high"] - summary["mean"]
            bar = {"type": "data", "array": [half], "color": colour, "thickness": 2, "width": 8}
            marker = {"symbol": "line-ns", "size": 18, "line": {"width": 3, "color": colour}, "color": colour}
            text = f"{name}<br>mean %{{x:.2f}} ± {half:.2f}<extra></extra>"
            traces.append(line([summary["mean"]], [name], name, colour, mode="markers", marker=marker, error_x=bar, hovertemplate=text))  # type: ignore[list-item]  # fmt: skip
        marker = {"size": 10, "color": colour, "opacity": 0.6}
        traces.append(line(numbers, [name] * len(numbers), name, colour, mode="markers", marker=marker, hovertemplate=f"{name}<br>%{{x:.2f}}<extra></extra>"))  # type: ignore[list-item]  # fmt: skip
    chart = figure(*traces, height=90 + 34 * len(values), showlegend=False)
    chart.update_xaxes(title_text=axis)
    chart.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=list(values))
    means = "; ".join(f"{name} {sum(numbers) / len(numbers):.2f}" for name, numbers in values.items())
    return Chart(chart, f"{axis} by contestant, means: {means}.", caption)


def _paper_cost() -> Chart:
    searched = {name: PAPER_TOP1[f"{name}, evolution"] for name in PAPER_COST}
    return _cost_chart(
        {name: [(PAPER_COST[name], accuracy)] for name, accuracy in searched.items()},
        "About 320M FLOPs; fair: FairNAS-C; -E: at greedy's cost.",
    )


def _our_cost(results: dict[str, Any]) -> Chart:
    searchers = [row["searcher"] for row in results["rows"] if row["searcher"]]
    searcher = "evolution" if "evolution" in searchers else next(iter(searchers), "")
    found: dict[str, list[tuple[float, float]]] = {}
    for row in results["rows"]:
        if row["searcher"] in (searcher, "derivation") and searcher:
            found.setdefault(row["method"], []).append((row["corrected_images"] / 1e6, row["top1"]))
    return _cost_chart(found, f"One point per training, searched by {searcher}." if searcher else "")


def _cost_chart(points: Mapping[str, list[tuple[float, float]]], caption: str) -> Chart:
    traces = [
        line(
            [x for x, _ in found], [y for _, y in found], name, COLOURS[name], mode="markers",
            marker={"size": 11, "color": COLOURS[name], "opacity": 0.75},
            hovertemplate=f"{name}: %{{x:.3g}}M images, %{{y:.2f}}%<extra></extra>",
        )
        for name, found in points.items()
    ]  # fmt: skip
    chart = figure(*traces, height=360)
    chart.update_xaxes(title_text="corrected images, millions", rangemode="tozero")
    chart.update_yaxes(title_text="top-1 of the found network, %")
    text = "; ".join(f"{name} {x:.3g}M, {y:.2f}%" for name, found in points.items() for x, y in found)
    return Chart(chart, f"Corrected cost and top-1: {text}.", caption)


def _systematic_panels(found: dict[str, Any]) -> list[Panel]:
    """Draw the supplement's last figure: histograms of all methods on the same axis, and top-1 against supernet
    accuracy."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for supernet in found["supernets"]:
        by_method.setdefault(supernet["method"], []).append(supernet)
    everything = [value for supernet in found["supernets"] for value in supernet["top1"]]
    low, high = min(everything), max(everything)
    width = max((high - low) / BINS, 1e-6)
    histograms, scatters = {}, {}
    for method, supernets in by_method.items():
        values = [value for supernet in supernets for value in supernet["top1"]]
        mean = sum(values) / len(values)
        bars = go.Histogram(
            x=values, xbins={"start": low, "end": high + width, "size": width}, histnorm="percent", marker={"color": COLOURS[method]},
            hovertemplate="%{x}: %{y:.0f}%<extra></extra>", showlegend=False,
        )  # fmt: skip
        chart = figure(bars, height=300)
        chart.update_xaxes(title_text="top-1, %", range=[low - width, high + width])
        chart.update_yaxes(title_text="% of the sampled paths")
        chart.add_vline(x=mean, line={"color": GREY, "width": 2, "dash": "dot"})
        label = f"Histogram of top-1 of {len(values)} sampled paths of the {method} supernets; mean {mean:.2f}."
        histograms[method] = Chart(chart, label, f"Dotted: the mean, {mean:.2f}.")
        points = line(
            [value for supernet in supernets for value in supernet["supernet_accuracy"]], values, method, COLOURS[method],
            mode="markers", marker={"size": 6, "color": COLOURS[method], "opacity": 0.6},
            hovertemplate="on the supernet %{x:.2%}<br>top-1 %{y:.2f}%<extra></extra>", showlegend=False,
        )  # fmt: skip
        chart = figure(points, height=300)
        chart.update_xaxes(title_text="accuracy on the supernet", tickformat="~%")
        chart.update_yaxes(title_text="top-1, %", range=[low - width, high + width])
        tau = found["methods"][method].get("tau_b")
        text = "no τ-b: all values are the same" if tau is None else f"τ-b {tau['mean']:.2f}"
        scatters[method] = Chart(chart, f"Accuracy on the {method} supernet and top-1 of the same paths; {text}.", text)
    note = (
        "The paper gives no numbers for its figure; it says that paths found with the greedy supernet have a higher top-1 on "
        "average than those found with a uniform one."
    )
    return [
        Panel("The supplement's last figure: a systematic sample of the searched paths", histograms, note),
        Panel("Accuracy on the supernet and top-1 of these paths", scatters),
    ]
