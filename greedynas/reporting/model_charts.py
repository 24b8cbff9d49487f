"""The charts of trained networks: per-class accuracy, confusion, all models side by side, retraining."""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from greedynas.reporting.charts import BLUE, COLORSCALE, ORANGE, PALETTE, Chart, figure, loss_and_lr, shown
from greedynas.reporting.facts import Facts, Model
from greedynas.reporting.worth import CHANCE
from greedynas.rundir.schemas import Tested
from greedynas.runtime.text import count, percent

MAX_CLASSES = 40  # drawn one by one
MAX_COUNTED = 12  # classes whose confusions are written into the cells
LARGEST = 20  # confusions, where there are more classes than that
MAX_MODELS = 12
SYMBOLS = ("star", "circle", "diamond", "square", "triangle-up", "x", "triangle-down")


def model_charts(facts: Facts) -> dict[str, Chart]:
    """By name; those without data are left out."""
    charts: dict[str, Chart | None] = {}
    test = facts.chosen.test if facts.chosen is not None else None
    if test is not None and not test.withheld:
        charts["per_class"] = _per_class(test)
        charts["confusion"] = _confusion(test) if len(test.class_names) <= MAX_CLASSES else _largest_confusions(test)
    charts["models"] = _models(facts)
    charts["retraining"] = _retraining([model for model in facts.models if model.steps][:MAX_MODELS])
    return {name: chart for name, chart in charts.items() if chart is not None}


def standard_error(test: Tested) -> float:
    return math.sqrt(test.top1 * (1 - test.top1) / test.images)


def _per_class(test: Tested) -> Chart | None:
    known = [(accuracy, i) for i, accuracy in enumerate(test.per_class) if accuracy is not None]
    if not known:
        return None
    ranked = sorted(known)[:MAX_CLASSES]
    totals = [sum(row) for row in test.confusion]
    names = [test.class_names[i] for _, i in ranked]
    bars = go.Bar(
        x=[round(accuracy, 5) for accuracy, _ in ranked],
        y=list(range(len(ranked))),
        orientation="h",
        marker={"color": BLUE},
        text=[percent(accuracy) for accuracy, _ in ranked],
        textposition="auto",
        customdata=[[shown(name, 120), totals[i]] for name, (_, i) in zip(names, ranked, strict=True)],
        hovertemplate="%{customdata[0]}<br>%{x:.1%} of %{customdata[1]} images<extra></extra>",
    )
    chart = figure(
        bars,
        height=90 + 24 * len(ranked),
        bargap=0.25,
        xaxis={"tickformat": ".0%", "range": [0, 1], "title": {"text": "share of the class named right"}},
        yaxis={**_class_ticks(names), "autorange": "reversed"},
    )
    worst, best = min(known), max(known)
    label = (
        f"Bar chart of accuracy by class, lowest first: {shown_plainly(test, worst)} is the lowest, "
        f"{shown_plainly(test, best)} the highest."
    )
    rest = len(known) - len(ranked)
    told = f"The {len(ranked)} classes with the lowest accuracy, of {len(known):,}." if rest else ""
    return Chart(chart, label, told)


def shown_plainly(test: Tested, entry: tuple[float, int]) -> str:
    return f"{test.class_names[entry[1]]} ({percent(entry[0])})"


def _confusion(test: Tested) -> Chart:
    counts = np.array(test.confusion)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [shown(name, 60) for name in test.class_names]
    classes = len(names)
    heat = go.Heatmap(
        x=list(range(classes)),
        y=list(range(classes)),
        z=shares.round(4).tolist(),
        text=counts.tolist(),
        customdata=_told_cells(names),
        hovertemplate="%{customdata}<br>%{text} images, %{z:.1%} of the class<extra></extra>",
        texttemplate="%{text}" if classes <= MAX_COUNTED else None,
        colorscale=COLORSCALE,
        zmin=0,
        zmax=1,
        xgap=1,
        ygap=1,
        showscale=False,
    )
    chart = figure(
        heat,
        height=min(760, 200 + 34 * classes),
        xaxis={**_class_ticks(test.class_names), "title": {"text": "predicted"}, "tickangle": -45, "showgrid": False},
        yaxis={**_class_ticks(test.class_names), "autorange": "reversed", "title": {"text": "true"}, "showgrid": False},
    )
    chart.update_xaxes(zeroline=False)
    chart.update_yaxes(zeroline=False)
    pairs = _pairs(test, 1)
    told = f" The most common mistake: {_pair_told(test, pairs[0])}." if pairs else " There are no mistakes."
    return Chart(chart, f"Confusion matrix of {classes} classes on {test.images:,} test images.{told}", told.strip())


def _told_cells(names: Sequence[str]) -> list[list[str]]:
    return [
        [f"{true}, named right" if i == j else f"{true}, taken for {named}" for j, named in enumerate(names)]
        for i, true in enumerate(names)
    ]


