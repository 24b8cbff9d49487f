"""Results and tables of `study methods`, from the networks that the methods found."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from greedynas.reporting.cells import Table, make_table
from greedynas.runtime.text import count, milliseconds, size
from greedynas.studies.correlations import mean_interval, rank_correlations
from greedynas.studies.macro.results import with_interval
from greedynas.studies.methods.paper import NO_SUPERNET, PAPER_TOP1
from greedynas.studies.study import Done, Panel, Study
from greedynas.studies.verdicts import Row, difference_text, differences, sentence, summaries

PAPER_TABLE = [  # Table 1, and the row of Table 7 that it lacks
    ["Random Search (uniform, random)", "74.07", "321M", "69 ms", "3.6M", "147.6M", "–", "147.6M"],
    ["Uniform Sampling (uniform, evolution)", "74.50", "326M", "72 ms", "3.8M", "147.6M", "–", "147.6M"],
    ["FairNAS-C", "74.69", "321M", "75 ms", "4.4M", "184.5M", "–", "184.5M"],
    ["Random Search-E (uniform-E, random)", "73.88", "320M", "91 ms", "3.7M", "89.8M", "–", "89.8M"],
    ["Uniform Sampling-E (uniform-E, evolution)", "74.17", "320M", "94 ms", "3.6M", "89.8M", "–", "89.8M"],
    ["GreedyNAS ≤ 322M FLOPs (greedy, evolution)", "74.85", "320M", "89 ms", "3.8M", "56.6M", "110.4M", "89.7M"],
    ["GreedyNAS ≤ 80 ms (greedy, evolution)", "74.93", "324M", "78 ms", "4.1M", "56.6M", "110.4M", "89.7M"],
    ["greedy, random (Table 7)", "74.22", "321M", "–", "–", "56.6M", "110.4M", "89.7M"],
]
NO_RETRAINING = (
    "the ground truth (NAS-Bench-Macro, mean of three trainings from scratch, each with the highest test accuracy of its 50 epochs) "
    "replaces retraining"
)


def methods_study(
    rows: list[Row],
    sampled: list[dict[str, Any]],
    reference: dict[str, Any] | None,
    settings: dict[str, Any],
    parts: Sequence[Done],
    steps: dict[str, dict[str, Any]] | None = None,
) -> Study:
    results: dict[str, Any] = {
        "contestants": summaries(rows),
        "differences": differences(rows, pairs_of(rows)),
        "reference": reference,
        "rows": rows,
        "steps": steps or {},
    }
    if sampled:
        results["systematic"] = systematic_results(sampled)
    tables = [
        methods_table(results, settings),
        *step_tables(results),
        *difference_tables(results),
        *systematic_tables(results),
        paper_table(),
    ]
    note = "" if reference is None else f" No network was retrained: {NO_RETRAINING}."
    return Study(
        name="methods",
        title=_title(results),
        lead="Supernets of different methods are searched at random and by evolution, and the found networks are trained from scratch "
        f"in the same way.{note} A method is called better only if the 95% interval of the paired differences supports it.",
        settings=settings,
        results=results,
        tables=tables,
        draw=partial(_draw, results),
        parts=parts,
    )


def _draw(results: dict[str, Any]) -> list[Panel]:
    from greedynas.studies.methods.charts import methods_panels

    return methods_panels(results)


def pairs_of(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the compared pairs: greedy and each rival with the same searcher; evolution and random on each
    supernet."""
    derived = [row["contestant"] for row in rows if row["searcher"] == "derivation"]
    searched = [row for row in rows if row["searcher"] not in ("", "derivation")]
    methods = list(dict.fromkeys(row["method"] for row in searched))
    searchers = list(dict.fromkeys(row["searcher"] for row in searched))
    pairs = []
    if "greedy" in methods:
        rivals = [method for method in methods if method != "greedy"]
        pairs += [(f"greedy, {one}", f"{rival}, {one}") for one in reversed(searchers) for rival in rivals]
        if any(not row["searcher"] for row in rows):
            pairs += [(f"greedy, {searchers[-1]}", NO_SUPERNET)]
    if len(searchers) > 1:
        pairs += [(f"{method}, evolution", f"{method}, random") for method in methods]
    for one in dict.fromkeys(derived):
        pairs += [(f"greedy, {searchers[-1]}", one)] if "greedy" in methods else []
        pairs += [(one, NO_SUPERNET)] if any(not row["searcher"] for row in rows) else []
    return pairs


