"""The chart of what a method with architecture parameters has learned: the probability of every op over time."""

import plotly.graph_objects as go

from greedynas.reporting.charts import COLORSCALE, Chart, figure, shown
from greedynas.reporting.facts import Training
from greedynas.runtime.text import percent
from greedynas.spaces.space import Space

TALLEST, ROW = 1200, 18  # pixels of the whole chart, and of a row where there is room


def architecture_charts(training: Training, space: Space) -> dict[str, Chart]:
    """Return the heat map of probabilities by name; none if the sampler has learned no probabilities."""
    known = [
        record for record in training.epochs if [len(layer) for layer in record.probabilities] == list(space.num_ops)
    ]
    if not known:
        return {}
    cells = [(i, j) for i, layer in enumerate(space.layers) for j in range(len(layer.ops))]
    names = [f"{i + 1} {shown(space.layers[i].ops[j], 20)}" for i, j in cells]
    xs = [record.epoch for record in known]
    heat = go.Heatmap(
        x=xs,
        y=list(range(len(cells))),
        z=[[round(record.probabilities[i][j], 4) for record in known] for i, j in cells],
        text=[[f"layer {i + 1}, {shown(space.layers[i].ops[j], 20)}" for _ in xs] for i, j in cells],
        hovertemplate="%{text}<br>epoch %{x}: %{z:.1%}<extra></extra>",
        colorscale=COLORSCALE,
        zmin=0,
        zmax=1,
        colorbar={"tickformat": ".0%", "thickness": 10, "outlinewidth": 0, "nticks": 5},
    )
    row = min(ROW, TALLEST / len(cells))
    every = 1 if row >= 10 else max(space.num_ops)  # with many rows, one label for each layer
    rows = list(range(0, len(cells), every))
    ticks = {"tickmode": "array", "tickvals": rows, "ticktext": [names[i] for i in rows], "autorange": "reversed"}
    chart = figure(
        heat,
        height=round(110 + row * len(cells)),
        xaxis={"title": {"text": "epoch"}},
        yaxis={"title": {"text": "layer and op"}, **ticks},
    )
    last = known[-1].probabilities
    sure = sum(max(layer) / sum(layer) for layer in last) / len(last)
    label = (
        f"Heat map of the probability of each op of each layer by epoch. At the end the most probable op of a layer has "
        f"{percent(sure)} on average."
    )
    caption = (
        "One row for each op of each layer, from the first layer to the last. The derivation takes the path with the "
    )
    return {"architecture": Chart(chart, label, caption + "highest product of probabilities within the limits.")}
