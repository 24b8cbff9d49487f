"""What the rankings of `study macro` say beside the ground truth: measures, comparisons, tables."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from greedynas.additive import blended
from greedynas.paths import compact
from greedynas.reporting.cells import Table, make_table
from greedynas.reporting.wording import count, duration
from greedynas.studies.correlations import Numbers, best_of, mean_interval, precision_at_top, rank_correlations
from greedynas.studies.study import Done, Panel, Study
from greedynas.studies.truth import Truth

BUDGETS = {"unlimited": None, "60M": 60_000_000, "50M": 50_000_000}  # FLOPs
TOP = {"top 10%": 0.1, "top 1,000": 1000}  # of all paths, by the truth
PRECISION_SHARE = 0.05
DRAWS = 20  # of the perfect predictor's noise
SCOPES = ("all", "distinct", *TOP)
SCORED = (
    "Paths are ranked by a score, as a search with search.additive chooses: part accuracy on the supernet, part an additive model "
    "fitted to these accuracies. It knows nothing of the truth."
)
COEFFICIENTS = {"tau_b": "τ-b", "tau_a": "τ-a", "spearman": "Spearman"}


def measures(truth: Truth, scores: Numbers, ties: Numbers | None = None) -> dict[str, Any]:
    """Everything that is said of one ranking. `ties` (lower is better) decides between equally good ones."""
    true = truth.accuracies
    result: dict[str, Any] = {"all": rank_correlations(scores, true)}
    result["distinct"] = rank_correlations(scores[truth.distinct], true[truth.distinct])
    for name, size in TOP.items():
        best = best_of(true, size if isinstance(size, int) else round(size * len(true)))
        result[name] = rank_correlations(scores[best], true[best])
    result["precision"] = precision_at_top(scores, true, PRECISION_SHARE)
    result["found"] = {name: found_within(truth, scores, ties, limit) for name, limit in BUDGETS.items()}
    return result


def found_within(truth: Truth, scores: Numbers, ties: Numbers | None, limit: int | None) -> dict[str, Any]:
    """The network that a search of all paths would choose, and how good it truly is among those that keep the limit. Where
    several are equal it might be any of them: means."""
    feasible = np.flatnonzero(truth.macs <= limit) if limit is not None else np.arange(len(truth.paths))
    chosen = feasible[scores[feasible] == scores[feasible].max()]
    if ties is not None:
        losses = np.nan_to_num(ties[chosen], nan=np.inf)
        chosen = chosen[losses == losses.min()]
    true = truth.accuracies
    return {
        "path": compact(truth.paths[chosen[0]], truth.space),
        "accuracy": float(true[chosen].mean()),
        "rank": 1 + float((true[feasible] > true[chosen, None]).sum(1).mean()),
        "of": len(feasible),
        "behind_best": float(true[feasible].max() - true[chosen].mean()),
        "macs": float(truth.macs[chosen].mean()),
    }


def reference_rankings(truth: Truth) -> dict[str, dict[str, Any]]:
    """What supernets are measured by: rankings that need none, and two bounds that know the truth."""
    found = {name: measures(truth, scores) for name, scores in truth.trivial_rankings().items()}
    found["additive"] = measures(truth, truth.additive_model())
    found["perfect"] = _mean([measures(truth, truth.perfect_predictor(draw)) for draw in range(DRAWS)])
    return found


def macro_study(truth: Truth, done: Sequence[Done], settings: dict[str, Any]) -> Study:
    """The results of all parts."""
    references = reference_rankings(truth)
    rows = [_part_row(truth, part) for part in done]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    by_method = {method: [row for row in rows if row["method"] == method] for method in methods}
    results = {
        "networks": len(truth.paths),
        "distinct": len(truth.distinct),
        "best": {"path": compact(truth.paths[best := best_of(truth.accuracies, 1)[0]], truth.space),
                 "accuracy": float(truth.accuracies[best])},
        "references": references,
        "methods": {method: summarised(found) for method, found in by_method.items()},
        "differences": [
            {"ours": ours, "theirs": theirs, **paired(by_method[ours], by_method[theirs])}
            for ours in methods if _is_greedy(ours)
            for theirs in methods if not _is_greedy(theirs)
        ],
        "parts": rows,
    }  # fmt: skip
    return Study(
        name="macro",
        title=_title(results),
        lead=f"Supernets trained on CIFAR-10 rank {len(truth.paths):,} of {truth.space.size:,} paths of the macro space "
        f"({len(truth.distinct):,} distinct networks) on validation images; NAS-Bench-Macro trained every network from "
        "scratch three times. A supernet is worth its cost where it ranks better than a count of layers does."
        + (f" {SCORED}" if any(additive_share(part) for part in done) else ""),
        settings=settings,
        results=results,
        tables=[correlation_table(results), found_table(results), cost_table(results), *more_tables(results)],
        draw=partial(_draw, truth, list(done), results),
        parts=done,
    )


def _is_greedy(method: str) -> bool:
    """With all of the cost, or with a share of it."""
    return method.startswith("greedy")


def _draw(truth: Truth, done: list[Done], results: dict[str, Any]) -> list[Panel]:
    from greedynas.studies.macro_charts import macro_panels

    return macro_panels(truth, done, results)


def _part_row(truth: Truth, part: Done) -> dict[str, Any]:
    """One supernet: its measures by accuracy in the first mode, all modes, by loss, along training; and its cost."""
    modes, share = part.settings["bn"], additive_share(part)
    by_loss = {mode: part.arrays[f"{mode}_loss"] for mode in modes}
    ranked = {mode: measures(truth, scores_of(truth, part, f"{mode}_accuracy"), by_loss[mode]) for mode in modes}
    kept = ("max_epochs", "epochs", "stopped", "optimization_images", "evaluation_images", "corrected_images")
    return {
        "method": part.settings["method"],
        "seed": part.settings["config"]["seed"],
        **ranked[modes[0]],
        "mean_accuracy": float(part.arrays[f"{modes[0]}_accuracy"].mean()),
        "best_accuracy": float(part.arrays[f"{modes[0]}_accuracy"].max()),
        "modes": {mode: ranked[mode]["all"] for mode in modes},
        "by_loss": rank_correlations(-by_loss[modes[0]], truth.accuracies),
        # By the accuracy on the supernet alone, where it is but a part of the score.
        **({"by_accuracy": measures(truth, part.arrays[f"{modes[0]}_accuracy"], by_loss[modes[0]])} if share else {}),
        "moments": [
            {**moment, **rank_correlations(scores_of(truth, part, f"step{moment['step']}_accuracy"), truth.accuracies)}
            for moment in part.result["moments"]
        ],
        **{key: part.result[key] for key in kept},
        "train_seconds": part.result["seconds"],
        "rank_seconds": part.result["rank_seconds"][modes[0]],
        "machine": part.machine,
    }


def additive_share(part: Done) -> float:
    """How much of a path's score is an additive model's (`search.additive`)."""
    return float(part.settings["config"]["search"]["additive"])


def scores_of(truth: Truth, part: Done, name: str) -> Numbers:
    """What a search of all paths would choose by."""
    return blended(truth.paths, part.arrays[name], additive_share(part))


def flat(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row that can be averaged over seeds, by dotted name."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": number for inner, number in flat(value).items()}
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key != "seed":
            found[key] = float(value)
    return found


def summarised(rows: list[dict[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """Mean and 95% interval over the seeds of everything that every row has."""
    numbers = [flat(row) for row in rows]
    return {
        key: mean_interval([row[key] for row in numbers]) for key in numbers[0] if all(key in row for row in numbers)
    }


def paired(ours: list[dict[str, Any]], rivals: list[dict[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """Greedy less a rival, seed by seed: mean and 95% interval of the differences."""
    numbers = {row["seed"]: flat(row) for row in ours}
    pairs = [(numbers[row["seed"]], flat(row)) for row in rivals if row["seed"] in numbers]
    if not pairs:
        return {}
    return {
        key: mean_interval([mine[key] - other[key] for mine, other in pairs])
        for key in pairs[0][0]
        if all(key in mine and key in other for mine, other in pairs)
    }


# Tables


def correlation_table(results: dict[str, Any]) -> Table:
    rows = []
    for scope in SCOPES:
        for key, coefficient in COEFFICIENTS.items():
            cells = [told(summary.get(f"{scope}.{key}")) for summary in results["methods"].values()]
            known = [_three(reference[scope][key]) for reference in results["references"].values()]
            rows.append([f"{coefficient}, {scope}", *cells, *known])
    cells = [told(summary["precision"]) for summary in results["methods"].values()]
    known = [_three(reference["precision"]) for reference in results["references"].values()]
    rows.append([f"precision top {PRECISION_SHARE:.0%}", *cells, *known])
    return Table(
        ["", *results["methods"], *results["references"]],
        rows,
        title="Agreement with the ground truth",
        note=f"Mean over seeds ± half the 95% interval. Non-ID: by the number of ops that are no identity. Additive: one number for each op of each layer, fitted to the "
        "truth. Perfect: as uncertain as the truth, a mean of three trainings, is itself. "
        f"All: {results['networks']:,} paths; distinct: of several paths that are one network the canonical one, "
        f"{results['distinct']:,}; top: by the truth. Seeds: {_seeds(results)}.",
    )


def found_table(results: dict[str, Any]) -> Table:
    rows = []
    for name, limit in BUDGETS.items():
        of = next(iter(results["references"].values()))["found"][name]["of"]
        for key, label, digits in (("accuracy", "accuracy", 2), ("behind_best", "behind best", 2), ("rank", f"rank of {of:,}", 1)):  # fmt: skip
            cells = [told(summary.get(f"found.{name}.{key}"), digits) for summary in results["methods"].values()]
            known = [f"{reference['found'][name][key]:.{digits}f}" for reference in results["references"].values()]
            rows.append([f"{'no limit' if limit is None else f'≤ {name} FLOPs'}: {label}", *cells, *known])
    best = results["best"]
    return Table(
        ["", *results["methods"], *results["references"]],
        rows,
        title="The network that would be found",
        note=f"The path that ranks first; accuracy and rank are those of the ground truth, in which "
        f"the best network, {best['path']}, has {best['accuracy']:.3f}%.",
    )


def cost_table(results: dict[str, Any]) -> Table:
    methods = results["methods"]
    columns = {
        "method": list(methods),
        "seeds": [str(summary["corrected_images"]["n"]) for summary in methods.values()],
        "epochs": [f"{summary['epochs']['mean']:g}" for summary in methods.values()],
    }
    for key in ("optimization_images", "evaluation_images", "corrected_images"):
        columns[key.replace("_", " ")] = [count(summary[key]["mean"]) for summary in methods.values()]
    for key in ("train_seconds", "rank_seconds"):
        columns["training" if key == "train_seconds" else "ranking"] = [
            duration(summary[key]["mean"]) for summary in methods.values()
        ]
    columns["accuracy on the supernet"] = [
        f"{summary['mean_accuracy']['mean']:.3f} (best {summary['best_accuracy']['mean']:.3f})"
        for summary in methods.values()
    ]
    return make_table(columns, title="What it cost", note="Means over seeds; corrected: evaluation counts 1/3.33.")


def more_tables(results: dict[str, Any]) -> list[Table]:
    """Differences, BatchNorm modes and moments, where there are any."""
    tables = []
    keys = {"all.tau_b": "τ-b, all", "distinct.tau_b": "τ-b, distinct", "top 10%.tau_b": "τ-b, top 10%",
            "precision": "precision", "found.unlimited.accuracy": "found, no limit",
            "found.60M.accuracy": "≤ 60M FLOPs", "found.50M.accuracy": "≤ 50M FLOPs"}  # fmt: skip
    differences = [found for found in results["differences"] if found.get("all.tau_b", {"n": 0})["n"] > 1]
    if differences:
        rows = [[f"{one['ours']} − {one['theirs']}", *(_signed(one.get(key)) for key in keys)] for one in differences]
        note = (
            f"Paired by seed: mean and 95% interval (Student's t, n = {differences[0]['all.tau_b']['n']}). Found: points of true "
            f"accuracy. Of {len(differences) * len(keys)} intervals one in twenty would miss zero by chance."
        )
        tables.append(Table(["", *keys.values()], rows, title="Greedy against its rivals", note=note))
    alone = {f"by_accuracy.{key}": name for key, name in keys.items()}
    if any("by_accuracy.all.tau_b" in summary for summary in results["methods"].values()):
        rows = [[method, *(told(found.get(key)) for key in alone)] for method, found in results["methods"].items()]
        rows += [[f"{one['ours']} − {one['theirs']}", *(_signed(one.get(key)) for key in alone)] for one in differences]
        note = "As a search without search.additive chooses."
        tables.append(Table(["", *alone.values()], rows, title="By the accuracy on the supernet alone", note=note))
    modes = list(dict.fromkeys(mode for row in results["parts"] for mode in row["modes"]))
    if len(modes) > 1:
        rows = [
            [f"{method}, {mode}", *(told(summary.get(f"modes.{mode}.{key}")) for key in COEFFICIENTS)]
            for method, summary in results["methods"].items()
            for mode in modes
        ]
        tables.append(Table(["", *COEFFICIENTS.values()], rows, title="BatchNorm statistics when paths are ranked"))
    if any(row["moments"] for row in results["parts"]):
        rows = [
            [f"{row['method']}-{row['seed']}", f"{moment['epoch']:.1f}", _three(moment["tau_b"])]
            for row in results["parts"]
            for moment in (*row["moments"], {"epoch": row["epochs"], **row["all"]})
        ]
        tables.append(Table(["supernet", "epoch", "τ-b, all"], rows, title="Along the training"))
    return tables


def told(summary: dict[str, Any] | None, digits: int = 3) -> str:
    """`0.802 ± 0.011`: the mean and half of its interval."""
    if summary is None:
        return "–"
    if summary["low"] is None:
        return f"{summary['mean']:.{digits}f}"
    return f"{summary['mean']:.{digits}f} ± {(summary['high'] - summary['low']) / 2:.{digits}f}"


def _signed(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "–"
    return f"{summary['mean']:+.3f} [{summary['low']:+.3f}, {summary['high']:+.3f}]"


def _title(results: dict[str, Any]) -> str:
    counting = results["references"]["non-ID ops"]["all"]["tau_b"]
    found = sorted(
        (
            (summary["all.tau_b"]["mean"], method)
            for method, summary in results["methods"].items()
            if "all.tau_b" in summary
        ),
        reverse=True,
    )
    ranked = ", ".join(f"{method} {tau:.3f}" for tau, method in found) or "nothing could be ranked"
    return f"Kendall τ-b with the ground truth: {ranked}; counting layers {counting:.3f}"


def _seeds(results: dict[str, Any]) -> str:
    return ", ".join(f"{method} {found['corrected_images']['n']}" for method, found in results["methods"].items())


def _three(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _mean(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Several measures of the same shape, averaged; of what is no number the first one's."""
    first = found[0]
    result: dict[str, Any] = {}
    for key, value in first.items():
        if isinstance(value, dict):
            result[key] = _mean([one[key] for one in found])
        else:
            result[key] = value if isinstance(value, str) else float(np.mean([one[key] for one in found]))
    return result
