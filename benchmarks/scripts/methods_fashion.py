"""Compare all families of one-shot methods on the demo's space, under three budgets.

    python benchmarks/scripts/methods_fashion.py --out runs/methods-fashion | tee methods-fashion.txt

For each budget, `greedynas study methods` trains, searches or derives, and retrains; in addition, several random networks
within the budget are retrained for every seed in the same way. A method works under a budget if its network is more
accurate than the median of these, paired by seed, with a 95% interval above zero. All methods train for at most greedy's
corrected cost, with the demo's settings and their own papers' settings of architecture parameters: none is tuned.

Every training is a part with a file of its own, so that an interrupted command goes on where it stopped, also with more
seeds. `--quick` shows in minutes how it works.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from greedynas.jobs.resolving import load_config
from greedynas.runtime.rng import stream
from greedynas.spaces.budget import Budget, parse_count
from greedynas.spaces.paths import canonical, parse_path
from greedynas.studies.contests import retraining_part
from greedynas.studies.correlations import mean_interval
from greedynas.studies.methods.run import LEARNED, QUICK, MethodsOptions, study_methods
from greedynas.studies.study import run_parts

METHODS = ("uniform", "fair", "greedy", *LEARNED)
QUICKER = {**QUICK, "train.max_epochs": 2, "retrain.epochs": 1}


def compare(budget: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the study of one budget, and return a row for each method and seed, with the random networks beside it."""
    folder, console = arguments.out / budget, Console()
    limit = parse_count(budget)
    options = MethodsOptions(
        "fashion",
        QUICKER if arguments.quick else {},
        Budget(max_macs=limit),
        seeds=tuple(range(arguments.seeds)),
        methods=arguments.methods,
        searchers=("evolution",),
        jobs=arguments.jobs,
        keep=False,
    )
    found = study_methods(folder, options, console)["results"]
    config = load_config("fashion", options.changes)
    paths = np.array(list(itertools.product(*map(range, config.space.num_ops))))
    networks = sorted(
        {canonical(path, config.space) for path in paths[config.space.costs(paths).macs <= limit].tolist()}
    )
    parts = {}
    for seed in options.seeds:
        drawn = stream(seed, "random networks", limit).choice(len(networks), arguments.random, replace=False)
        for i in drawn.tolist():
            parts[seed, networks[i]] = retraining_part(networks[i], seed, 0, config, options)
    done = run_parts(folder, list(parts.values()), console, arguments.jobs)
    rivals: dict[int, list[float]] = {}
    for (seed, _), part in parts.items():
        rivals.setdefault(seed, []).append(100 * done[part.name].result["test_top1"])
    for row in found["rows"]:
        own = config.space.costs([parse_path(row["ops"], config.space)]).macs[0]
        row |= {"within": bool(own == row["macs"] <= limit), "median_random": statistics.median(rivals[row["seed"]])}
    return {
        "budget": limit,
        "networks": len(networks),
        "rows": found["rows"],
        "random": rivals,
        "steps": found["steps"],
    }


def show(result: dict[str, Any], seeds: int) -> None:
    """Print the table of one budget."""
    print(f"\nat most {result['budget']:,} multiply-adds, which {result['networks']} networks keep; {seeds} seeds")
    print(f"{'method':32} within  top-1   random  difference, 95% interval   corrected images  works")
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_method.setdefault(row["contestant"], []).append(row)
    for name, rows in by_method.items():
        found = mean_interval([row["top1"] - row["median_random"] for row in rows])
        low, high = found["low"], found["high"]
        interval = "" if low is None else f"[{low:+.2f}, {high:+.2f}]"
        works = "yes" if low is not None and low > 0 else "not shown"
        print(
            f"{name:32} {sum(row['within'] for row in rows)} of {len(rows)}  "
            f"{statistics.mean(row['top1'] for row in rows):6.2f}  {statistics.mean(row['median_random'] for row in rows):6.2f}  "
            f"{found['mean']:+6.2f} {interval:18}  {statistics.mean(row['corrected_images'] for row in rows):12,.0f}  {works}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the studies")
    parser.add_argument("--budgets", default="500K,800K,1M")
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")), default=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--random", type=int, default=5, help="random networks for each seed and budget")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small sizes, whose results mean nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for budget in arguments.budgets.split(","):
        results.append(compare(budget, arguments))
        show(results[-1], arguments.seeds)
        (arguments.out / "methods_fashion.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
