"""The charts of the searches: the Pareto front, the accuracies by search and by generation, ops by layer, latency."""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import plotly.graph_objects as go

from greedynas.reporting.charts import BLUE, COLORSCALE, GREY, ORANGE, PALETTE, Chart, faded, figure, line, shown
from greedynas.reporting.facts import Facts, Model
from greedynas.rundir.schemas import Evaluated, Search
from greedynas.runtime.rng import stream
from greedynas.runtime.text import count, milliseconds, percent
from greedynas.spaces.paths import OpPath, canonical, op_names
from greedynas.spaces.space import Space

MAX_PATHS = 2000  # drawn as points
MAX_FRONT = 500
MAX_SEARCHES = 6  # in one chart, limited by the number of colours
MAX_GENERATIONS = 20
MAX_MEMBERS = 200  # drawn for each generation
DASHES = ("solid", "dash", "dot")
BEST = 50  # networks whose ops are counted
AXES = {"macs": "multiply-adds", "params": "parameters", "latency_ms": "predicted latency (ms)"}
ACCURACY = {"title": {"text": "accuracy on the supernet"}, "tickformat": "~%"}
SCORE = {"title": {"text": "score"}, "tickformat": "~%"}


def search_charts(facts: Facts) -> dict[str, Chart]:
    """Return the charts of the searches by name, without those that have no data."""
    own = facts.search_of(facts.chosen)
    searches = sorted((search for search in facts.searches if search.found), key=lambda search: search is not own)
    if not searches:
        return {}
    charts: dict[str, Chart | None] = {}
    for name in AXES:
        aimed = [search for search in searches if name in search.objectives]
        charts[f"front_{name}"] = _front(aimed, name, facts)
    charts["accuracies"] = _accuracies(searches[:MAX_SEARCHES])
    charts["generations"] = _generations(side_by_side(searches))
    charts["ops"] = _ops(searches[0], facts.space, facts.chosen)
    timed = [search for search in searches if search.has_latency]
    charts["latency"] = _latency(timed[0], facts) if timed else None
    return {name: chart for name, chart in charts.items() if chart is not None}


def side_by_side(searches: Sequence[Search]) -> list[Search]:
    """Return the first evolutionary search, and one with the other initialisation; the one from the pool is first."""
    evolved = [search for search in searches if search.searcher == "evolution"]
    if not evolved:
        return []
    main = evolved[0]
    twins = [s for s in evolved if s.pool_init != main.pool_init and s.budget == main.budget]
    return sorted([main, *twins[:1]], key=lambda search: not search.pool_init)


