"""The common parts of all charts of the report, and the charts of supernet training.

A chart is a plotly figure in the light theme, with a text for screen readers and a caption. In the dark theme the page
replaces each colour by its dark counterpart, so every colour of a figure is a key of `DARK`. Plotly interprets text as
a kind of HTML, so text from outside must go through `shown`.
"""

import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from greedynas.greedy.settings import TrainSettings
from greedynas.reporting.facts import Training
from greedynas.rundir.schemas import Epoch
from greedynas.runtime.text import percent

# Okabe and Ito's colours, which colour-blind people can distinguish; darkened or lightened for contrast.
BLUE, ORANGE, GREEN, PURPLE, OCHRE, GREY = "#0072b2", "#d55e00", "#00855f", "#a2508a", "#a67c00", "#7a838c"
SCALE = ("#f1f5f9", "#a9cde6", "#3d8dc4", "#08406f")  # of heat maps, from low to high
DARK = {
    BLUE: "#5ab4ea",
    ORANGE: "#ff9d57",
    GREEN: "#41cf9e",
    PURPLE: "#dc9cc8",
    OCHRE: "#e8c35a",
    GREY: "#8d97a1",
    SCALE[0]: "#1d232a",
    SCALE[1]: "#28527a",
    SCALE[2]: "#4f9fd8",
    SCALE[3]: "#d9efff",
}
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, OCHRE, GREY)


