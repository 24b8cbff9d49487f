"""Rank the distinct networks of the record of `study macro`, by the score and by its two parts.

    python benchmarks/scripts/record_distinct.py nas-bench-macro_cifar10.json > distinct.txt

NAS-Bench-Macro trained 3,969 networks; the other 2,592 of the 6,561 paths are copies of their canonical path. This
script reads the recorded accuracies of all paths (`parts/` of the record, five seeds a method) and prints Kendall's τ-b
with the ground truth by three rankings: the score that the record quotes (half accuracy, half additive model), the
accuracy on the supernet alone, and the additive model alone. A distinct network is ranked by its canonical path; the
mean over all of its paths is printed as well. The last table compares the cost of the methods in images and in seconds.
All figures are means over seeds ± half the 95% interval (Student's t).
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from records import MACRO

from greedynas import load_space
from greedynas.experimental.additive import additive_model
from greedynas.studies.correlations import best_of, mean_interval, rank_correlations
from greedynas.studies.truth import Truth, read_truth

PARTS = MACRO / "parts"
SEEDS = range(400, 405)
METHODS = {"greedy": "greedy", "greedy 61%": "greedy-0.61", "uniform": "uniform", "fair": "fair"}
Numbers = NDArray[np.float64]
Ranking = Callable[[Truth, Numbers], Numbers]
RANKINGS: dict[str, Ranking] = {
    "score": lambda truth, accuracies: (accuracies + additive_model(truth.paths, accuracies)) / 2,
    "accuracy": lambda truth, accuracies: accuracies,
    "additive": lambda truth, accuracies: additive_model(truth.paths, accuracies),
}


def tau(scores: Numbers, true: Numbers) -> float:
    return rank_correlations(scores, true)["tau_b"] or 0.0


def of_best(scores: Numbers, true: Numbers, share: float) -> float:
    """Return τ-b among the truly best share."""
    best = best_of(true, round(share * len(true)))
    return tau(scores[best], true[best])


def columns(truth: Truth, scores: Numbers) -> dict[str, float]:
    """Return all printed measures of one ranking."""
    distinct, true = truth.distinct, truth.accuracies
    members = [np.flatnonzero(truth.network == network) for network in distinct]
    means = np.array([scores[paths].mean() for paths in members])
    return {
        "networks": tau(scores[distinct], true[distinct]),
        "mean of paths": tau(means, true[distinct]),
        "all paths": tau(scores, true),
        "top 10% networks": of_best(scores[distinct], true[distinct], 0.1),
        "top 10% paths": of_best(scores, true, 0.1),
    }


def with_spread(values: list[float]) -> str:
    found = mean_interval(values)
    return f"{found['mean']:.3f} ± {(found['high'] - found['low']) / 2:.3f}"  # type: ignore[operator]


def signed(values: list[float]) -> str:
    found = mean_interval(values)
    return f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    copies = len(truth.paths) - len(truth.distinct)
    print(
        f"{len(truth.paths):,} paths, {len(truth.distinct):,} distinct networks, {copies:,} copies; seeds {list(SEEDS)}\n"
    )
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for method, name in METHODS.items():
        for seed in SEEDS:
            accuracies = np.load(PARTS / f"{name}-{seed}.npz")["batch_accuracy"].astype(float)
            for ranking, scores in RANKINGS.items():
                found.setdefault((method, ranking), []).append(columns(truth, scores(truth, accuracies)))
    names = list(found["greedy", "score"][0])
    print(f"{'tau-b with the truth':22}" + "".join(f"{name:>18}" for name in names))
    for (method, ranking), rows in found.items():
        print(
            f"{method + ', ' + ranking:22}"
            + "".join(f"{with_spread([row[name] for row in rows]):>18}" for name in names)
        )
    print("\nDifferences, paired by seed: mean and 95% interval")
    print(f"{'':33}" + "".join(f"{name:>26}" for name in names))
    for ranking in RANKINGS:
        for ours in ("greedy", "greedy 61%"):
            for theirs in ("uniform", "fair"):
                pairs = list(zip(found[ours, ranking], found[theirs, ranking], strict=True))
                cells = [signed([mine[name] - other[name] for mine, other in pairs]) for name in names]
                print(f"{f'{ranking}: {ours} − {theirs}':33}" + "".join(f"{cell:>26}" for cell in cells))
    print("\nCost: means over seeds; shares are of uniform's")
    results = {
        method: [json.loads((PARTS / f"{name}-{seed}.json").read_text())["result"] for seed in SEEDS]
        for method, name in METHODS.items()
    }
    base = {key: np.mean([one[key] for one in results["uniform"]]) for key in ("corrected_images", "seconds")}
    for method, parts in results.items():
        images, seconds = (np.mean([one[key] for one in parts]) for key in ("corrected_images", "seconds"))
        print(
            f"{method:12} {images / 1e6:.2f}M corrected images ({images / base['corrected_images']:.0%}), "
            f"training took {seconds:.1f} s ({seconds / base['seconds']:.0%})"
        )


if __name__ == "__main__":
    main()
