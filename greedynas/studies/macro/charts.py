"""The charts of `study macro`."""

from collections import defaultdict
from typing import Any

from greedynas.reporting.charts import BLUE, GREEN, GREY, OCHRE, ORANGE, PURPLE, Chart, figure, line
from greedynas.studies.study import Done, Panel
from greedynas.studies.truth import Truth

# Ochre is for greedy at a share of the cost.
COLOURS = defaultdict(lambda: OCHRE, greedy=ORANGE, uniform=BLUE, fair=GREEN)
# Table 1 of the paper: corrected #optimization in millions of images, top-1 on ImageNet in percent.
PAPER = {
    "uniform": (147.6, 74.50),
    "FairNAS-C": (184.5, 74.69),
    "uniform-E": (89.8, 74.17),
    "greedy": (89.7, 74.85),
}
LABEL = 0.055  # height of a label beside a line, in τ-b
PAPER_COLOURS = {"uniform": BLUE, "FairNAS-C": GREEN, "uniform-E": PURPLE, "greedy": ORANGE}


def macro_panels(truth: Truth, done: list[Done], results: dict[str, Any]) -> list[Panel]:
    panels = [
        Panel(
            "Rank correlation with the ground truth" + (", by the score" if results["scored"] else ""),
            {
                f"{results['distinct']:,} distinct networks": _correlations(results, "distinct"),
                f"All {results['paths']:,} paths": _correlations(results, "all"),
            },
        ),
        Panel(
            "Found networks and cost",
            {"The paper, Table 1 (ImageNet)": _paper_cost(), "Ours (macro, CIFAR-10)": _our_cost(results)},
            "The paper retrains each found network; here the ground truth replaces retraining.",
        ),
        Panel("Accuracy on the supernet and after training from scratch", _scatters(truth, done)),
    ]
    moments = _moments(results)
    return [*panels, Panel("During training", {"τ-b of networks": moments})] if moments is not None else panels


def _correlations(results: dict[str, Any], group: str) -> Chart:
    """Draw a point for each training, and lines for rankings that need none."""
    traces = []
    for method in results["methods"]:
        taus = [row[group]["tau_b"] for row in results["parts"] if row["method"] == method]
        seeds = [row["seed"] for row in results["parts"] if row["method"] == method]
        traces.append(
            line(
                [method] * len(taus),  # type: ignore[list-item]
                taus,
                method,
                COLOURS[method],
                mode="markers",
                marker={"size": 11, "color": COLOURS[method], "opacity": 0.75},
                text=[f"seed {seed}" for seed in seeds],
                hovertemplate="%{text}: τ-b %{y:.3f}<extra></extra>",
                showlegend=False,
            )
        )
    chart = figure(*traces, height=420)
    known = {name: measured[group]["tau_b"] for name, measured in results["references"].items()}
    for name, tau in known.items():
        crowded = any(0 < other - tau < LABEL for other in known.values())  # a label above would overlap the next line
        chart.add_hline(y=tau, line={"color": GREY, "width": 1, "dash": "dot"})
        chart.add_annotation(
            xref="paper", x=1, y=tau, text=f"{name} {tau:.3f}", showarrow=False, xanchor="right",
            yanchor="top" if crowded else "bottom",
        )  # fmt: skip
    chart.update_yaxes(
        title_text="Kendall τ-b", range=[min(0, *(tau or 0 for trace in traces for tau in trace.y)) - 0.02, 1]
    )
    values = ", ".join(f"{name} {tau:.3f}" for name, tau in known.items())
    return Chart(
        chart,
        f"Kendall τ-b of each supernet with the truth, over {'distinct networks' if group == 'distinct' else 'all paths'}; "
        f"for comparison {values}.",
        "One point per training (seed). Dotted: rankings without a supernet, an additive model fitted to the truth, and a "
        "perfect predictor, which is limited by the uncertainty of the truth.",
    )