def systematic_results(sampled: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the accuracies of each supernet's sampled paths, and how well the supernet ranked them."""
    rows = []
    for one in sampled:
        correlations = rank_correlations(one["supernet_accuracy"], one["top1"])
        rows.append({**one, "contestant": one["method"], "mean": sum(one["top1"]) / len(one["top1"]), **correlations})
    methods = list(dict.fromkeys(one["method"] for one in sampled))
    keys = ("mean", "tau_b", "tau_a", "spearman")
    found = {}
    for method in methods:
        own = [row for row in rows if row["method"] == method]
        values = {key: [row[key] for row in own if row[key] is not None] for key in keys}
        found[method] = {key: mean_interval(numbers) for key, numbers in values.items() if numbers}
    pairs = [("greedy", rival) for rival in methods if rival != "greedy"] if "greedy" in methods else []
    return {"methods": found, "differences": differences(rows, pairs, "mean"), "supernets": rows}


# Tables


def methods_table(results: dict[str, Any], settings: dict[str, Any]) -> Table:
    found, reference = results["contestants"], results["reference"]
    names = list(found)

    def column(key: str, tell: Any) -> list[str]:
        return [tell(found[name][key]["mean"]) if key in found[name] else "" for name in names]

    top1 = "top-1 %" if reference is None else "top-1 %, ground truth"
    columns = {
        "supernet, searcher": names,
        top1: [with_interval(found[name]["top1"], 2) for name in names],
        "true rank": [with_interval(found[name].get("rank"), 1) if "rank" in found[name] else "" for name in names],
        "FLOPs": column("macs", count),
        "latency": column("latency_ms", milliseconds),
        "parameters": column("params", count),
        "#optimization": column("optimization_images", count),
        "#evaluation": column("evaluation_images", count),
        "corrected": column("corrected_images", count),
        "epochs": column("epochs", lambda value: f"{value:.4g}"),
        "on supernet": column("supernet_accuracy", lambda value: f"{100 * value:.2f}"),
        "the paper": [f"{PAPER_TOP1[name]:.2f}" if name in PAPER_TOP1 else "" for name in names],
    }
    return make_table(
        columns, title=f"Found networks, space {settings['space']} (Tables 1 and 7)", note=_note(results, settings)
    )


def step_tables(results: dict[str, Any]) -> list[Table]:
    """Return the measured memory and time of an update of each method, relative to a single path where there is one."""
    steps = results["steps"]
    if not steps:
        return []
    single = next((steps[name] for name in ("uniform", "greedy") if name in steps), None)

    def times_single(key: str) -> list[str]:
        return [f"{one[key] / single[key]:.2f}" if single else "" for one in steps.values()]

    columns = {
        "method": list(steps),
        "memory of an update": [size(round(one["step_memory"])) for one in steps.values()],
        "× single path": times_single("step_memory"),
        "weights": [size(one["weights"]) for one in steps.values()],
        "time of an update": [milliseconds(1000 * one["step_seconds"]) for one in steps.values()],
        "time × single path": times_single("step_seconds"),
    }
    one = next(iter(steps.values()))
    note = (
        f"Updates on {one['batch']} images of {one['image_size']} px, in the middle of a training: steps on architecture "
        "parameters and filterings are part of them. Memory: the tensors that autograd saves, at most at any time, mean over "
        "updates; weights and momentum not counted. Time: mean; it depends on the machine and on what else it does."
    )
    return [make_table(columns, title="Memory and time of an update (Table 2)", note=note)]


def _note(results: dict[str, Any], settings: dict[str, Any]) -> str:
    spread = spread_note(results["contestants"], settings["seeds"])
    reference = results["reference"]
    if reference is None:
        retrained = f"Each network was retrained from scratch {times(settings['retrain_seeds'])}."
    else:
        retrained = (
            f"Nothing was retrained: {NO_RETRAINING}. Of {reference['feasible']:,} distinct networks "
            f"({reference['feasible_paths']:,} paths) within the budget, the best, "
            f"{reference['best_path']}, has {reference['best']:.2f}, and the mean is {reference['mean']:.2f}."
        )
    return (
        f"{spread} {retrained} -E: trained at greedy's corrected cost (an evaluated image counts 1/3.33). Random network: "
        "feasible, drawn without a supernet. The paper: ImageNet, about 320M FLOPs, one network each; FairNAS-C with its own searcher."
    )


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def spread_note(contestants: dict[str, Any], seeds: Sequence[int]) -> str:
    """Return the explanation of ±."""
    if len(seeds) > 1:
        return f"Mean over {len(seeds)} seeds of supernets ± half the 95% interval (Student's t)."
    if any(found["top1"]["of"] == "retrainings" for found in contestants.values()):
        return "One supernet each: ± is half the 95% interval of retraining alone and does not cover other supernets."
    return "One supernet and one training each, so the spread is unknown."


def difference_tables(results: dict[str, Any]) -> list[Table]:
    found = results["differences"]
    if not found:
        return []
    rows = [
        [f"{one['ours']} − {one['theirs']}", difference_text(one), _paper_difference(one), one["verdict"]]
        for one in found
    ]
    note = (
        f"Top-1 points, paired by seed: mean and 95% interval (Student's t, n = {found[0]['n']}). With {len(found)} "
        "comparisons, one in twenty would show a difference by chance."
    )
    return [
        Table(["", "difference", "the paper", "verdict"], rows, frozenset({"verdict"}), note=note, title="Differences")
    ]


def _paper_difference(one: dict[str, Any]) -> str:
    if one["ours"] in PAPER_TOP1 and one["theirs"] in PAPER_TOP1:
        return f"{PAPER_TOP1[one['ours']] - PAPER_TOP1[one['theirs']]:+.2f}"
    return "–"


def systematic_tables(results: dict[str, Any]) -> list[Table]:
    if "systematic" not in results:
        return []
    found = results["systematic"]
    one = found["supernets"][0]
    by_rival = {difference["theirs"]: difference for difference in found["differences"]}
    rows = [
        [
            method,
            with_interval(summary["mean"], 2),
            *(with_interval(summary.get(key)) for key in ("tau_b", "tau_a", "spearman")),
            f"{difference_text(by_rival[method])}: {by_rival[method]['verdict']}" if method in by_rival else "–",
        ]
        for method, summary in found["methods"].items()
    ]
    searched = sorted({supernet["searched"] for supernet in found["supernets"]})
    searched_text = f"{searched[0]:,}" if len(searched) == 1 else f"{searched[0]:,} to {searched[-1]:,}"
    note = (
        f"Of {searched_text} paths that each {one['searcher']} search evaluated, {len(one['paths'])} at equal steps of the "
        "order by accuracy on the supernet. Rank correlations: supernet accuracy with top-1 over these paths. "
        f"Supernets per method: {found['methods'][one['method']]['mean']['n']}."
    )
    columns = ["supernet", "mean top-1 %", "τ-b", "τ-a", "Spearman", "greedy − this"]
    return [Table(columns, rows, frozenset({"greedy − this"}), note=note, title="Systematic sample of searched paths")]


def paper_table() -> Table:
    columns = ["method", "top-1 %", "FLOPs", "latency", "parameters", "#optimization", "#evaluation", "corrected"]
    return Table(
        columns, PAPER_TABLE, title="The paper's Tables 1 and 7 (ImageNet)", note="One network each, without a spread."
    )


def _title(results: dict[str, Any]) -> str:
    """Return the title: greedy's comparison at equal cost, or else another one of greedy's."""
    found = {(one["ours"], one["theirs"]): one for one in results["differences"]}
    for searcher in ("evolution", "random"):
        for rival in ("uniform-E", "uniform", "fair-E", "fair"):
            one = found.get((f"greedy, {searcher}", f"{rival}, {searcher}"))
            if one is not None:
                return sentence(one)[0].upper() + sentence(one)[1:]
    top1 = ", ".join(f"{name} {with_interval(one['top1'], 2)}%" for name, one in results["contestants"].items())
    return f"Found networks: {top1}"