def _largest_confusions(test: Tested) -> Chart | None:
    """Instead of a matrix that nobody could read."""
    pairs = _pairs(test, LARGEST)
    if not pairs:
        return None
    names = [f"{shown(test.class_names[i], 15)} → {shown(test.class_names[j], 15)}" for i, j in pairs]
    bars = go.Bar(
        x=[test.confusion[i][j] for i, j in pairs],
        y=list(range(len(pairs))),
        orientation="h",
        marker={"color": ORANGE},
        customdata=[[shown(test.class_names[i], 120), shown(test.class_names[j], 120)] for i, j in pairs],
        hovertemplate="%{customdata[0]}<br>taken for %{customdata[1]}<br>%{x} images<extra></extra>",
    )
    ticks = {"tickmode": "array", "tickvals": list(range(len(pairs))), "ticktext": names}
    most = test.confusion[pairs[0][0]][pairs[0][1]]
    axes = {
        "xaxis": {"title": {"text": "test images"}, "dtick": 1 if most < 6 else None},
        "yaxis": {**ticks, "autorange": "reversed"},
    }
    chart = figure(bars, height=90 + 24 * len(pairs), bargap=0.25, **axes)
    label = f"Bar chart of the {len(pairs)} most common mistakes; the most common: {_pair_told(test, pairs[0])}."
    return Chart(chart, label, f"True class → predicted class, the largest of all {len(test.class_names):,} classes.")


def _pairs(test: Tested, limit: int) -> list[tuple[int, int]]:
    """The most common mistakes as (true, predicted)."""
    counts = np.array(test.confusion)
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:limit]
    pairs = (divmod(int(place), len(counts)) for place in order)
    return [(i, j) for i, j in pairs if counts[i, j] > 0]


def _pair_told(test: Tested, pair: tuple[int, int]) -> str:
    true, named = (test.class_names[i] for i in pair)
    return f"{true} taken for {named}, {test.confusion[pair[0]][pair[1]]} times"


def _class_ticks(names: Sequence[str]) -> dict[str, object]:
    """Positions with names: names alone could be numbers, dates, or twice the same."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": [shown(name, 18) for name in names],
    }


def _models(facts: Facts) -> Chart | None:
    """Test accuracy against multiply-adds, where there is more than one network to compare."""
    shown_models = [model for model in facts.models if model.test is not None and not model.test.withheld]
    tested = [(model, model.test) for model in shown_models if model.test is not None and model.arch.macs]
    if len(tested) < 2:
        return None
    tested.sort(key=lambda pair: pair[0] is not facts.chosen)
    traces = [_model_point(i, model, test, facts) for i, (model, test) in enumerate(tested[:MAX_MODELS])]
    macs = [model.arch.macs or 1 for model, _ in tested]
    wide = max(macs) > 8 * min(macs)
    pad = (max(macs) / min(macs)) ** 0.25 if wide else 0.3 * (max(macs) - min(macs) or max(macs))
    span = [math.log10(min(macs) / pad), math.log10(max(macs) * pad)] if wide else [min(macs) - pad, max(macs) + pad]
    chart = figure(
        *traces,
        height=400,
        showlegend=True,
        xaxis={
            "title": {"text": "multiply-adds"},
            "tickformat": "~s",
            "type": "log" if wide else "linear",
            "range": span,
        },
        yaxis={"title": {"text": "top-1 on test images"}, "tickformat": "~%"},
    )
    told = ", ".join(f"{model.name} {percent(test.top1)}" for model, test in tested[:MAX_MODELS])
    label = f"Scatter chart of test accuracy against multiply-adds: {told}."
    return Chart(chart, label, "Bars: the 95% range that chance gives with so many test images. One training of each.")


def _model_point(i: int, model: Model, test: Tested, facts: Facts) -> go.Scatter:
    colour, kind = PALETTE[i % len(PALETTE)], _kind(model, facts)
    told = f"{shown(model.name, 60)} ({kind})<br>{percent(test.top1)}, {count(model.arch.macs or 0)} multiply-adds"
    return go.Scatter(
        x=[model.arch.macs],
        y=[test.top1],
        error_y={"array": [round(CHANCE * standard_error(test), 5)], "thickness": 1.2, "width": 4},
        mode="markers",
        text=[told],
        hovertemplate="%{text}<extra></extra>",
        name=shown(model.name, 40),
        marker={"color": colour, "symbol": SYMBOLS[i % len(SYMBOLS)], "size": 10 if i else 16},
    )


def _kind(model: Model, facts: Facts) -> str:
    if model is facts.chosen:
        return "chosen"
    return "found in this run" if facts.search_of(model) is not None else "rival"


def _retraining(models: Sequence[Model]) -> Chart | None:
    if not models:
        return None
    curves = []
    for model in models:
        per_epoch = model.epochs[-1].step / model.epochs[-1].epoch if model.epochs and model.epochs[-1].epoch else 1
        xs = [step.step / max(per_epoch, 1) for step in model.steps]
        curves.append((model.name, xs, [step.loss for step in model.steps], [step.lr for step in model.steps]))
    unit = "epoch" if any(model.epochs for model in models) else "step"
    told = ", ".join(f"{model.name} from {m[0].loss:.2f} to {m[-1].loss:.2f}" for model in models if (m := model.steps))
    return Chart(
        loss_and_lr(curves, unit, "training loss"),
        f"Line chart of training losses and learning rates when training from scratch: {told}.",
        "Losses on training images; augmentation, label smoothing and dropout raise them, so only like recipes compare.",
    )