def _paper_cost() -> Chart:
    traces = [
        line(
            [cost], [accuracy], name, PAPER_COLOURS[name], mode="markers", marker={"size": 13, "color": PAPER_COLOURS[name]},
            hovertemplate=f"{name}: %{{x:.1f}}M images, %{{y:.2f}}%<extra></extra>",
        )
        for name, (cost, accuracy) in PAPER.items()
    ]  # fmt: skip
    chart = figure(*traces, height=380)
    chart.update_xaxes(title_text="corrected images, millions", rangemode="tozero")
    chart.update_yaxes(title_text="top-1 of the found network, %")
    values = "; ".join(f"{name} {cost}M images, {accuracy}%" for name, (cost, accuracy) in PAPER.items())
    return Chart(chart, f"The paper's Table 1: {values}.", "320M to 326M FLOPs; -E: at greedy's cost.")


def _our_cost(results: dict[str, Any]) -> Chart:
    traces = []
    for method in results["methods"]:
        rows = [row for row in results["parts"] if row["method"] == method]
        traces.append(
            line(
                [row["corrected_images"] / 1e6 for row in rows],
                [row["found"]["unlimited"]["accuracy"] for row in rows],
                method,
                COLOURS[method],
                mode="markers",
                marker={"size": 11, "color": COLOURS[method], "opacity": 0.75},
                text=[f"seed {row['seed']}: {row['found']['unlimited']['path']}" for row in rows],
                hovertemplate="%{text}<br>%{x:.2f}M images, %{y:.3f}%<extra></extra>",
            )
        )
    chart = figure(*traces, height=380)
    best = results["best"]["accuracy"]
    chart.add_hline(y=best, line={"color": GREY, "width": 1, "dash": "dot"})
    chart.add_annotation(xref="paper", x=1, y=best, text=f"best of all {best:.3f}%", showarrow=False, xanchor="right", yanchor="bottom")  # fmt: skip
    chart.update_xaxes(title_text="corrected images, millions", rangemode="tozero")
    chart.update_yaxes(title_text="true accuracy of the found network, %")
    return Chart(
        chart,
        f"Corrected cost and true accuracy of the network that each supernet finds; the best has {best:.3f}%.",
        "Without a limit on FLOPs; one point per training.",
    )


def _scatters(truth: Truth, done: list[Done]) -> dict[str, Chart]:
    """Draw the distinct networks as each method's first supernet ranks them."""
    charts = {}
    for part in done:
        method, mode = part.settings["method"], part.settings["bn"][0]
        if method in charts:
            continue
        accuracy = part.arrays[f"{mode}_accuracy"][truth.distinct].astype(float)
        trace = line(
            truth.accuracies[truth.distinct].round(3).tolist(),
            accuracy.round(4).tolist(),
            method,
            COLOURS[method],
            mode="markers",
            marker={"size": 3, "color": COLOURS[method], "opacity": 0.35},
            hoverinfo="skip",
            showlegend=False,
        )
        chart = figure(trace, height=340)
        chart.update_xaxes(title_text="true accuracy, %", range=[80, 93.5])
        chart.update_yaxes(title_text="accuracy on the supernet", tickformat="~%")
        label = (
            f"Scatter plot of {len(accuracy):,} distinct networks: true accuracy and accuracy on the {method} supernet."
        )
        charts[method] = Chart(chart, label, "Networks below 80% are not shown.")
    return charts


def _moments(results: dict[str, Any]) -> Chart | None:
    traces = []
    for row in results["parts"]:
        if row["moments"]:
            points = [*row["moments"], {"epoch": row["epochs"], "distinct": row["distinct"]}]
            xs, ys = [point["epoch"] for point in points], [point["distinct"]["tau_b"] for point in points]
            name = f"{row['method']}-{row['seed']}"
            traces.append(line(xs, ys, name, COLOURS[row["method"]], mode="lines+markers"))
    if not traces:
        return None
    chart = figure(*traces, height=380)
    chart.update_xaxes(title_text="epoch")
    chart.update_yaxes(title_text="Kendall τ-b")
    return Chart(chart, "τ-b of each supernet during training.", "Rankings of distinct networks from checkpoints.")
