"""Measure how a score that is partly an additive model (`search.additive`) ranks, on the tuning trainings since the
eighth round.

    python benchmarks/scripts/macro_additive.py nas-bench-macro_cifar10.json > additive.txt

Reads the data of the tuning rounds (`benchmarks/records/tuning.tar.xz`). The score is computed from the mean accuracies
over the later two thirds of the moments of each training. Prints first the mean over all trainings that rank at 0.66 or
more by accuracy (tau-b, and the true accuracy of the best 20 paths, by share); then the networks that searches find on
the stopped records of greedy (by evolution and at random, under three limits, chosen by the score of the evaluated
paths); and last each training at a share of one half.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from records import tuning_data

from greedynas.experimental.additive import blended
from greedynas.spaces.budget import Budget
from greedynas.spaces.space import load_space
from greedynas.studies.correlations import rank_correlations
from greedynas.studies.macro.run import ranked_paths
from greedynas.studies.truth import Truth, read_truth

Numbers = NDArray[np.floating[Any]]
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
METHODS = {"g": "greedy", "u": "uniform", "f": "fair"}
LIMITS = {"no limit": Budget(), "60M": Budget(max_macs=60_000_000), "50M": Budget(max_macs=50_000_000)}


def method_of(name: str) -> str:
    split = name.split("_")[0].split("-")
    return METHODS[name[0]] + (", split" if {"split", "skip"} & set(split) else "")


def accuracies_in(file: Path) -> Iterator[tuple[str, Numbers]]:
    """Yield the name of every training in a file and its accuracies: a row for each moment, a column for each path."""
    with np.load(file) as found:  # the number of the 5,000 validation images that each path classified correctly
        for trial in sorted(found.files):
            yield trial, found[trial] / 5000


def late_mean(rows: Numbers) -> Numbers:
    """Return the mean over the last two thirds of the moments."""
    return rows[len(rows) // 3 :].mean(axis=0)


def tau(scores: Numbers, true: Numbers) -> float:
    return rank_correlations(scores, true)["tau_b"] or 0.0


def rows_of(scores: Numbers, truth: Truth) -> list[tuple[float, float]]:
    """Return tau-b and the true accuracy of the best 20 paths, by share."""
    found = []
    for share in SHARES:
        worth = blended(truth.paths, scores, share)
        best = np.argsort(-worth, kind="stable")[:20]
        found.append((tau(worth, truth.accuracies), float(truth.accuracies[best].mean())))
    return found


def searched(truth: Truth, supernets: list[Numbers]) -> None:
    """Print the true accuracy of the networks that a search finds, by share."""
    from greedynas.greedy.search import search  # needs pymoo

    places = {tuple(path): i for i, path in enumerate(truth.paths.tolist())}
    print(f"\nTrue accuracy of the network that a search finds; {len(supernets)} supernets, two searches each")
    print(f"{'':24s}" + "".join(f"{share:9.2f}" for share in SHARES))
    for label, budget in LIMITS.items():
        for searcher in ("evolution", "random"):
            found = []
            for accuracies in supernets:
                for seed in range(2):
                    result = search(
                        truth.space,
                        lambda paths, by=accuracies: [float(by[places[path]]) for path in paths],  # type: ignore[misc]
                        budget,
                        searcher=searcher,
                        seed=seed,
                    )
                    paths = [entry.path for entry in result.found]
                    measured = np.array([entry.accuracy for entry in result.found])
                    best = [places[paths[int(blended(paths, measured, share).argmax())]] for share in SHARES]
                    found.append(truth.accuracies[best])
            print(f"{label + ', ' + searcher:24s}" + "".join(f"{value:9.2f}" for value in np.mean(found, axis=0)))


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    with tuning_data() as folder:
        trainings = [one for file in sorted(folder.glob("macro/accuracies/*.npz")) for one in accuracies_in(file)]
        stopped = sorted(folder.glob("macro/*split/parts/greedy*.npz"))
        supernets = [np.load(file)["batch_accuracy"].astype(float) for file in stopped]
    by_method, lines = defaultdict(list), []
    for name, rows in trainings:
        few, mean = truth.only(ranked_paths(len(truth.paths), rows.shape[1])), late_mean(rows)
        if np.ptp(mean) == 0 or name.startswith("check"):
            continue
        found = rows_of(mean, few)
        along = " ".join(f"{tau(blended(few.paths, row, 0.5), few.accuracies):5.2f}" for row in rows if np.ptp(row))
        lines.append((method_of(name), found[2][0], f"{name:62s} {found[0][0]:6.3f} {found[2][0]:6.3f}  {along}"))
        if found[0][0] >= 0.66:
            by_method[method_of(name)].append(found)
    print(f"{'tau-b by share':24s}" + "".join(f"{share:9.2f}" for share in SHARES) + "   higher at 0.5")
    for method, found in by_method.items():
        taus = np.array(found)[:, :, 0]
        better = f"{(taus[:, 2] > taus[:, 0]).sum()} of {len(taus)}"
        print(f"{method:24s}" + "".join(f"{value:9.3f}" for value in taus.mean(0)) + f"   {better}")
    print("true accuracy of the best 20")
    for method, found in by_method.items():
        print(f"{method:24s}" + "".join(f"{value:9.2f}" for value in np.array(found)[:, :, 1].mean(0)))
    searched(truth, supernets)
    print("\nEach training: tau-b by accuracy, by score, and the score at each moment")
    for method in dict.fromkeys(method for method, _, _ in lines):
        print(method)
        for _, _, label in sorted((line for line in lines if line[0] == method), key=lambda line: -line[1]):
            print(f"  {label}")


if __name__ == "__main__":
    main()
