"""Where the rankings of tuned supernets are wrong: which layers that halve the resolution are skipped, and the order among the rest.

    python benchmarks/macro_groups.py nas-bench-macro_cifar10.json benchmarks/macro_accuracies_*.npz > benchmarks/macro_groups.txt

The files hold, for the trials of `macro_tuning.py`, how many of the 5,000 validation images each of the ranked paths (1,500, or 600 of
uniform and fair since the tenth round) had right, a row for each moment of the training. Paths are grouped by which of the layers 1, 3 and 6 (the
first ones of the three stages) are the identity. A line has tau-b with the accuracies of the last moment and with their mean over the last two thirds of the moments (the
rest of the line is about these), tau-b among the paths that skip none of the three layers, how far the paths that skip only one of
them are above or below the mean of all paths (in standard deviations), and the true accuracy of the best path and of the best 20.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from greedynas.space import load_space
from greedynas.studies.macro import ranked_paths
from greedynas.studies.truth import Truth, read_truth

FIRST = [0, 2, 5]  # layers that halve the resolution
HEADER = f"{'':46s} seed  last  mean  within    no 1   no 3   no 6    best    20"


def line(name: str, rows: NDArray[np.float64], truth: Truth) -> str:
    """One training: `rows` are accuracies of the paths at its moments."""
    ranked = truth.only(ranked_paths(len(truth.paths), rows.shape[1]))
    paths, true = np.array(ranked.paths), ranked.accuracies
    mean = rows[len(rows) // 3 :].mean(axis=0)
    there = paths[:, FIRST] > 0
    none_skipped = there.all(axis=1)
    only = [(there.sum(axis=1) == 2) & ~there[:, layer] for layer in range(3)]
    with np.errstate(divide="ignore", invalid="ignore"):  # all paths are alike where a training diverged
        away = " ".join(f"{(mean[group].mean() - mean.mean()) / mean.std():6.2f}" for group in only)
    order = np.argsort(-mean, kind="stable")
    title, _, seed = name.rpartition("_")
    taus = f"{tau(rows[-1], true):5.3f} {tau(mean, true):5.3f}   {tau(mean[none_skipped], true[none_skipped]):5.3f}"
    return f"{title:46s} {seed:>4s} {taus}  {away}   {true[order[0]]:5.2f} {true[order[:20]].mean():5.2f}"


def tau(scores: NDArray[np.float64], true: NDArray[np.float64]) -> float:
    return float(kendalltau(scores, true).statistic)


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    print(HEADER)
    print(line("the truth itself_", truth.only(ranked_paths(len(truth.paths), 1500)).accuracies[None] / 100, truth))
    for name in sys.argv[2:]:
        print(f"\n{name}")
        with np.load(name) as found:
            lines = [line(trial, found[trial] / 5000, truth) for trial in found.files]
        print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main()
