"""What the mean over several supernets would rank like: computed from rankings of single ones.

    python benchmarks/macro_ensembles.py nas-bench-macro_cifar10.json > benchmarks/macro_ensembles.txt

First the parts of two records of greedy that were stopped (6,561 paths, mean accuracies over five moments): means over all choices of n
seeds. A seed also decides which images are validation images. So then pairs of tuning trainings (1,500 paths): is the mean of two with
one seed, and with the same validation images, worth as much as that of two seeds? Last, uniform and fair: all tuning trainings of the
tenth to twelfth rounds above a tau-b of 0.66 (600 paths, various settings), which flatters them.
"""

import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from macro_groups import Numbers, accuracies_in, late_mean, tau

from greedynas.spaces.space import load_space
from greedynas.studies.macro.run import ranked_paths
from greedynas.studies.truth import Truth, read_truth

HERE = Path(__file__).parent
TUNED = ("eighth", "ninth", "tenth", "eleventh", "twelfth", "thirteenth")


def show(name: str, scores: Sequence[Numbers], sizes: Sequence[int], truth: Truth) -> None:
    """Means over all choices of so many: tau-b, the true accuracy of the best path and of the best 20."""
    true = truth.accuracies
    for size in sizes:
        found = []
        for chosen in combinations(scores, size):
            mean = np.mean(chosen, axis=0)
            order = np.argsort(-mean, kind="stable")
            found.append((tau(mean, true), true[order[0]], true[order[:20]].mean()))
        told = "{:5.3f}  {:5.2f}  {:5.2f}".format(*np.mean(found, axis=0))
        print(f"{name:34s} {size:2d} of {len(scores):2d}   {told}")


def tuned(method: str, paths: int, truth: Truth, least: float) -> list[tuple[str, Numbers]]:
    """Tuning trainings that rank at least so well."""
    files = [str(HERE / f"macro_accuracies_{name}.npz") for name in TUNED]
    found = [
        (name, late_mean(rows))
        for file in files
        for name, rows in accuracies_in(file)
        if name.startswith(method) and rows.shape[1] == paths
    ]
    return [(name, mean) for name, mean in found if np.ptp(mean) > 0 and tau(mean, truth.accuracies) > least]


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    print(f"{'':34s} supernets   tau   best     20")
    for folder in ("unsplit", "split"):
        for share in ("-", "-0.61-"):
            files = sorted((HERE / f"macro_{folder}" / "parts").glob(f"greedy{share}[0-9]??.npz"))
            scores = [rows[0] for file in files for _, rows in accuracies_in(str(file))]
            told = "" if share == "-" else ", 61% of the cost each"
            show(f"greedy, {folder}{told}", scores, range(1, len(scores) + 1), truth)

    few = truth.only(ranked_paths(len(truth.paths), 1500))
    trials = [
        trial for trial in tuned("g", 1500, few, 0.74) if not trial[0].rpartition("_")[0].endswith(("canon", "prev"))
    ]
    gains: dict[bool, list[float]] = {True: [], False: []}
    for (a, first), (b, second) in combinations(trials, 2):
        apart = (tau(first, few.accuracies) + tau(second, few.accuracies)) / 2
        together = tau(first / first.std() + second / second.std(), few.accuracies)
        gains[a.rpartition("_")[2] == b.rpartition("_")[2]].append(together - apart)
    print("\nWhat the mean of two tuned supernets of greedy gains over one of them, in tau-b")
    for same, values in gains.items():
        print(f"{'one seed' if same else 'two seeds':10s} {np.mean(values):6.4f}  ({len(values)} pairs)")

    few = truth.only(ranked_paths(len(truth.paths), 600))
    print(f"\n{'':34s} supernets   tau   best     20")
    for method in ("uniform", "fair"):
        scores = [mean / mean.std() for _, mean in tuned(method[0], 600, few, 0.66)]
        show(method, scores, (1, len(scores)), few)


if __name__ == "__main__":
    main()
