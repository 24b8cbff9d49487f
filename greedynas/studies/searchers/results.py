"""Results of `study searchers`: regret after some evaluations, how often the best path was found, and comparisons."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.reporting.cells import Table, make_table
from greedynas.runtime.text import count
from greedynas.studies.correlations import mean_interval
from greedynas.studies.study import Done, Panel, Study
from greedynas.studies.verdicts import difference_text, judged

Floats = NDArray[np.float64]
Curves = dict[str, dict[str, Floats]]  # regrets (seeds, evaluations) by searcher and table
POINTS = (100, 250, 300, 1000)  # evaluations after which the regret is shown
FOUND = 1e-9  # largest regret of a search that has found the best path


def searchers_study(done: Sequence[Done], settings: dict[str, Any]) -> Study:
    """Return the study: for each group of tables and each limit, a table of the searchers, and a chart."""
    problems: dict[tuple[str, tuple[tuple[str, float], ...]], list[Done]] = {}
    for part in done:
        problems.setdefault((part.settings["group"], tuple(part.settings["limits"].items())), []).append(part)
    curves = {problem: _regrets(parts) for problem, parts in problems.items()}
    rows = [
        _problem_row(group, dict(limits), problems[group, limits], curves[group, limits]) for group, limits in problems
    ]
    return Study(
        name="searchers",
        title=_title(rows, settings),
        lead="Regret is the difference between the best value that is possible within the limits and the best value that a search has "
        "evaluated so far. If a table has several supernets, the mean over the seeds is taken first, and intervals are over supernets; "
        "otherwise they are over seeds. Where nobody knows the best value, it is the best one of all these searches. Evaluations have no "
        "noise, and no search starts from a pool. A search of a CSV file that has only some of the paths is restricted to its rows: "
        "offspring of evolution seldom are rows and are replaced by random rows, and neighbours are the nearest rows.",
        settings=settings,
        results={"problems": rows},
        tables=[table for row in rows for table in (_regret_table(row), _difference_table(row))],
        draw=partial(_draw, curves),
        parts=done,
    )


def _regrets(parts: Sequence[Done]) -> Curves:
    """Return the regrets over evaluations; the best value is the table's own, or the best of all searches."""
    best: dict[str, float] = {}
    for part in parts:
        known = part.result["best"]
        highest = float(part.arrays["curves"].max()) if known is None else float(known)
        best[part.settings["table"]] = max(best.get(part.settings["table"], -np.inf), highest)
    found: dict[str, dict[str, list[Floats]]] = {}
    for part in parts:
        own = found.setdefault(part.settings["searcher"], {}).setdefault(part.settings["table"], [])
        own.append(best[part.settings["table"]] - part.arrays["curves"])
    return {name: {table: np.concatenate(blocks) for table, blocks in own.items()} for name, own in found.items()}


def _problem_row(group: str, limits: dict[str, float], parts: Sequence[Done], curves: Curves) -> dict[str, Any]:
    first = next(iter(next(iter(curves.values())).values()))
    points = [point for point in POINTS if point < first.shape[1]] + [first.shape[1]]
    searchers = {name: _summary(own, points) for name, own in curves.items()}
    ours = next(iter(curves))
    pairs = [(theirs, point) for theirs in curves if theirs != ours for point in points]
    differences = [
        {"ours": ours, "theirs": theirs, "evaluations": point}
        | judged((_units(curves[theirs], point) - _units(curves[ours], point)).tolist(), len(pairs))
        for theirs, point in pairs
    ]
    return {
        "group": group,
        "limits": limits,
        "tables": len(next(iter(curves.values()))),
        "seeds": len(first),
        "best_known": parts[0].result["best"] is not None,
        "points": points,
        "searchers": searchers,
        "differences": differences,
    }


def _units(own: Mapping[str, Floats], point: int) -> Floats:
    """Return the regrets after some evaluations: one for each seed, or the mean of each of several tables."""
    regrets = [curves[:, point - 1] for curves in own.values()]
    return regrets[0] if len(regrets) == 1 else np.array([one.mean() for one in regrets])


