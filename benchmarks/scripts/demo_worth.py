"""Measure what the demo's search is worth, and how many paths of the pool its budget allows.

    python benchmarks/scripts/demo_worth.py --seeds 8 --runs runs/demos --out demo.json | tee demo.txt

Runs `greedynas demo` with several seeds (a finished demo is read, an interrupted one is resumed). The first table shows
how many paths of each pool are within a budget. The demo's budget is the smallest multiple of 100K that at least a
tenth of every pool satisfies, so it follows from the space and the pools, not from the found networks. The second table
has a row for each seed: the found network and a random one within the same budget, one training each.
"""

import argparse
import json
import math
import os
import platform
import resource
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from greedynas.jobs.demo import FLOPS, run_demo
from greedynas.reporting.facts import read_facts
from greedynas.reporting.worth import difference_error
from greedynas.spaces.budget import parse_count
from greedynas.spaces.paths import canonical
from greedynas.spaces.space import Space
from greedynas.stages.run import read_run_config

BUDGETS = range(500_000, 1_000_001, 100_000)


def feasible(space: Space, limit: int) -> tuple[int, int]:
    """Return how many paths are within the limit, and how many networks they are."""
    paths = np.array(list(product(*(range(ops) for ops in space.num_ops))))
    within = paths[space.costs(paths).macs <= limit]
    return len(within), len({canonical(path, space) for path in within.tolist()})


def run_one(seed: int, folder: Path) -> dict[str, Any]:
    """Run a demo, or resume it; return its row of the record."""
    cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    start = time.perf_counter()
    fresh = not folder.exists()
    run_demo(folder, Console(quiet=True), {"seed": seed})
    seconds, cpu = time.perf_counter() - start, sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - cpu
    facts = read_facts(folder)
    search, space = facts.search_of(facts.chosen), facts.space
    [rival] = [model for model in facts.models if model.arch.within is not None]
    assert facts.chosen is not None
    assert facts.chosen.test is not None
    assert rival.test is not None
    assert search is not None
    chosen = next(entry for entry in search.found if entry.path == facts.chosen.arch.path)
    best = max(search.found, key=lambda entry: entry.accuracy)  # the first of equal ones
    pool = space.costs([entry.path for entry in facts.pool]).macs
    difference = facts.chosen.test.top1 - rival.test.top1
    return {
        "seed": seed,
        "pool": {str(budget): int((pool <= budget).sum()) for budget in BUDGETS},
        "pool_size": len(pool),
        "from_pool": search.from_pool,
        "first_generation": sum(entry.generation == 0 for entry in search.found),
        "evaluated_paths": len(search.found),
        "evaluated_networks": facts.networks[search.name],
        "generation_of_best": best.generation,
        "best_accuracy": best.accuracy,
        "generation_of_found": chosen.generation,
        "supernet_accuracy": chosen.accuracy,
        "best_of_first_generation": max(entry.accuracy for entry in search.found if entry.generation == 0),
        "found": list(facts.chosen.arch.canonical_path or ()),
        "found_macs": facts.chosen.arch.macs,
        "found_top1": facts.chosen.test.top1,
        "random": list(rival.arch.canonical_path or ()),
        "random_macs": rival.arch.macs,
        "random_top1": rival.test.top1,
        "difference": difference,
        "standard_error": difference_error(facts.chosen.test, [rival.test]),
        **({"seconds": seconds, "cpu_seconds": cpu} if fresh else {}),
    }


def digits(path: list[int]) -> str:
    return "".join(map(str, path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--runs", type=Path, required=True, help="a folder for the run directories")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.runs.mkdir(parents=True, exist_ok=True)
    rows = [run_one(seed, arguments.runs / str(seed)) for seed in range(arguments.seeds)]
    config = read_run_config(arguments.runs / "0")
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, {arguments.threads} thread; torch {torch.__version__}"
    print(f"{machine}; seeds 0 to {arguments.seeds - 1}")
    print(f"\nmultiply-adds  paths  networks  of the {rows[0]['pool_size']} paths of each pool")
    counts = {budget: feasible(config.space, budget) for budget in BUDGETS}
    for budget, (paths, networks) in counts.items():
        within = "  ".join(f"{row['pool'][str(budget)]:2d}" for row in rows)
        print(f"{budget:13,}  {paths:5,}  {networks:8,}  {within}")
    paths, networks = counts[parse_count(FLOPS)]
    print(
        f"\nthe demo, {FLOPS}: {paths} paths, {networks} networks; found and random are test top-1, one training each"
    )
    print(
        "Generations count from 1. The found network is the cheapest that the validation images cannot tell from the best."
    )
    print("seed  pool in budget  first from pool  evaluated paths/networks  generation of best, found  ", end="")
    print("supernet: best of first, best, found    found           random          difference  standard error")
    for row in rows:
        print(
            f"{row['seed']:4d}  {row['pool'][str(parse_count(FLOPS))] / row['pool_size']:14.0%}  "
            f"{row['from_pool']:9d} of {row['first_generation']:2d}  {row['evaluated_paths']:16d}/{row['evaluated_networks']:<7d}  "
            f"{row['generation_of_best'] + 1:18d}, {row['generation_of_found'] + 1:5d}  "
            f"{row['best_of_first_generation']:23.3f}  {row['best_accuracy']:.3f}  {row['supernet_accuracy']:5.3f}    "
            f"{digits(row['found'])} {row['found_top1']:.4f}  {digits(row['random'])} {row['random_top1']:.4f}  "
            f"{100 * row['difference']:+10.2f}  {100 * row['standard_error']:14.2f}"
        )
    differences = [100 * row["difference"] for row in rows]
    mean, spread = statistics.mean(differences), statistics.stdev(differences)
    error = spread / math.sqrt(len(rows))
    print(
        f"\nfound − random: mean {mean:+.2f} points, standard deviation {spread:.2f}, standard error {error:.2f}, ",
        end="",
    )
    print(f"n = {len(rows)}; found better in {sum(value > 0 for value in differences)}, worse in ", end="")
    print(f"{sum(value < 0 for value in differences)}")
    for name in ("found", "random"):
        values = [row[f"{name}_top1"] for row in rows]
        print(f"{name}: mean {statistics.mean(values):.4f}, from {min(values):.4f} to {max(values):.4f}")
    timed = [row["cpu_seconds"] for row in rows if "cpu_seconds" in row]
    if timed:
        print(f"CPU seconds of a demo: {min(timed):.0f} to {max(timed):.0f} (n = {len(timed)})")
    if arguments.out is not None:
        record = {"machine": machine, "budget": FLOPS, "paths": paths, "networks": networks, "demos": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
