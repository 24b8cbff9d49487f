"""The charts of `study ranking`, with the paper's numbers beside ours."""

from typing import Any

from greedynas.reporting.charts import BLUE, GREEN, GREY, ORANGE, Chart, figure, line
from greedynas.studies.ranking.paper import PAPER
from greedynas.studies.study import Panel

COLOURS = {"untrained": GREY, "uniform": BLUE, "fair": GREEN, "greedy": ORANGE}
PAPER_STEADY = (10_000, 0.81)  # section 5.3.1: Kendall τ of 1,000 images after 10K iterations of uniform sampling


def ranking_panels(own: list[dict[str, Any]], along: list[dict[str, Any]]) -> list[Panel]:
    return [
        Panel(
            "Table 3: how well filter images rank paths",
            {
                "The paper": _bars(_paper_bars(), "1,000 of 50,000 images"),
                "Ours": _bars(_our_bars(own), _images_text(own)),
            },
        ),
        Panel(
            "Figure 4, left: how many images are needed",
            {"The paper": _paper_curve(), "Ours": _curve(own)},
            "The text of the paper gives only the values at 1,000 images.",
        ),
        Panel(
            "Figure 4, right: when filtering can begin",
            {"The paper": _paper_along(), "Ours": _along(along)},
            "The paper: uniform sampling is steady at τ = 0.81 from 10,000 iterations on, so the warm-up takes that long.",
        ),
    ]


def _images_text(own: list[dict[str, Any]]) -> str:
    return f"{own[0]['filter_images']:,} of {own[0]['val_images']:,} images"


def _paper_bars() -> dict[str, dict[str, float | None]]:
    return {
        kind: {"Spearman ρ": row["spearman"], "Kendall τ": row["tau_a"], "τ by accuracy": row.get("accuracy_tau_a")}
        for kind, row in PAPER.items()
    }


def _our_bars(own: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    return {
        row["kind"]: {
            "Spearman ρ": row["at_filter"]["loss"]["spearman"],
            "Kendall τ": row["at_filter"]["loss"]["tau_a"],
            "τ by accuracy": row["at_filter"]["accuracy"]["tau_a"],
        }
        for row in own
    }


def _bars(values: dict[str, dict[str, float | None]], caption: str) -> Chart:
    traces = [
        {
            "type": "bar",
            "name": kind,
            "x": list(row),
            "y": list(row.values()),
            "marker": {"color": COLOURS.get(kind, GREEN)},
            "text": ["" if value is None else f"{value:.3f}" for value in row.values()],
            "hovertemplate": f"{kind}, %{{x}}: %{{y:.3f}}<extra></extra>",
        }
        for kind, row in values.items()
    ]
    chart = figure(*traces, height=380, barmode="group")
    chart.update_yaxes(title_text="rank correlation", range=[min(0.0, *_all(values)) - 0.02, 1.05])
    label = "; ".join(f"{kind}: " + ", ".join(f"{n} {v:.3f}" for n, v in row.items() if v is not None) for kind, row in values.items())  # fmt: skip
    return Chart(chart, f"Bars: {label}.", caption)


def _all(values: dict[str, dict[str, float | None]]) -> list[float]:
    return [value for row in values.values() for value in row.values() if value is not None]


def _paper_curve() -> Chart:
    traces = [
        line([1000], [row["tau_a"]], kind, COLOURS[kind], mode="markers", marker={"size": 12, "color": COLOURS[kind]})
        for kind, row in PAPER.items()
    ]
    chart = figure(*traces, height=380)
    _axes(chart, "images", log=True)
    chart.update_xaxes(range=[1, 4])
    return Chart(chart, "The paper's Kendall τ at 1,000 images: random 0.113, uniform 0.851, greedy 0.961.", "")


def _curve(own: list[dict[str, Any]]) -> Chart:
    traces = []
    for row in own:
        for by, dash in (("loss", "solid"), ("accuracy", "dot")):
            points = [(point["images"], point[by]["tau_a"]) for point in row["curve"] if point[by]["tau_a"] is not None]
            traces.append(
                line(
                    [count for count, _ in points],
                    [tau for _, tau in points],
                    f"{row['kind']}, by {by}",
                    COLOURS.get(row["kind"], GREEN),
                    mode="lines+markers",
                    line={"dash": dash},
                    hovertemplate="%{x} images: τ %{y:.3f}<extra></extra>",
                )
            )
    chart = figure(*traces, height=380)
    _axes(chart, "images", log=True)
    label = f"Kendall τ-a against the accuracy on all {own[0]['val_images']:,} images, by the number of filter images."
    return Chart(chart, label, "The validation set contains the filter images, so the curves end at half of it.")


def _paper_along() -> Chart:
    step, tau = PAPER_STEADY
    chart = figure(line([step], [tau], "uniform", BLUE, mode="markers", marker={"size": 12, "color": BLUE}), height=380)
    _axes(chart, "iterations")
    chart.update_xaxes(range=[0, 1.5 * step])
    return Chart(chart, "The paper's text: Kendall τ 0.81 after 10,000 iterations of uniform sampling.", "")


def _along(along: list[dict[str, Any]]) -> Chart:
    traces = []
    untrained = [row for row in along if row["kind"] == "untrained"]
    for kind in dict.fromkeys(row["kind"] for row in along if row["kind"] != "untrained"):
        rows = [*untrained, *(row for row in along if row["kind"] == kind)]
        points = [(row["step"], row["at_filter"]["loss"]["tau_a"]) for row in rows]
        xs, ys = [step for step, _ in points], [tau for _, tau in points]
        traces.append(line(xs, ys, kind, COLOURS.get(kind, GREEN), mode="lines+markers"))
    chart = figure(*traces, height=380)
    _axes(chart, "steps")
    return Chart(chart, "Kendall τ-a by loss for the checkpoints of each run.", "For the checkpoints that were kept.")


def _axes(chart: Any, what: str, log: bool = False) -> None:
    chart.update_xaxes(title_text=what, type="log" if log else "linear")
    chart.update_yaxes(title_text="Kendall τ-a", range=[-0.1, 1.05])