def _summary(own: Mapping[str, Floats], points: Sequence[int]) -> dict[str, Any]:
    everything = np.concatenate(list(own.values()))
    reached = everything <= FOUND
    needed = np.where(reached.any(1), reached.argmax(1) + 1.0, np.inf)
    return {
        "regret": {str(point): mean_interval(_units(own, point).tolist()) for point in points},
        "found": {str(point): float(reached[:, point - 1].mean()) for point in points},
        "lowest_found": {str(p): min(float((c[:, p - 1] <= FOUND).mean()) for c in own.values()) for p in points},
        "median_evaluations": float(np.median(needed)),  # infinite, so null in JSON, if most searches do not find it
    }


def _name(row: Mapping[str, Any]) -> str:
    limits = ", ".join(f"{cost} ≤ {count(limit)}" for cost, limit in row["limits"].items())
    return f"{row['group']}, {limits or 'no limit'}"


def _regret_table(row: Mapping[str, Any]) -> Table:
    found = row["searchers"]
    columns = {"searcher": list(found)}
    for point in map(str, row["points"]):
        columns[f"regret at {point}"] = [_interval(one["regret"][point]) for one in found.values()]
    for point in map(str, row["points"]):
        columns[f"found at {point}"] = [f"{one['found'][point]:.0%}" for one in found.values()]
    medians = [one["median_evaluations"] for one in found.values()]
    columns["median"] = [f"{median:,.0f}" if np.isfinite(median) else "never" for median in medians]
    best = "the best path within the limits" if row["best_known"] else "the best path of all these searches"
    note = f"found: the share of searches that have evaluated {best}; median: evaluations until then"
    what = f"{row['tables']} tables, " if row["tables"] > 1 else ""
    return make_table(columns, title=f"{_name(row)}: {what}{row['seeds']} seeds", note=note)


def _difference_table(row: Mapping[str, Any]) -> Table:
    found = row["differences"]
    columns = {
        "pair": [f"{one['ours']} against {one['theirs']}" for one in found],
        "evaluations": [f"{one['evaluations']:,}" for one in found],
        "less regret": [difference_text(one, 3) for one in found],
        "verdict": [one["verdict"] for one in found],
    }
    return make_table(columns, {"verdict"}, title=_name(row))


def _interval(found: Mapping[str, Any]) -> str:
    half = "" if found["low"] is None else f" ± {found['mean'] - found['low']:.3f}"
    return f"{found['mean']:.3f}{half}"


def _title(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """Return how often the first searcher has the lowest mean regret."""
    ours, lowest, total = settings["searchers"][0], 0, 0
    for row in rows:
        for point in map(str, row["points"]):
            means = {name: one["regret"][point]["mean"] for name, one in row["searchers"].items()}
            lowest, total = lowest + (means[ours] <= min(means.values()) + FOUND), total + 1
    return f"{ours} has the lowest mean regret in {lowest} of {total} comparisons of {len(settings['searchers'])} searchers"


def _draw(curves: Mapping[tuple[str, tuple[tuple[str, float], ...]], Curves]) -> list[Panel]:
    from greedynas.reporting.charts import PALETTE, Chart, figure, line

    panels = []
    for (group, limits), own in curves.items():
        traces = []
        for i, (name, tables) in enumerate(own.items()):
            mean = np.mean([regrets.mean(0) for regrets in tables.values()], axis=0)
            shown = np.unique(np.geomspace(1, len(mean), 120).astype(int))
            heights = [float(mean[x - 1]) if mean[x - 1] > FOUND else None for x in shown]
            traces.append(line(shown.tolist(), heights, name, PALETTE[i % len(PALETTE)]))  # type: ignore[arg-type]
        drawn = figure(*traces, height=380)
        drawn.update_xaxes(title_text="evaluations")
        drawn.update_yaxes(title_text="mean regret", type="log")
        caption = "Mean over all seeds and tables; a curve ends where every search has found the best path."
        chart = Chart(drawn, f"Mean regret over evaluations, one curve for each of {', '.join(own)}.", caption)
        panels.append(Panel(_name({"group": group, "limits": dict(limits)}), {"Regret": chart}))
    return panels