def _front(aimed: Sequence[Search], name: str, facts: Facts) -> Chart | None:
    searches = [s for s in aimed if any(entry.cost(name) is not None for entry in s.found)][:MAX_SEARCHES]
    if not searches:
        return None
    scored = any(search.has_scores for search in searches)
    chart = figure(
        height=460,
        xaxis={"title": {"text": AXES[name]}, "tickformat": "" if name == "latency_ms" else "~s"},
        yaxis=SCORE if scored else ACCURACY,
        hovermode="closest",
    )
    drawn = 0
    for i, search in enumerate(searches):
        colour, prefix = PALETTE[i], f"{shown(search.name, 30)}: " if len(searches) > 1 else ""
        sample = _sampled(search, MAX_PATHS // len(searches), facts.config.seed)
        drawn += len(sample)
        chosen = [entry for entry in search.found if entry.path == facts.path_of(search)][:1]
        small = {"size": 5, "opacity": 0.4, "color": colour}
        star = {"size": 15, "symbol": "star", "color": colour}
        front: dict[str, Any] = {
            "mode": "lines+markers",
            "line": {"shape": "hv", "color": colour, "dash": DASHES[i % len(DASHES)]},
        }
        if len(search.objectives) > 1:  # the projection of such a front is not a staircase
            front = {"mode": "markers"}
        points = partial(_points, cost_name=name, space=facts.space)
        chart.add_trace(points(sample, prefix.removesuffix(": ") or "evaluated", small, mode="markers"))
        chart.add_trace(
            points(
                search.front[:: len(search.front) // MAX_FRONT + 1],
                f"{prefix}Pareto front",
                {"size": 7, "color": colour},
                **front,
            )
        )
        if chosen:
            chart.add_trace(points(chosen, f"{prefix}chosen", star, mode="markers"))
    for limit in sorted({high for s in searches if (high := s.budget.limits().get(name, (None, None))[1]) is not None}):
        value = milliseconds(limit) if name == "latency_ms" else count(limit)
        text = {"text": f"limit {value}", "xanchor": "right", "yanchor": "bottom", "y": 0}
        chart.add_vline(x=limit, line={"dash": "dash", "width": 1.5, "color": GREY}, annotation=text)
    evaluated = sum(len(search.found) for search in searches)
    caption = "Each point is a path; hover over it to see its ops. No other path beats those on the front in both."
    if scored:
        caption += " Score: accuracy on the supernet, blended with an additive model of all evaluated paths."
        if not all(search.has_scores for search in searches):
            caption += " For a search without scores, the accuracy is drawn."
    if drawn < evaluated:
        caption += f" Drawn: all fronts and a random sample, {drawn:,} of the {evaluated:,} evaluated paths."
    if len(aimed) > len(searches):
        caption += f" Shown are {len(searches)} of {len(aimed)} searches."
    fronts = sum(len(search.front) for search in searches)
    label = f"Scatter chart: {'score' if scored else 'accuracy on the supernet'} against {AXES[name]} of {evaluated:,} evaluated paths, {fronts} on a front."
    return Chart(chart, label, caption)


def _points(
    entries: Sequence[Evaluated], name: str, marker: dict[str, Any], *, cost_name: str, space: Space, **style: Any
) -> go.Scatter:
    """Return a trace of paths by cost and by score or accuracy; hovering over a path shows its ops."""
    return go.Scatter(
        x=[entry.cost(cost_name) for entry in entries],
        y=[entry.worth for entry in entries],
        text=[_hover(entry, space) for entry in entries],
        hovertemplate="%{text}<extra></extra>",
        name=name,
        marker=marker,
        **style,
    )


def _hover(entry: Evaluated, space: Space) -> str:
    costs = f"{count(entry.macs)} multiply-adds · {count(entry.params)} parameters"
    if entry.latency_ms is not None:
        costs += f" · {milliseconds(entry.latency_ms)}"
    names = iter(op_names(entry.path, space))
    stages = "<br>".join(" ".join(islice(names, stage.repeat)) for stage in space.stages)
    accuracy = f"<b>{percent(entry.accuracy)}</b> on the supernet"
    accuracy += f", score {percent(entry.score)}" if entry.score is not None else ""
    return f"{accuracy}, generation {entry.generation + 1}<br>{costs}<br>{stages}"


def _sampled(search: Search, limit: int, seed: int) -> list[Evaluated]:
    """Return all evaluated paths, or a seeded sample of them."""
    if len(search.found) <= limit:
        return list(search.found)
    chosen = stream(seed, "report").choice(len(search.found), limit, replace=False)
    return [search.found[i] for i in sorted(chosen.tolist())]


def initialisation(search: Search) -> str:
    """Describe how the first generation of a search was made."""
    if search.searcher == "random":
        return "random search"
    if search.pool_init and search.from_pool == 0:
        return "random initialisation (no path of the pool fits)"
    return "initialised with the pool" if search.pool_init else "random initialisation"


def _accuracies(searches: Sequence[Search]) -> Chart:
    """Return the paper's figure of searched paths: overlaid histograms of their accuracies."""
    values = [np.array([entry.accuracy for entry in search.found]) for search in searches]
    low, high = min(v.min() for v in values), max(v.max() for v in values)
    edges = np.linspace(low, high, 31) if high > low else np.array([low - 0.005, high + 0.005])
    traces, means = [], []
    for i, (search, accuracies) in enumerate(zip(searches, values, strict=True)):
        shares = np.histogram(accuracies, edges)[0] / len(accuracies)
        start = initialisation(search)
        title = f"{shown(search.name, 30)} ({start})" if len(searches) > 1 else start
        means.append(f"{percent(accuracies.mean())} in {search.name} ({start})")
        # The outline of a histogram: unlike bars, outlines can be distinguished where they overlap.
        xs = np.concatenate([edges[:1], (edges[:-1] + edges[1:]) / 2, edges[-1:]]).round(6).tolist()
        ys = [0, *shares.round(5).tolist(), 0]
        style = {"color": PALETTE[i], "width": 2, "shape": "hvh", "dash": DASHES[i % len(DASHES)]}
        hover = "%{fullData.name}<br>accuracy about %{x:.1%}<br>%{y:.1%} of its paths<extra></extra>"
        area = {"fill": "tozeroy", "fillcolor": faded(PALETTE[i])}
        traces.append(go.Scatter(x=xs, y=ys, name=title, mode="lines", line=style, hovertemplate=hover, **area))
    chart = figure(
        *traces,
        showlegend=True,
        xaxis=ACCURACY,
        yaxis={"title": {"text": "share of its paths"}, "tickformat": ".0%", "rangemode": "tozero"},
    )
    return Chart(chart, "Histogram of the accuracies of all evaluated paths.", f"Mean accuracy: {'; '.join(means)}.")


def _generations(searches: Sequence[Search]) -> Chart | None:
    """Return a chart with a violin for each generation, which has a side for each of two initialisations."""
    if not searches:
        return None
    last = max(entry.generation for search in searches for entry in search.found)
    wanted = sorted({round(i) for i in np.linspace(0, last, min(last + 1, MAX_GENERATIONS))})
    traces = []
    sides = ("both",) if len(searches) == 1 else ("positive", "negative")
    for search, side, colour in zip(searches, sides, (BLUE, ORANGE), strict=False):
        members = {generation: [] for generation in wanted}  # type: dict[int, list[float]]
        for entry in search.found:
            if entry.generation in members and len(members[entry.generation]) < MAX_MEMBERS:
                members[entry.generation].append(entry.accuracy)
        pairs = [(generation + 1, value) for generation, values in members.items() for value in values]
        traces.append(
            go.Violin(
                y=[generation for generation, _ in pairs],
                x=[value for _, value in pairs],
                orientation="h",
                side=side,
                name=initialisation(search),
                width=0.95,
                points=False,
                meanline={"visible": True},
                spanmode="hard",
                line={"color": colour, "width": 1},
                fillcolor=faded(colour),
                hoveron="violins",
                hoverinfo="x",
            )
        )
    chart = figure(
        *traces,
        height=140 + 26 * len(wanted),
        violinmode="overlay",
        showlegend=True,
        xaxis=ACCURACY,
        yaxis={
            "title": {"text": "generation"},
            "range": [last + 1.6, 0.4],
            "dtick": 1 if last < MAX_GENERATIONS else None,
        },
    )
    first = [np.mean([e.accuracy for e in s.found if e.generation == 0]) for s in searches]
    means = ", ".join(f"{percent(float(mean))} {initialisation(s)}" for s, mean in zip(searches, first, strict=True))
    label = f"Violin chart of accuracy by generation. Mean of the first generation: {means}."
    caption = (
        "The accuracies of the paths that each generation evaluated, as smoothed histograms; the line is the mean."
    )
    drawn = sum(len(trace.x) for trace in traces)
    evaluated = sum(len(search.found) for search in searches)
    if drawn < evaluated:
        caption += f" Drawn: {drawn:,} of {evaluated:,} paths, of {len(wanted)} generations."
    if len(searches) == 2:
        caption += f" Searches {searches[0].name} and {searches[1].name}, on the same supernet under the same limits."
    return Chart(chart, label, caption)


def best_networks(search: Search, space: Space, limit: int = BEST) -> list[OpPath]:
    """Return the best distinct networks of a search on the supernet, in canonical form."""
    best: dict[OpPath, None] = {}
    for entry in sorted(search.found, key=lambda entry: -entry.worth):
        best.setdefault(canonical(entry.path, space))
        if len(best) == limit:
            break
    return list(best)


def _ops(search: Search, space: Space, chosen: Model | None) -> Chart:
    """Return the chart of how often the best networks use each op in each layer."""
    paths = best_networks(search, space, max(1, min(BEST, len(search.found) // 5)))
    names = list(dict.fromkeys(op for layer in space.layers for op in layer.ops))
    shares: list[list[float | None]] = [[None] * len(space.layers) for _ in names]
    for i, layer in enumerate(space.layers):
        for j, op in enumerate(layer.ops):
            shares[names.index(op)][i] = round(sum(path[i] == j for path in paths) / len(paths), 4)
    layers = list(range(1, len(space.layers) + 1))
    heat = go.Heatmap(
        x=layers,
        y=list(range(len(names))),
        z=shares,
        text=[[f"{name} in layer {i} ({space.layers[i - 1].where})" for i in layers] for name in names],
        hovertemplate="%{text}<br>%{z:.0%} of the best networks<extra></extra>",
        hoverongaps=False,
        colorscale=COLORSCALE,
        zmin=0,
        zmax=max(share for row in shares for share in row if share is not None),
        xgap=1,
        ygap=1,
        colorbar={"tickformat": ".0%", "thickness": 10, "outlinewidth": 0, "nticks": 5},
    )
    traces: list[go.Heatmap | go.Scatter] = [heat]
    caption = f"The {len(paths)} best distinct networks of {search.name}, by {'score' if search.has_scores else 'accuracy on the supernet'}."
    own = chosen.arch.canonical_path if chosen is not None and chosen.arch.space == space.name else None
    if own is not None:
        marks = {"color": ORANGE, "size": 9, "symbol": "circle-open", "line": {"width": 2, "color": ORANGE}}
        ys = [names.index(name) for name in op_names(own, space)]
        traces.append(go.Scatter(x=layers, y=ys, mode="markers", marker=marks, name="chosen network", hoverinfo="skip"))
        caption += " Circles: the chosen network."
    caption += " Identities are moved to the last of the layers among which their place makes no difference."
    ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": names, "autorange": "reversed"}
    chart = figure(
        *traces,
        height=130 + 26 * len(names),
        xaxis={
            "title": {"text": "layer"},
            "tickvals": [i for i in layers if i == 1 or i % (1 if len(layers) < 12 else 5) == 0],
            "range": [0.5, len(layers) + 0.5],
            "showgrid": False,
            "zeroline": False,
        },
        yaxis={**ticks, "showgrid": False, "zeroline": False},
    )
    label = (
        f"Heat map: how often each of {len(names)} ops is used in each of {len(layers)} layers by the best networks."
    )
    return Chart(chart, label, caption)


def _latency(search: Search, facts: Facts) -> Chart:
    entries = [entry for entry in _sampled(search, MAX_PATHS, 0) if entry.latency_ms is not None]
    own = [entry for entry in search.found if entry.path == facts.path_of(search) and entry.latency_ms is not None][:1]
    traces = []
    for part, name, marker in (
        (entries, "evaluated", {"size": 5, "opacity": 0.4, "color": BLUE}),
        (own, "chosen", {"size": 15, "symbol": "star", "color": ORANGE}),
    ):
        if part:
            xs, ys = [entry.macs for entry in part], [entry.latency_ms for entry in part]
            hover = {"hovertemplate": "%{x:.3s} multiply-adds<br>%{y:.3g} ms<extra></extra>"}
            traces.append(line(xs, ys, name, BLUE, mode="markers", marker=marker, **hover))  # type: ignore[arg-type]
    chart = figure(
        *traces,
        hovermode="closest",
        xaxis={"title": {"text": AXES["macs"]}, "tickformat": "~s"},
        yaxis={"title": {"text": AXES["latency_ms"]}},
    )
    macs, latency = np.array([(e.macs, e.latency_ms) for e in search.found if e.latency_ms is not None], dtype=float).T
    varied = len(macs) > 2 and macs.std() > 0 and latency.std() > 0
    correlation = f" Their correlation is {np.corrcoef(macs, latency)[0, 1]:.2f}." if varied else ""
    return Chart(
        chart,
        f"Scatter chart of predicted latency against multiply-adds of {len(search.found):,} evaluated paths.",
        f"Latencies are sums of a table's entries for {search.name}, not measurements of whole networks.{correlation}",
    )
