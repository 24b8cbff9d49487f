"""The charts of trained networks: per-class accuracy, confusion, comparison of all models, retraining."""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from greedynas.reporting.charts import (
    BLUE,
    COLORSCALE,
    ORANGE,
    PALETTE,
    Chart,
    accuracy_chart,
    figure,
    loss_and_lr,
    shown,
)
from greedynas.reporting.facts import Facts, Model
from greedynas.reporting.worth import CHANCE
from greedynas.rundir.schemas import Tested
from greedynas.runtime.text import count, percent

MAX_CLASSES = 40  # of a complete chart
MAX_COUNTED = 12  # classes up to which the counts are written into the cells
LARGEST = 20  # confusions that are drawn if there are more classes than MAX_CLASSES
MAX_MODELS = 12
SYMBOLS = ("star", "circle", "diamond", "square", "triangle-up", "x", "triangle-down")


def model_charts(facts: Facts) -> dict[str, Chart]:
    """Return the charts of trained networks by name, without those that have no data."""
    charts: dict[str, Chart | None] = {}
    test = facts.chosen.test if facts.chosen is not None else None
    if test is not None and not test.withheld:
        charts["per_class"] = _per_class(test)
        charts["confusion"] = _confusion(test) if len(test.class_names) <= MAX_CLASSES else _largest_confusions(test)
    charts["models"] = _models(facts)
    charts["retraining"] = _retraining([model for model in facts.models if model.steps][:MAX_MODELS])
    charts["retraining_accuracy"] = _retraining_accuracy(facts.models)
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
        xaxis={"tickformat": ".0%", "range": [0, 1], "title": {"text": "share of the class that is correct"}},
        yaxis={**_class_ticks(names), "autorange": "reversed"},
    )
    worst, best = min(known), max(known)
    label = (
        f"Bar chart of accuracy by class, lowest first: {_class_and_accuracy(test, worst)} is the lowest, "
        f"{_class_and_accuracy(test, best)} the highest."
    )
    rest = len(known) - len(ranked)
    caption = f"The {len(ranked)} classes with the lowest accuracy, of {len(known):,}." if rest else ""
    return Chart(chart, label, caption)


def _class_and_accuracy(test: Tested, entry: tuple[float, int]) -> str:
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
        customdata=_cell_descriptions(names),
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
    worst = f" The most common mistake: {_describe_pair(test, pairs[0])}." if pairs else " There are no mistakes."
    return Chart(chart, f"Confusion matrix of {classes} classes on {test.images:,} test images.{worst}", worst.strip())


def _cell_descriptions(names: Sequence[str]) -> list[list[str]]:
    return [
        [f"{true}, correct" if i == j else f"{true}, classified as {predicted}" for j, predicted in enumerate(names)]
        for i, true in enumerate(names)
    ]


def _largest_confusions(test: Tested) -> Chart | None:
    """Return a chart of the largest confusions, for classes that are too many for a readable matrix."""
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
        hovertemplate="%{customdata[0]}<br>classified as %{customdata[1]}<br>%{x} images<extra></extra>",
    )
    ticks = {"tickmode": "array", "tickvals": list(range(len(pairs))), "ticktext": names}
    most = test.confusion[pairs[0][0]][pairs[0][1]]
    axes = {
        "xaxis": {"title": {"text": "test images"}, "dtick": 1 if most < 6 else None},
        "yaxis": {**ticks, "autorange": "reversed"},
    }
    chart = figure(bars, height=90 + 24 * len(pairs), bargap=0.25, **axes)
    label = f"Bar chart of the {len(pairs)} most common mistakes; the most common: {_describe_pair(test, pairs[0])}."
    return Chart(chart, label, f"True class → predicted class, the largest of all {len(test.class_names):,} classes.")


def _pairs(test: Tested, limit: int) -> list[tuple[int, int]]:
    """Return the most common mistakes as (true, predicted)."""
    counts = np.array(test.confusion)
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:limit]
    pairs = (divmod(int(place), len(counts)) for place in order)
    return [(i, j) for i, j in pairs if counts[i, j] > 0]


def _describe_pair(test: Tested, pair: tuple[int, int]) -> str:
    true, predicted = (test.class_names[i] for i in pair)
    return f"{true} classified as {predicted}, {test.confusion[pair[0]][pair[1]]} times"


def _class_ticks(names: Sequence[str]) -> dict[str, object]:
    """Return ticks by position, because plotly reads some names as numbers or dates, and two may be equal."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": [shown(name, 18) for name in names],
    }


def _models(facts: Facts) -> Chart | None:
    """Return the chart of test accuracy against multiply-adds, if there is more than one network to compare."""
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
    accuracies = ", ".join(f"{model.name} {percent(test.top1)}" for model, test in tested[:MAX_MODELS])
    label = f"Scatter chart of test accuracy against multiply-adds: {accuracies}."
    caption = "Bars: 95% confidence intervals for this number of test images. Each network was trained once."
    return Chart(chart, label, caption)


def _model_point(i: int, model: Model, test: Tested, facts: Facts) -> go.Scatter:
    colour, kind = PALETTE[i % len(PALETTE)], _kind(model, facts)
    hover = f"{shown(model.name, 60)} ({kind})<br>{percent(test.top1)}, {count(model.arch.macs or 0)} multiply-adds"
    return go.Scatter(
        x=[model.arch.macs],
        y=[test.top1],
        error_y={"array": [round(CHANCE * standard_error(test), 5)], "thickness": 1.2, "width": 4},
        mode="markers",
        text=[hover],
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
    ranges = ", ".join(
        f"{model.name} from {m[0].loss:.2f} to {m[-1].loss:.2f}" for model in models if (m := model.steps)
    )
    return Chart(
        loss_and_lr(curves, unit, "training loss"),
        f"Line chart of training losses and learning rates when training from scratch: {ranges}.",
        "Losses on training images; augmentation, label smoothing and dropout raise them: compare only equal recipes.",
    )


def _retraining_accuracy(models: Sequence[Model]) -> Chart | None:
    """Return the accuracies on validation images of the networks that were not trained on these."""
    curves = []
    for model in models:
        known = [(one.epoch, one.val_accuracy) for one in model.epochs if one.val_accuracy is not None]
        if known:
            curves.append((model.name, [epoch for epoch, _ in known], [accuracy for _, accuracy in known]))
    if not curves:
        return None
    return accuracy_chart(curves[:MAX_MODELS], "Images that these networks were not trained on, after every epoch.")
