"""`greedynas study ablation`: the paper's Table 4, which switches filtering and the three uses of the pool on and off
(Net1 to Net6).

Net4 and Net6 are searches on the same supernet: one starts from random paths, the other from the pool.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from greedynas.reporting.cells import Table, make_table
from greedynas.runtime.text import count, milliseconds
from greedynas.spaces.paths import compact
from greedynas.studies.contests import (
    Options,
    Search,
    check_options,
    contest_config,
    make_search_task,
    network_of,
    supernet_part,
    top1_of,
    true_rank,
)
from greedynas.studies.macro.results import with_interval
from greedynas.studies.methods.results import NO_RETRAINING, spread_note, times
from greedynas.studies.methods.run import KEPT, QUICK, QUICK_SEEDS
from greedynas.studies.study import Done, Panel, Part, Study, publish, run_parts
from greedynas.studies.verdicts import NO_DIFFERENCE, Row, difference_text, differences, summaries


@dataclass(frozen=True)
class Net:
    """A row of Table 4."""

    filtering: bool
    sampling: bool  # from the pool
    initialisation: bool  # of the search, with the pool
    stopping: bool
    paper: float  # top-1 on ImageNet

    @property
    def supernet(self) -> str:
        used = {"filter": self.filtering, "pool": self.sampling, "stop": self.stopping}
        return "-".join(name for name, on in used.items() if on) or "plain"

    @property
    def search(self) -> Search:
        return Search("from-pool" if self.initialisation else "from-random", "evolution", self.initialisation)


NETS = {
    "Net1": Net(False, False, False, False, 74.31),
    "Net2": Net(True, False, False, False, 74.59),
    "Net3": Net(False, True, True, True, 74.48),
    "Net4": Net(True, True, False, True, 74.71),
    "Net5": Net(True, True, True, False, 74.84),
    "Net6": Net(True, True, True, True, 74.89),
}
PAIRS = {  # the paper's comparisons
    ("Net2", "Net1"): "filtering, without the pool",
    ("Net6", "Net3"): "filtering, with the pool",
    ("Net6", "Net2"): "the pool",
    ("Net6", "Net4"): "a search that starts from the pool",
    ("Net6", "Net5"): "stopping",
}
SWITCHES = {
    "filtering": "filter",
    "sampling": "sample",
    "initialisation": "start",
    "stopping": "stop",
}  # labels of the columns
BINS = 40  # of the histogram


def quick(options: Options) -> Options:
    """Return options of small sizes for the embedded images: minutes on a CPU, without meaningful results."""
    return replace(options, changes={**QUICK, **options.changes}, seeds=options.seeds[:QUICK_SEEDS], quick=True)


def study_ablation(folder: Path, options: Options, console: Console) -> dict[str, Any]:
    """Train, search and retrain the missing parts, then compare."""
    base = contest_config(options)
    truth = check_options(base, options)
    done = _run(folder, options, console)
    found = {(name, seed): _chosen(done, name, seed) for name in NETS for seed in options.seeds}
    wanted = [(network_of(one, base.space), seed, options.retrain_seeds) for (_, seed), one in found.items()]
    top1, retrained = top1_of(folder, wanted, base, options, truth, console)
    feasible = None if truth is None else make_search_task(truth.space, options).feasible(truth.paths)
    rows = []
    for (name, seed), chosen in found.items():
        network = network_of(chosen, base.space)
        row = _row(name, seed, chosen, done[f"{NETS[name].supernet}-{seed}"], top1[network, seed])
        row["network"] = compact(network, base.space)
        rows.append(row if truth is None or feasible is None else {**row, **true_rank(network, truth, feasible)})
    searched = _searched_accuracies(done, options.seeds)
    settings = {**options.as_json(), "space": base.space.name, "max_epochs": base.train.max_epochs}
    return publish(folder, ablation_study(rows, searched, settings, [*done.values(), *retrained]), console)


def _run(folder: Path, options: Options, console: Console) -> dict[str, Done]:
    """Compute all parts, Net5's last: if Net6's training never stopped early, Net5's would be identical and is not
    repeated."""
    parts = {part.name: part for part in ablation_parts(options)}
    twins = {f"{NETS['Net5'].supernet}-{seed}": f"{NETS['Net6'].supernet}-{seed}" for seed in options.seeds}
    done = run_parts(folder, [part for name, part in parts.items() if name not in twins], console, options.jobs)
    whole = {name for name, part in done.items() if part.result["epochs"] == part.result["max_epochs"]}
    same = {name: done[twin] for name, twin in twins.items() if twin in whole}
    return done | same | run_parts(folder, [parts[name] for name in twins if name not in same], console, options.jobs)


def ablation_parts(options: Options) -> list[Part]:
    """Return one part per supernet, with the searches of all its nets."""
    base = contest_config(options)
    parts = []
    for seed in options.seeds:
        for supernet in dict.fromkeys(net.supernet for net in NETS.values()):
            nets = [net for net in NETS.values() if net.supernet == supernet]
            switches = {"filtering": nets[0].filtering, "pool_sampling": nets[0].sampling, "stopping": nets[0].stopping}
            train = base.train.model_copy(update={"sampler": "greedy", **switches})
            config = base.model_copy(update={"train": train})
            parts.append(supernet_part(supernet, seed, config, [net.search for net in nets], options))
    return parts


def _chosen(done: Mapping[str, Done], name: str, seed: int) -> dict[str, Any]:
    net = NETS[name]
    return done[f"{net.supernet}-{seed}"].result["searches"][net.search.name]["chosen"]


def _row(name: str, seed: int, chosen: dict[str, Any], part: Done, retrainings: list[float]) -> Row:
    return {
        "contestant": name,
        "seed": seed,
        **{key: getattr(NETS[name], key) for key in SWITCHES},
        "ops": " ".join(chosen["ops"]),
        **{key: chosen[key] for key in ("macs", "params", "latency_ms", "supernet_accuracy") if key in chosen},
        "searched_accuracy": float(part.arrays[f"{NETS[name].search.name}_accuracy"].mean()),
        "top1": float(np.mean(retrainings)),
        "retrainings": retrainings,
        **{key: part.result[key] for key in KEPT},
        "machine": part.machine,
    }


def _searched_accuracies(done: Mapping[str, Done], seeds: tuple[int, ...]) -> dict[str, list[float]]:
    """Return the accuracies on the supernet of all paths that the searches of Net6 and Net4 evaluated."""
    found = {}
    for name in ("Net6", "Net4"):
        net = NETS[name]
        parts = [done[f"{net.supernet}-{seed}"] for seed in seeds]
        found[name] = np.concatenate([part.arrays[f"{net.search.name}_accuracy"] for part in parts]).tolist()
    return found


# Results


def ablation_study(
    rows: list[Row], searched: dict[str, list[float]], settings: dict[str, Any], parts: Sequence[Done]
) -> Study:
    results: dict[str, Any] = {
        "nets": summaries(rows),
        "differences": differences(rows, list(PAIRS)),
        "searched": differences([{**row, "searched_accuracy": 100 * row["searched_accuracy"]} for row in rows], [("Net6", "Net4")], "searched_accuracy"),
        "rows": rows,
    }  # fmt: skip
    shown = [one for one in results["differences"] if one["verdict"] in ("better", "worse")]
    verdicts = "; ".join(
        f"{PAIRS[one['ours'], one['theirs']]}: {one['verdict']} ({difference_text(one)})" for one in shown
    )
    note = f" No network was retrained: {NO_RETRAINING}." if settings["ground_truth"] else ""
    return Study(
        name="ablation",
        title=f"Ablation: {verdicts or _no_difference(results)}",
        lead="Path filtering, sampling from the pool, a search that starts from the pool, and stopping when the pool is steady are "
        f"switched on and off as in Table 4 of the paper.{note} Net1 is uniform sampling. A switch is said to help only if the "
        "95% interval of the paired differences supports it.",
        settings=settings,
        results=results,
        tables=[nets_table(results, settings), difference_table(results)],
        draw=partial(_panels, results, searched, settings),
        parts=parts,
    )


def _no_difference(results: dict[str, Any]) -> str:
    if all(one["n"] == 1 for one in results["differences"]):
        return "one seed cannot show a difference"
    if any(one["verdict"].startswith(("better", "worse")) for one in results["differences"]):
        return f"no difference that holds with all {len(PAIRS)} comparisons counted"
    return NO_DIFFERENCE


def nets_table(results: dict[str, Any], settings: dict[str, Any]) -> Table:
    found, names = results["nets"], list(results["nets"])

    def column(key: str, tell: Any) -> list[str]:
        return [tell(found[name][key]["mean"]) if key in found[name] else "" for name in names]

    switches = {label: ["✓" if getattr(NETS[name], key) else "–" for name in names] for key, label in SWITCHES.items()}
    top1 = "top-1 %, ground truth" if settings["ground_truth"] else "top-1 %"
    columns = {
        "": names,
        **switches,
        top1: [with_interval(found[name]["top1"], 2) for name in names],
        "the paper": [f"{NETS[name].paper:.2f}" for name in names],
        "true rank": [with_interval(found[name]["rank"], 1) if "rank" in found[name] else "" for name in names],
        "epochs": [_epochs_text(found[name]["epochs"]) for name in names],
        "corrected": column("corrected_images", count),
        "FLOPs": column("macs", count),
        "params": column("params", count),
        "latency": column("latency_ms", milliseconds),
        "on supernet": column("supernet_accuracy", lambda value: f"{100 * value:.2f}"),
        "all searched": column("searched_accuracy", lambda value: f"{100 * value:.2f}"),
    }
    early = ", ".join(
        f"{name} {sum(row['epochs'] < row['max_epochs'] for row in results['rows'] if row['contestant'] == name)}"
        for name in names
        if NETS[name].stopping
    )
    retrained = f"Nothing was retrained: {NO_RETRAINING}." if settings["ground_truth"] else f"Each network was retrained {times(settings['retrain_seeds'])}."  # fmt: skip
    note = (
        "Filter: path filtering. Sample: sampling from the pool. Start: the search starts from the pool. Stop: when the pool is steady. "
        f"{spread_note(found, settings['seeds'])} {retrained} Stopped before epoch {settings['max_epochs']} "
        f"(number of {len(settings['seeds'])} seeds): {early}. All searched: mean accuracy on the supernet of all paths that the "
        "search evaluated. The paper: ImageNet, 330M FLOPs, one network each."
    )
    return make_table(columns, title="Net1 to Net6 (Table 4)", note=note)


def _epochs_text(summary: dict[str, Any]) -> str:
    return f"{summary['mean']:g}" if summary["low"] == summary["high"] else with_interval(summary, 1)


def difference_table(results: dict[str, Any]) -> Table:
    rows = []
    for one in results["differences"]:
        ours, theirs = one["ours"], one["theirs"]
        paper = f"{NETS[ours].paper - NETS[theirs].paper:+.2f}"
        rows.append([f"{ours} − {theirs}: {PAIRS[ours, theirs]}", difference_text(one), paper, one["verdict"]])
    for one in results["searched"]:
        label = f"{one['ours']} − {one['theirs']}: accuracy on the supernet of all searched paths"
        rows.append([label, difference_text(one), "higher", one["verdict"]])
    note = (
        f"Points, paired by seed: mean and 95% interval (Student's t, n = {results['differences'][0]['n']}). With "
        f"{len(PAIRS)} comparisons, one in twenty would show a difference by chance."
    )
    return Table(
        ["", "difference", "the paper", "verdict"],
        rows,
        frozenset({"verdict"}),
        note=note,
        title="Effect of each switch",
    )


def _panels(results: dict[str, Any], searched: dict[str, list[float]], settings: dict[str, Any]) -> list[Panel]:
    import plotly.graph_objects as go

    from greedynas.reporting.charts import BLUE, GREEN, GREY, OCHRE, ORANGE, PURPLE, Chart, figure
    from greedynas.studies.methods.charts import POINTS, points_chart, values_of

    colours = dict(zip(NETS, (GREY, BLUE, GREEN, PURPLE, OCHRE, ORANGE), strict=True))
    paper = {name: [net.paper] for name, net in NETS.items()}
    ours = points_chart(values_of(results["rows"]), results["nets"], "top-1, %", POINTS, colours)  # fmt: skip
    everything = [value for values in searched.values() for value in values]
    bins = {"start": 100 * min(everything), "size": max(100 * (max(everything) - min(everything)) / BINS, 0.01)}
    bars = [
        go.Histogram(
            x=[round(100 * value, 2) for value in values], name=f"{name}: {label}", xbins=bins, histnorm="percent",
            opacity=0.6, marker={"color": colours[name]},
        )
        for (name, values), label in zip(searched.items(), ("from the pool", "from random paths"), strict=True)
    ]  # fmt: skip
    histogram = figure(*bars, height=360, barmode="overlay")
    histogram.update_xaxes(title_text="accuracy on the supernet, %")
    histogram.update_yaxes(title_text="% of the searched paths")
    means = "; ".join(f"{name} {100 * float(np.mean(values)):.2f}" for name, values in searched.items())
    return [
        Panel(
            "Table 4: top-1 of Net1 to Net6",
            {"The paper (ImageNet)": points_chart(paper, {}, "top-1, %", "One network each.", colours), "Ours": ours},
            f"Ours: {NO_RETRAINING}." if settings["ground_truth"] else "",
        ),
        Panel(
            "All searched paths, with and without the pool",
            {"Ours": Chart(histogram, f"Histograms of accuracy on the supernet; means: {means}.", f"Means: {means}. The same supernets.")},
            "The paper gives no numbers for its figure; it says that the accuracy of searched paths is higher on average "
            "if the search starts from the pool.",
        ),
    ]  # fmt: skip
