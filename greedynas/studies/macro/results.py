"""Results of `study macro`: measures of the rankings against the ground truth, comparisons, tables.

Everything is measured over distinct networks first, each ranked by its canonical path, then over all paths.
NAS-Bench-Macro trained each distinct network; the paths that are the same network have copies of its accuracies.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.greedy.searchers.additive import additive_model
from greedynas.reporting.cells import Table, make_table
from greedynas.runtime.text import count, duration
from greedynas.settings.experiments import hooks_of
from greedynas.spaces.costs import IntArray
from greedynas.spaces.paths import canonical, compact
from greedynas.studies.correlations import Numbers, best_of, mean_interval, precision_at_top, rank_correlations
from greedynas.studies.study import Done, Panel, Study
from greedynas.studies.truth import Truth

BUDGETS = {"unlimited": None, "60M": 60_000_000, "50M": 50_000_000}  # FLOPs
GROUPS = {"distinct": "networks", "all": "paths"}  # the ranked groups and their labels
TOP = {"top 10%": 0.1, "top 1,000": 1000}  # of a group, by the truth
PRECISION_SHARE = 0.05
DRAWS = 20  # of the perfect predictor's noise
SCOPES = {**GROUPS, **{f"{group} {top}": f"{top} {name}" for top in TOP for group, name in GROUPS.items()}}
COEFFICIENTS = {"tau_b": "τ-b", "tau_a": "τ-a", "spearman": "Spearman"}
UNTRAINED = "NWOT"
# Rankings besides the one by the score: key, title and note of a table.
ALONE = (
    ("by_accuracy", "By the accuracy on the supernet alone", "The ranking of a search without experimental.additive."),
    (
        "by_additive",
        "By the additive model alone",
        "One number for each op of each layer, fitted to the accuracies on the supernet.",
    ),
)
TRUTH = (
    "NAS-Bench-Macro trained each distinct network from scratch three times and took the highest test accuracy of 50 epochs; the other "
    "paths are the same networks again, with copies of their accuracies. A network is ranked by its canonical path."
)
TUNED = "The preset's settings were tuned against this ground truth (benchmarks/records/tuning.md)."


def measures(truth: Truth, scores: Numbers, ties: Numbers | None = None) -> dict[str, Any]:
    """Return all measures of one ranking. `ties` (lower is better) decides between paths with equal scores."""
    result: dict[str, Any] = correlations(truth, scores)
    result["precision"] = {}
    for group, rows in groups(truth).items():
        some, true = scores[rows], truth.accuracies[rows]
        for name, size in TOP.items():
            best = best_of(true, size if isinstance(size, int) else round(size * len(true)))
            result[f"{group} {name}"] = rank_correlations(some[best], true[best])
        result["precision"][group] = precision_at_top(some, true, PRECISION_SHARE)
    result["found"] = {name: found_within(truth, scores, ties, limit) for name, limit in BUDGETS.items()}
    return result


def groups(truth: Truth) -> dict[str, IntArray]:
    """Return the rows of the truth that each group has: one for each distinct network, then all of them."""
    return {"distinct": truth.distinct, "all": np.arange(len(truth.paths))}


def correlations(truth: Truth, scores: Numbers) -> dict[str, Any]:
    """Return the rank correlations with the truth over distinct networks and over all paths."""
    return {group: rank_correlations(scores[rows], truth.accuracies[rows]) for group, rows in groups(truth).items()}


def found_within(truth: Truth, scores: Numbers, ties: Numbers | None, limit: int | None) -> dict[str, Any]:
    """Return the network that a search of all paths would choose, and its true rank among the distinct networks within the limit.

    If several paths have equal scores, the search might choose any of them, so the numbers are means.
    """
    feasible = np.flatnonzero(truth.macs <= limit) if limit is not None else np.arange(len(truth.paths))
    chosen = feasible[scores[feasible] == scores[feasible].max()]
    if ties is not None:
        losses = np.nan_to_num(ties[chosen], nan=np.inf)
        chosen = chosen[losses == losses.min()]
    true = truth.accuracies
    networks = np.unique(truth.network[feasible])
    return {
        "path": compact(truth.paths[chosen[0]], truth.space),
        "accuracy": float(true[chosen].mean()),
        "rank": 1 + float((true[networks] > true[chosen, None]).sum(1).mean()),
        "of": len(networks),
        "behind_best": float(true[feasible].max() - true[chosen].mean()),
        "macs": float(truth.macs[chosen].mean()),
    }


def reference_rankings(truth: Truth, untrained: Sequence[Done] = ()) -> dict[str, dict[str, Any]]:
    """Return the measures of reference rankings: those that need no supernet, and two that use the truth."""
    found = {name: measures(truth, scores) for name, scores in truth.trivial_rankings().items()}
    if untrained:
        found[UNTRAINED] = _mean([_untrained_measures(truth, part) for part in untrained])
    found["additive (truth)"] = measures(truth, truth.additive_model())
    found["perfect"] = _mean([measures(truth, truth.perfect_predictor(draw)) for draw in range(DRAWS)])
    return found


def _untrained_measures(truth: Truth, part: Done) -> dict[str, Any]:
    """Return the measures of untrained networks, over the paths whose network has a score."""
    known = {
        tuple(path): float(score)
        for path, score in zip(part.arrays["networks"].tolist(), part.arrays["scores"], strict=True)
    }
    forms = [canonical(path, truth.space) for path in truth.paths.tolist()]
    rows = np.array([i for i, form in enumerate(forms) if form in known])
    return measures(truth.only(rows), np.array([known[forms[i]] for i in rows]))


def macro_study(truth: Truth, parts: Sequence[Done], settings: dict[str, Any]) -> Study:
    """Return the study: the results of all parts with tables and charts."""
    untrained = [part for part in parts if part.settings["method"] == UNTRAINED]
    done = [part for part in parts if part.settings["method"] != UNTRAINED]
    rows = [_part_row(truth, part) for part in done]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    by_method = {method: [row for row in rows if row["method"] == method] for method in methods}
    results = {
        "distinct": len(truth.distinct),
        "paths": len(truth.paths),
        "best": {"path": compact(truth.paths[best := best_of(truth.accuracies, 1)[0]], truth.space),
                 "accuracy": float(truth.accuracies[best])},
        "scored": any(additive_share(part) for part in done),
        "references": reference_rankings(truth, untrained),
        "untrained": [_untrained_row(truth, part) for part in untrained],
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
        lead=_lead(truth, done, settings),
        settings=settings,
        results=results,
        tables=[
            summary_table(results),
            correlation_table(results),
            found_table(results),
            cost_table(results),
            *more_tables(results),
        ],
        draw=partial(_draw, truth, done, results),
        parts=parts,
    )


def _lead(truth: Truth, done: Sequence[Done], settings: dict[str, Any]) -> str:
    sentences = [
        f"Supernets trained on CIFAR-10 rank {len(truth.distinct):,} distinct networks ({len(truth.paths):,} of "
        f"{truth.space.size:,} paths) of the macro space on validation images.",
        TRUTH,
        "A supernet is worth its cost if it ranks better than a count of layers and than untrained networks.",
    ]
    if shares := sorted({share for part in done if (share := additive_share(part))}):
        parts = " or ".join(f"{share:.0%}" for share in shares)
        sentences.append(
            f"Paths are ranked by a score, as in a search with experimental.additive: {parts} of it is an additive model fitted to the "
            "accuracies on the supernet, and the rest is the accuracy itself. The score does not use the truth."
        )
    if snapshots := sorted(
        {count for part in done if (count := part.settings["config"]["experimental"].get("snapshots", 1)) > 1}
    ):
        sentences.append(f"Accuracies are means over {' or '.join(map(str, snapshots))} snapshots of a training.")
    if settings.get("preset") in ("cifar10", "cifar10-tuned"):
        sentences.append(TUNED)
    return " ".join(sentences)


def _untrained_row(truth: Truth, part: Done) -> dict[str, Any]:
    found = _untrained_measures(truth, part)
    kept = {scope: found[scope] for scope in SCOPES}
    return {"seed": part.settings["config"]["seed"], **kept, "networks": len(part.arrays["scores"]),
            "images": part.result["images"], "seconds": part.seconds, "machine": part.machine}  # fmt: skip


def _is_greedy(method: str) -> bool:
    """Return whether a method is greedy, with the whole cost or with a share of it."""
    return method.startswith("greedy")


def _draw(truth: Truth, done: list[Done], results: dict[str, Any]) -> list[Panel]:
    from greedynas.studies.macro.charts import macro_panels

    return macro_panels(truth, done, results)


def _part_row(truth: Truth, part: Done) -> dict[str, Any]:
    """Return the row of a supernet: measures in the first mode, in all modes, by loss and during training, and its
    cost."""
    modes = part.settings["bn"]
    by_loss = {mode: part.arrays[f"{mode}_loss"] for mode in modes}
    accuracies = part.arrays[f"{modes[0]}_accuracy"]
    ranked = {mode: measures(truth, scores_of(truth, part, f"{mode}_accuracy"), by_loss[mode]) for mode in modes}
    kept = ("max_epochs", "epochs", "stopped", "optimization_images", "evaluation_images", "corrected_images")
    return {
        "method": part.settings["method"],
        "seed": part.settings["config"]["seed"],
        **ranked[modes[0]],
        "mean_accuracy": float(accuracies.mean()),
        "best_accuracy": float(accuracies.max()),
        "modes": {mode: {group: ranked[mode][group] for group in GROUPS} for mode in modes},
        "by_loss": correlations(truth, -by_loss[modes[0]]),
        # The two parts of a score, each alone.
        "by_accuracy": measures(truth, accuracies, by_loss[modes[0]]),
        "by_additive": measures(truth, additive_model(truth.paths, accuracies), by_loss[modes[0]]),
        "moments": [
            {**moment, **correlations(truth, scores_of(truth, part, f"step{moment['step']}_accuracy"))}
            for moment in part.result["moments"]
        ],
        **{key: part.result[key] for key in kept},
        "train_seconds": part.result["seconds"],
        "rank_seconds": part.result["rank_seconds"][modes[0]],
        "machine": part.machine,
    }


def mixed_score(truth: Truth, accuracies: NDArray[Any], share: float) -> NDArray[np.float64]:
    """Return the scores by which a search would rank: the accuracies, or a mix with an additive model."""
    score = hooks_of({"additive": share} if share else {}).score
    accuracies = np.asarray(accuracies, float)
    return accuracies if score is None else score(list(map(tuple, truth.paths)), accuracies)


def additive_share(part: Done) -> float:
    """Return the share of the additive model in the score (`experimental.additive`)."""
    return float(part.settings["config"]["experimental"].get("additive", 0.0))


def scores_of(truth: Truth, part: Done, name: str) -> Numbers:
    """Return the scores by which a search of all paths would choose."""
    return mixed_score(truth, part.arrays[name], additive_share(part))


def flat(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row that can be averaged over seeds, by dotted name."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": number for inner, number in flat(value).items()}
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key != "seed":
            found[key] = float(value)
    return found


def summarised(rows: list[dict[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """Return the mean and 95% interval over seeds of every number that all rows have."""
    numbers = [flat(row) for row in rows]
    return {
        key: mean_interval([row[key] for row in numbers]) for key in numbers[0] if all(key in row for row in numbers)
    }


def paired(ours: list[dict[str, Any]], rivals: list[dict[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """Return the mean and 95% interval of the differences greedy − rival, paired by seed."""
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


def summary_table(results: dict[str, Any]) -> Table:
    """Return the table of Kendall's τ-b by the score, by each of its two parts, and by rankings without a supernet."""
    chosen = "score" if results["scored"] else "accuracy"
    columns = {"by_accuracy.distinct.tau_b": "networks: accuracy alone"} if results["scored"] else {}
    columns |= {
        "by_additive.distinct.tau_b": "networks: additive model alone",
        "distinct.tau_b": f"networks: {chosen}",
        "all.tau_b": f"paths: {chosen}",
        "distinct top 10%.tau_b": f"top 10% networks: {chosen}",
        "all top 10%.tau_b": f"top 10% paths: {chosen}",
    }
    rows = [
        [method, *(with_interval(summary.get(key)) for key in columns)]
        for method, summary in results["methods"].items()
    ]
    for name, reference in results["references"].items():
        known = {f"{scope}.tau_b": _three(reference[scope]["tau_b"]) for scope in SCOPES}
        rows.append([name, *(known.get(key, "") for key in columns)])
    return Table(
        ["", *columns.values()],
        rows,
        title="Kendall τ-b with the ground truth",
        note=f"Mean over seeds ± half the 95% interval. Networks: {results['distinct']:,} distinct ones, each by its canonical path; "
        f"paths: all {results['paths']:,}. {_ranked_by(results)}{_explained(results)}",
    )


