"""Compare ways to train and search a supernet against a ground truth that was made on a CPU.

    python benchmarks/scripts/cpu_truth_training.py benchmarks/scripts/pebble.yaml truth.csv --seeds 10 --out rows.jsonl

`truth.csv` is what `cpu_truth.py --csv` writes. For every seed and sampler, one supernet is trained on all paths and one within
each budget (`train.limits`); each is searched by NSGA-II, with 40 evaluations (four generations of ten). On the supernets that are
trained within a budget, the search is repeated with each option: shifting, a second opinion, an additive model. Weights and
budgets were fixed before the first run. A row has the share of the pool that keeps the budget, the accuracy of the first
generation, and the true accuracy of what the search found. Rows that the file already has are not computed again.
"""

import argparse
import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from scipy import stats

import greedynas

SAMPLERS = ("greedy", "uniform")
BUDGETS = {"830K": 830_000, "1140K": 1_140_000, "1460K": 1_460_000}  # a quarter, half, three quarters of the networks
OPTIONS: dict[str, dict[str, float]] = {
    "shifting": {"shifting": 0.2},
    "second opinion": {"second_opinion": 0.25},
    "additive": {"additive": 0.5},
}
SEARCH = {"search.population": 10, "search.generations": 4, "search.tolerance": 0.0, "search.searcher": "evolution"}
Truth = dict[tuple[int, ...], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("space", type=Path)
    parser.add_argument("truth", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true", help="print the summary of the rows and train nothing")
    options = parser.parse_args()
    rows = read(options.out)
    if not options.show:
        torch.set_num_threads(1)
        done = {(row["seed"], row["sampler"], row["trained"]) for row in rows}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for sampler in SAMPLERS:
                for trained in ("all paths", *BUDGETS):
                    if (seed, sampler, trained) not in done:
                        new = list(measured(options, read_truth(options.truth), seed, sampler, trained))
                        with options.out.open("a") as file:
                            file.write("".join(json.dumps(row) + "\n" for row in new))
                        rows += new
    print(summary(rows))


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_truth(file: Path) -> Truth:
    """Return the mean accuracy of every path."""
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    return {tuple(map(int, row["path"])): float(np.mean([*map(float, row["test_acc_seeds"].split())])) for row in rows}


def measured(
    options: argparse.Namespace, truth: Truth, seed: int, sampler: str, trained: str
) -> Iterator[dict[str, Any]]:
    """Train a supernet, search it, and yield a row for every budget and option."""
    limits = {} if trained not in BUDGETS else {"train.limits": {"max_macs": BUDGETS[trained]}}
    changes = {"space": str(options.space), "seed": seed, "train.sampler": sampler, "train.max_epochs": options.epochs}
    with TemporaryDirectory() as folder:
        run = greedynas.train("fashion", Path(folder, "run"), changes={**changes, **limits, **SEARCH}, quiet=True)
        for budget in (trained,) if trained in BUDGETS else BUDGETS:
            for option, setting in {"": {}, **(OPTIONS if trained in BUDGETS else {})}.items():
                name = f"{budget}-{option.replace(' ', '-')}"
                own = with_experiments(run.folder, Path(folder, name), setting)
                found = greedynas.search_run(own, flops=str(BUDGETS[budget]), name=name, quiet=True)
                row = {"seed": seed, "sampler": sampler, "trained": trained, "budget": budget, "option": option}
                yield row | facts_of(found.searches[name], found, truth, BUDGETS[budget])


def with_experiments(run: Path, copy: Path, experiments: dict[str, float]) -> Path:
    """Return a copy of a run with other experiments, which are fixed when a run is started."""
    shutil.copytree(run, copy)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    (copy / "config.yaml").write_text(yaml.safe_dump({**config, "experimental": experiments}))
    return copy


def facts_of(search: Any, run: Any, truth: Truth, limit: int) -> dict[str, Any]:
    """Return what a search found, by the ground truth, and how good its first generation and the pool were."""
    space = run.config.space
    pool = [tuple(path) for path in run.pool]
    fits = [path for path in truth if space.costs([path]).macs[0] <= limit]
    first = [entry for entry in search.found if entry.generation == 0]
    accuracies = [entry.accuracy for entry in search.found]
    return {
        "pool_share": float(np.mean([space.costs([path]).macs[0] <= limit for path in pool])) if pool else None,
        "first_accuracy": float(np.mean([entry.accuracy for entry in first])),
        "first_truth": float(np.mean([truth[tuple(entry.path)] for entry in first])),
        "evaluated": len(accuracies),
        "found": list(search.chosen.path),
        "found_truth": truth[tuple(search.chosen.path)],
        "best_truth": max(truth[path] for path in fits),
        "mean_truth": float(np.mean([truth[path] for path in fits])),
        "tau_b": stats.kendalltau(accuracies, [truth[tuple(entry.path)] for entry in search.found]).statistic,
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the paired differences in the true accuracy of found networks, with 95% intervals over seeds."""
    lines = []
    by_key = {(row["seed"], row["sampler"], row["trained"], row["budget"], row["option"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    for sampler in SAMPLERS:
        for budget in [*BUDGETS, "all"]:
            budgets = list(BUDGETS) if budget == "all" else [budget]
            for option in ("budget-aware training", *OPTIONS):
                gains = []
                for seed in seeds:
                    pairs = [
                        (by_key.get((seed, sampler, one, one, "")), by_key.get((seed, sampler, "all paths", one, "")))
                        if option not in OPTIONS
                        else (by_key.get((seed, sampler, one, one, option)), by_key.get((seed, sampler, one, one, "")))
                        for one in budgets
                    ]
                    if all(new and old for new, old in pairs):
                        gains.append(np.mean([new["found_truth"] - old["found_truth"] for new, old in pairs]))
                lines.append(f"{sampler:8} {budget:6} {option:22} {interval(gains)}")
            for trained in ("all paths", "within"):
                chosen = [
                    row
                    for row in rows
                    if row["sampler"] == sampler
                    and row["budget"] in budgets
                    and not row["option"]
                    and (row["trained"] == "all paths") == (trained == "all paths")
                ]
                known = {
                    key: [row[key] for row in chosen if row[key] is not None]
                    for key in ("pool_share", "first_truth", "found_truth", "best_truth", "mean_truth", "tau_b")
                }
                means = {key: float(np.mean(values)) for key, values in known.items() if values}
                lines.append(
                    f"{sampler:8} {budget:6} {trained:22} "
                    + " ".join(f"{key} {value:.3f}" for key, value in means.items())
                )
    return "\n".join(lines)


def interval(gains: list[float]) -> str:
    """Return a mean difference in points with its 95% interval."""
    if len(gains) < 2:
        return f"n {len(gains)}"
    half = stats.t.ppf(0.975, len(gains) - 1) * np.std(gains, ddof=1) / len(gains) ** 0.5
    mean = np.mean(gains)
    return f"{mean:+.3f} points [{mean - half:+.3f}, {mean + half:+.3f}], n {len(gains)}"


if __name__ == "__main__":
    main()