def faded(colour: str) -> str:
    """Return a transparent version of a colour, for areas behind lines."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.25)"


DARK |= {faded(colour): faded(DARK[colour]) for colour in PALETTE}
COLORSCALE = [[i / (len(SCALE) - 1), colour] for i, colour in enumerate(SCALE)]
MAX_POINTS = 400  # in a curve


@dataclass(frozen=True)
class Chart:
    figure: go.Figure
    label: str  # description for screen readers
    caption: str = ""  # explanation for all readers


def shown(text: str, limit: int = 80) -> str:
    """Escape a string so that plotly shows it literally, and cut it to `limit` characters."""
    text = " ".join(text.split())
    return html.escape(text if len(text) <= limit else text[: limit - 1] + "…", quote=False)


def figure(*traces: Any, height: int = 360, **layout: Any) -> go.Figure:
    """Return a figure without a theme, which the page adds."""
    result = go.Figure(traces)
    set_layout(result, height, **layout)
    return result


def set_layout(figure: go.Figure, height: int, **layout: Any) -> None:
    figure.layout.template = None
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"}
    figure.update_layout(height=height, margin={"l": 10, "r": 10, "t": 10, "b": 10}, legend=legend)
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    figure.update_layout(**layout)


def buckets(length: int, limit: int = MAX_POINTS) -> list[slice]:
    """Split consecutive records into at most `limit` ranges of equal length."""
    size = max(1, math.ceil(length / limit))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def thinned(xs: Sequence[float], ys: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """Reduce a curve to at most `limit` points, which are means of neighbours."""
    parts = buckets(len(xs), limit)
    return [_round(statistics.fmean(xs[part])) for part in parts], [
        _round(statistics.fmean(ys[part])) for part in parts
    ]


def line(xs: Sequence[float], ys: Sequence[float], name: str, colour: str, **more: Any) -> go.Scatter:
    style = {"color": colour, "width": 2, **more.pop("line", {})}
    return go.Scatter(x=list(xs), y=list(ys), name=name, mode=more.pop("mode", "lines"), line=style, **more)


def loss_and_lr(
    curves: Sequence[tuple[str, Sequence[float], Sequence[float], Sequence[float]]], unit: str, loss: str
) -> go.Figure:
    """Return a figure of losses and, below them, learning rates, for curves of (name, xs, losses, learning rates)."""
    chart = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
    for i, (name, xs, losses, rates) in enumerate(curves):
        colour, title = PALETTE[i % len(PALETTE)], shown(name, 40)
        several = len(curves) > 1
        shared: dict[str, Any] = {"legendgroup": str(i), "showlegend": False}
        hover = ("%{fullData.name}<br>" if several else "") + f"{unit} %{{x:.2f}}<br>"
        place = {"hovertemplate": hover + "loss %{y:.3f}<extra></extra>", **shared, "showlegend": several}
        chart.add_trace(line(*thinned(xs, losses), title, colour, **place), row=1, col=1)
        place = {"hovertemplate": hover + "learning rate %{y:.4f}<extra></extra>", **shared}
        chart.add_trace(line(*thinned(xs, rates), title, colour, **place), row=2, col=1)
    set_layout(chart, 420)
    chart.update_yaxes(title_text=loss, row=1, col=1)
    chart.update_yaxes(title_text="learning rate", row=2, col=1, rangemode="tozero", nticks=4)
    chart.update_xaxes(title_text=unit, row=2, col=1)
    return chart


# Supernet training


def supernet_charts(training: Training, settings: TrainSettings) -> dict[str, Chart]:
    """Return the charts of supernet training by name, without those that have no data."""
    per_epoch = _steps_per_epoch(training.epochs)
    charts = {
        "supernet_loss": _loss(training, per_epoch),
        "supernet_accuracy": _accuracy(training),
        "pool_steadiness": _steadiness(training, settings, per_epoch),
        "filtering": _filtering(training, per_epoch),
        "pool_losses": _pool_losses(training, per_epoch),
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def _loss(training: Training, per_epoch: float) -> Chart | None:
    if not training.steps:
        return None
    xs = [record.step / per_epoch for record in training.steps]
    losses, rates = [record.loss for record in training.steps], [record.lr for record in training.steps]
    chart = loss_and_lr([("supernet", xs, losses, rates)], _unit(per_epoch), "training loss")
    _mark_warmup(chart, training, per_epoch)
    label = f"Line chart: the supernet's training loss from {losses[0]:.2f} to {losses[-1]:.2f}, and its learning rate."
    return Chart(chart, label, "Each step trains another path, so the curve shows the losses of many networks in turn.")


def _accuracy(training: Training) -> Chart | None:
    known = [(record.epoch, record.val_accuracy) for record in training.epochs if record.val_accuracy is not None]
    if not known:
        return None
    xs, ys = thinned([epoch for epoch, _ in known], [accuracy for _, accuracy in known])
    return accuracy_chart(
        [("supernet", xs, ys)],
        "The best path of the candidate pool (in the warm-up, the most expensive path) on random validation images, with "
        "the supernet's weights. A network that is trained by itself is more accurate.",
    )


def accuracy_chart(curves: Sequence[tuple[str, Sequence[float], Sequence[float]]], caption: str) -> Chart:
    """Return a chart of accuracies after epochs, for curves of (name, epochs, accuracies)."""
    traces = [
        line(
            xs,
            ys,
            shown(name, 40),
            PALETTE[i % len(PALETTE)],
            mode="lines+markers",
            marker={"size": 6, "color": PALETTE[i % len(PALETTE)]},
            showlegend=len(curves) > 1,
            hovertemplate="after epoch %{x}: %{y:.1%}<extra></extra>",
        )
        for i, (name, xs, ys) in enumerate(curves)
    ]
    chart = figure(
        *traces,
        xaxis={"title": {"text": "epoch"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "accuracy on validation images"}, "tickformat": "~%"},
    )
    ends = ", ".join(f"{name} from {percent(ys[0])} to {percent(ys[-1])}" for name, _, ys in curves)
    return Chart(chart, f"Line chart of the accuracy on validation images by epoch: {ends}.", caption)


def _steadiness(training: Training, settings: TrainSettings, per_epoch: float) -> Chart | None:
    known = [(record.epoch, record.pi) for record in training.epochs if record.pi is not None]
    if not known or not training.steps:
        return None
    epsilon = thinned([r.step / per_epoch for r in training.steps], [r.epsilon for r in training.steps])
    xs, ys = [epoch for epoch, _ in known], [pi for _, pi in known]
    chart = figure(
        line(*epsilon, "ε, share of paths drawn from the pool", BLUE, hovertemplate="ε = %{y:.2f}<extra></extra>"),
        line(
            xs,
            ys,
            "π, share of the pool that is new",
            ORANGE,
            mode="lines+markers",
            marker={"size": 8, "color": ORANGE},
            hovertemplate="after epoch %{x}: π = %{y:.2f}<extra></extra>",
        ),
        yaxis={"title": {"text": "share"}, "range": [-0.03, 1.05], "tickformat": ".0%"},
        xaxis={"title": {"text": _unit(per_epoch)}, "rangemode": "tozero"},
    )
    chart.add_hline(
        y=settings.alpha,
        line={"dash": "dash", "width": 1.5, "color": GREY},
        annotation={
            "text": f"α = {settings.alpha:g}",
            "xanchor": "left",
            "x": 0,
            "yanchor": "bottom",
            "showarrow": False,
        },
    )
    last = training.epochs[-1]
    status = "Training is not finished"
    if last.stopped is not None:
        status = f"Training stopped after epoch {last.epoch}: {last.stopped}"
        chart.add_vline(
            x=last.epoch,
            line={"dash": "dot", "width": 1.5, "color": GREY},
            annotation={
                "text": f"stopped after {last.epoch} ",
                "xanchor": "right",
                "yanchor": "top",
                "yshift": -16,  # below a legend, which printed pages have closer to the chart
                "showarrow": False,
            },
        )
    label = (
        f"Line chart of ε and π by epoch. π is {ys[-1]:.2f} at the end, its threshold α {settings.alpha:g}. {status}."
    )
    use = (
        "Training may stop once π is at most α." if settings.stopping else "Stopping by π was switched off in this run."
    )
    return Chart(chart, label, f"The pool is steady when few of its paths are new after an epoch. {use} {status}.")


def _filtering(training: Training, per_epoch: float) -> Chart | None:
    """Return the chart of the losses of kept and rejected paths, with medians and middle halves over time."""
    parts = buckets(len(training.filterings), 60)
    traces, medians = [], {}
    for name, colour, dash in (("rejected", ORANGE, "dot"), ("kept", BLUE, "solid")):
        rows = []
        for part in parts:
            records = training.filterings[part]
            losses = [loss for record in records for loss in getattr(record, name) if loss is not None]
            if losses:
                rows.append((statistics.fmean(r.step for r in records) / per_epoch, *_quartiles(losses)))
        if not rows:
            continue
        xs, low, middle, high = ([_round(value) for value in column] for column in zip(*rows, strict=True))
        medians[name] = middle[-1]
        band = {"mode": "lines", "line": {"width": 0, "color": colour}, "hoverinfo": "skip", "showlegend": False}
        traces.append(go.Scatter(x=xs, y=low, legendgroup=name, **band))
        traces.append(go.Scatter(x=xs, y=high, legendgroup=name, fill="tonexty", fillcolor=faded(colour), **band))
        hover = f"{name}: median loss %{{y:.3f}}<extra></extra>"
        traces.append(line(xs, middle, name, colour, line={"dash": dash}, legendgroup=name, hovertemplate=hover))
    if not traces:
        return None
    finals = ", ".join(f"{name} {value:.2f}" for name, value in medians.items())
    chart = figure(
        *traces,
        xaxis={"title": {"text": _unit(per_epoch)}},
        yaxis={"title": {"text": "loss on filter images"}},
        legend_traceorder="reversed",
    )
    return Chart(
        chart,
        f"Line chart of the losses of kept and of rejected paths over time; median losses at the end: {finals}.",
        "Lines are medians, bands the middle half. The losses are measured on the few images of each filtering, before "
        "the path is trained.",
    )


def _pool_losses(training: Training, per_epoch: float) -> Chart | None:
    traces = []
    for field, name, colour, dash in (
        ("pool_worst", "worst", ORANGE, "dot"),
        ("pool_median", "median", BLUE, "solid"),
        ("pool_best", "best", GREEN, "dash"),
    ):
        known = [(r.step / per_epoch, getattr(r, field)) for r in training.filterings if getattr(r, field) is not None]
        if known:
            xs, ys = thinned([x for x, _ in known], [y for _, y in known], 200)
            hover = f"{name} of the pool: %{{y:.3f}}<extra></extra>"
            traces.append(line(xs, ys, name, colour, line={"dash": dash}, hovertemplate=hover))
    if not traces:
        return None
    label = "Line chart of the best, the median and the worst loss in the candidate pool over time."
    axes: dict[str, Any] = {
        "xaxis": {"title": {"text": _unit(per_epoch)}},
        "yaxis": {"title": {"text": "loss in the pool"}},
    }
    return Chart(
        figure(*traces, **axes), label, "The loss of a path is its latest measurement, on the images of one filtering."
    )


def _mark_warmup(chart: go.Figure, training: Training, per_epoch: float) -> None:
    """Mark the end of the warm-up, in which paths are drawn uniformly and all of them are trained."""
    if not training.filterings or training.filterings[0].step == 0:
        return
    chart.add_vline(
        x=training.filterings[0].step / per_epoch,
        line={"dash": "dot", "width": 1.5, "color": GREY},
        annotation={"text": "warm-up ends", "xanchor": "left", "yanchor": "top", "showarrow": False},
        row=1,
        col=1,
    )


def _steps_per_epoch(epochs: Sequence[Epoch]) -> float:
    """Return the steps per epoch, or 1 (so that the unit is a step) before the first epoch has ended."""
    return epochs[-1].step / epochs[-1].epoch if epochs and epochs[-1].epoch and epochs[-1].step else 1.0


def _unit(per_epoch: float) -> str:
    return "step" if per_epoch == 1.0 else "epoch"


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _round(value: float) -> float:
    """Round to five significant digits, because more are not visible and would enlarge the file."""
    return float(f"{value:.5g}")