def _ranked_by(results: dict[str, Any]) -> str:
    if results["scored"]:
        return "Score: a mix of the accuracy on the supernet and an additive model fitted to it, which are also shown separately. "
    return "Additive model: one number for each op of each layer, fitted to the accuracies on the supernet. "


def _explained(results: dict[str, Any]) -> str:
    """Return the explanation of the reference rankings."""
    untrained = ""
    if rows := results["untrained"]:
        summary = mean_interval([row["distinct"]["tau_b"] for row in rows])
        spread = "" if summary["low"] is None else f", ± {(summary['high'] - summary['low']) / 2:.3f} over networks"  # type: ignore[operator]
        untrained = (
            f"NWOT: untrained networks on {rows[0]['images']} images (Mellor et al., 2021), {rows[0]['networks']:,} networks, "
            f"{len(rows)} seed{'s' if len(rows) > 1 else ''}{spread}. "
        )
    return (
        "Non-ID ops: by the number of ops that are not identities. "
        + untrained
        + "Additive (truth): one number for each op of each layer, fitted to the truth. Perfect: a predictor as uncertain as the "
        "truth, which is a mean of three trainings."
    )


def correlation_table(results: dict[str, Any]) -> Table:
    rows = []
    for scope, name in SCOPES.items():
        for key, coefficient in COEFFICIENTS.items():
            cells = [with_interval(summary.get(f"{scope}.{key}")) for summary in results["methods"].values()]
            known = [_three(reference[scope][key]) for reference in results["references"].values()]
            rows.append([f"{coefficient}, {name}", *cells, *known])
    for group, name in GROUPS.items():
        cells = [with_interval(summary[f"precision.{group}"]) for summary in results["methods"].values()]
        known = [_three(reference["precision"][group]) for reference in results["references"].values()]
        rows.append([f"precision, top {PRECISION_SHARE:.0%} {name}", *cells, *known])
    return Table(
        ["", *results["methods"], *results["references"]],
        rows,
        title="Agreement with the ground truth" + (", by the score" if results["scored"] else ""),
        note=f"As above; top: by the truth. Seeds: {_seeds(results)}.",
    )


