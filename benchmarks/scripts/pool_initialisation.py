"""Measure whether the candidate pool gives the search a better start: the paper's Figure 4 on a trained run.

    greedynas train fashion --out runs/fashion
    python benchmarks/scripts/pool_initialisation.py runs/fashion --flops 1M --seeds 10 --out pool.json | tee pool.txt

Prints the mean validation accuracy on the supernet of the first generation (50 feasible paths), from the pool and at
random, and of all 1,000 paths of the following search.
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np

from greedynas.greedy.search import search
from greedynas.greedy.validation import SupernetAccuracies
from greedynas.spaces.budget import Budget, parse_count
from greedynas.stages.run import Run
from greedynas.stages.trained_supernet import load_supernet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--flops", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with Run.open(arguments.run) as run:
        config = run.config()
        net, state, data, precision = load_supernet(run, config)
    evaluate = SupernetAccuracies(net, data, config.search, config.seed, precision)
    budget = Budget(max_macs=parse_count(arguments.flops))
    starts = {"pool": [path for path, _ in state.pool.best()], "random": []}
    record: dict[str, list[dict[str, float]]] = {name: [] for name in starts}
    for name, pool in starts.items():
        for seed in range(arguments.seeds):
            result = search(net.space, evaluate, budget, pool=pool, seed=seed)
            first = [entry.accuracy for entry in result.found if entry.generation == 0]
            everything = [entry.accuracy for entry in result.found]
            record[name].append(
                {
                    "from_pool": result.from_pool,
                    "first_generation": float(np.mean(first)),
                    "all_paths": float(np.mean(everything)),
                    "best": result.best.accuracy,
                }
            )
        means = {key: np.mean([row[key] for row in record[name]]) for key in record[name][0]}
        spread = np.std([row["first_generation"] for row in record[name]])
        print(
            f"{name:>6}: " + ", ".join(f"{key} {value:.4f}" for key, value in means.items()) + f" (±{spread:.4f} first)"
        )
    if arguments.out is not None:
        facts = {
            "run": config.name,
            "budget": budget.model_dump(exclude_none=True),
            "machine": platform.machine(),
            **record,
        }
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