def found_table(results: dict[str, Any]) -> Table:
    rows = []
    for name, limit in BUDGETS.items():
        of = next(iter(results["references"].values()))["found"][name]["of"]
        for key, label, digits in (("accuracy", "accuracy", 2), ("behind_best", "behind best", 2), ("rank", f"rank of {of:,}", 1)):  # fmt: skip
            cells = [
                with_interval(summary.get(f"found.{name}.{key}"), digits) for summary in results["methods"].values()
            ]
            known = [f"{reference['found'][name][key]:.{digits}f}" for reference in results["references"].values()]
            rows.append([f"{'no limit' if limit is None else f'≤ {name} FLOPs'}: {label}", *cells, *known])
    best = results["best"]
    return Table(
        ["", *results["methods"], *results["references"]],
        rows,
        title="The network that would be found",
        note=f"The path that ranks first; accuracy and rank (among distinct networks) are those of the ground truth, in which "
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
    return make_table(columns, title="Cost", note="Means over seeds; corrected: an evaluated image counts 1/3.33.")


def more_tables(results: dict[str, Any]) -> list[Table]:
    """Return the tables of differences, BatchNorm modes and moments, if the study has any."""
    tables = []
    keys = {"distinct.tau_b": "τ-b, networks", "all.tau_b": "τ-b, paths",
            "distinct top 10%.tau_b": "τ-b, top 10% networks", "all top 10%.tau_b": "τ-b, top 10% paths",
            "precision.distinct": "precision, networks", "found.unlimited.accuracy": "found, no limit",
            "found.60M.accuracy": "≤ 60M FLOPs", "found.50M.accuracy": "≤ 50M FLOPs"}  # fmt: skip
    differences = [found for found in results["differences"] if found.get("distinct.tau_b", {"n": 0})["n"] > 1]
    if differences:
        rows = [[f"{one['ours']} − {one['theirs']}", *(_signed(one.get(key)) for key in keys)] for one in differences]
        note = (
            f"Paired by seed: mean and 95% interval (Student's t, n = {differences[0]['distinct.tau_b']['n']}). Found: points of true "
            f"accuracy. Of {len(differences) * len(keys)} intervals, one in twenty would exclude zero by chance."
        )
        tables.append(Table(["", *keys.values()], rows, title="Greedy against its rivals", note=note))
    for by, title, note in ALONE:
        alone = {f"{by}.{key}": name for key, name in keys.items()}
        if by == "by_accuracy" and not results["scored"]:
            continue  # the other tables already rank by accuracy
        rows = [
            [method, *(with_interval(found.get(key)) for key in alone)] for method, found in results["methods"].items()
        ]
        rows += [[f"{one['ours']} − {one['theirs']}", *(_signed(one.get(key)) for key in alone)] for one in differences]
        tables.append(Table(["", *alone.values()], rows, title=title, note=note))
    both = {
        f"{group}.{key}": f"{label}, {name}" for group, name in GROUPS.items() for key, label in COEFFICIENTS.items()
    }
    modes = list(dict.fromkeys(mode for row in results["parts"] for mode in row["modes"]))
    if len(modes) > 1:
        rows = [
            [f"{method}, {mode}", *(with_interval(summary.get(f"modes.{mode}.{key}")) for key in both)]
            for method, summary in results["methods"].items()
            for mode in modes
        ]
        tables.append(Table(["", *both.values()], rows, title="BatchNorm statistics for ranking"))
    if any(row["moments"] for row in results["parts"]):
        rows = [
            [
                f"{row['method']}-{row['seed']}",
                f"{moment['epoch']:.1f}",
                *(_three(moment[group]["tau_b"]) for group in GROUPS),
            ]
            for row in results["parts"]
            for moment in (*row["moments"], {"epoch": row["epochs"], **{group: row[group] for group in GROUPS}})
        ]
        columns = ["supernet", "epoch", *(f"τ-b, {name}" for name in GROUPS.values())]
        tables.append(Table(columns, rows, title="During training"))
    return tables


def with_interval(summary: dict[str, Any] | None, digits: int = 3) -> str:
    """Format a mean and half of its interval, such as `0.802 ± 0.011`."""
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
    """Return the title: the τ-b of each method's accuracies over distinct networks, and those of the references."""
    alone = {method: found.get("by_accuracy.distinct.tau_b") for method, found in results["methods"].items()}
    found = sorted(((tau["mean"], method) for method, tau in alone.items() if tau), reverse=True)
    ranked = ", ".join(f"{method} {tau:.3f}" for tau, method in found) or "nothing could be ranked"
    by = " by supernet accuracy" if results["scored"] else ""
    references = {"untrained networks": UNTRAINED, "counting layers": "non-ID ops"}
    known = [
        f"{label} {results['references'][name]['distinct']['tau_b']:.3f}"
        for label, name in references.items()
        if name in results["references"]
    ]
    return f"Kendall τ-b over {results['distinct']:,} networks{by}: {ranked}; {', '.join(known)}"


def _seeds(results: dict[str, Any]) -> str:
    return ", ".join(f"{method} {found['corrected_images']['n']}" for method, found in results["methods"].items())


def _three(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _mean(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of measures with the same keys; text is taken from the first one."""
    first = found[0]
    result: dict[str, Any] = {}
    for key, value in first.items():
        if isinstance(value, dict):
            result[key] = _mean([one[key] for one in found])
        else:
            result[key] = value if isinstance(value, str) else float(np.mean([one[key] for one in found]))
    return result
