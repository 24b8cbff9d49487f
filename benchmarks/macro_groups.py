"""Where the rankings of tuned supernets are wrong: which layers are skipped, and the order among the rest.

    python benchmarks/macro_groups.py nas-bench-macro_cifar10.json benchmarks/macro_accuracies_*.npz \
        benchmarks/macro_{unsplit,split}/parts/*.npz > benchmarks/macro_groups.txt

The first files hold, for the trials of `macro_tuning.py`, how many of the 5,000 validation images each of the ranked paths (1,500, or
600 of uniform and fair since the tenth round) had right, a row for each moment of the training; the others are parts of `greedynas
study macro`. A line has tau-b with the accuracies of the last moment and with their mean over the last two thirds of the moments (the
rest of the line is about these); tau-b among the paths that skip none of the layers 1, 3 and 6 (the first ones of the three stages);
how far the paths that skip only one of them are above or below the mean of all paths (in standard deviations); the true accuracy of
the best path and of the best 20. Then eight groups of paths by which of the first three layers are there: tau-b if each group stood
where the truth has it, and how far above its place it stands (in normal scores).
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau, norm, rankdata

from greedynas.spaces.space import load_space
from greedynas.studies.macro.run import ranked_paths
from greedynas.studies.truth import Truth, read_truth

Numbers = NDArray[np.floating[Any]]
FIRST = [0, 2, 5]  # layers that halve the resolution
EARLY = ("000", "100", "010", "110", "001", "101", "011", "111")  # layer 1 first; 0: skipped
HEADER = f"{'':54s} seed  last  mean  within    no 1   no 3   no 6    best    20   placed   " + "   ".join(EARLY)


def line(name: str, rows: Numbers, truth: Truth) -> str:
    """One training: `rows` are accuracies of the paths at its moments."""
    ranked = truth.only(ranked_paths(len(truth.paths), rows.shape[1]))
    paths, true = np.array(ranked.paths), ranked.accuracies
    mean = late_mean(rows)
    there = paths[:, FIRST] > 0
    none_skipped = there.all(axis=1)
    only = [(there.sum(axis=1) == 2) & ~there[:, layer] for layer in range(3)]
    with np.errstate(divide="ignore", invalid="ignore"):  # all paths are alike where a training diverged
        away = " ".join(f"{(mean[group].mean() - mean.mean()) / mean.std():6.2f}" for group in only)
    order = np.argsort(-mean, kind="stable")
    title, _, seed = name.rpartition("_")
    taus = f"{tau(rows[-1], true):5.3f} {tau(mean, true):5.3f}   {tau(mean[none_skipped], true[none_skipped]):5.3f}"
    found = f"{true[order[0]]:5.2f} {true[order[:20]].mean():5.2f}"
    return f"{title:54s} {seed:>4s} {taus}  {away}   {found}   {placed(mean, true, paths)}"


def placed(scores: Numbers, true: Numbers, paths: NDArray[np.int64]) -> str:
    """By which of the first three layers are there: tau-b if the groups stood in their true places, and how far off they are."""
    normal, normal_true = normal_scores(scores), normal_scores(true)
    group = (paths[:, :3] > 0) @ [1, 2, 4]
    off = np.array([(normal - normal_true)[group == number].mean() for number in range(len(EARLY))])
    return f"{tau(normal - off[group], true):5.3f}  " + " ".join(f"{value:5.2f}" for value in off)


def normal_scores(values: Numbers) -> Numbers:
    return norm.ppf((rankdata(values) - 0.5) / len(values))


def late_mean(rows: Numbers) -> Numbers:
    """Over the last two thirds of the moments."""
    return rows[len(rows) // 3 :].mean(axis=0)


def tau(scores: Numbers, true: Numbers) -> float:
    return float(kendalltau(scores, true).statistic)


def accuracies_in(file: str) -> Iterator[tuple[str, Numbers]]:
    """The name and the accuracies (moments, paths) of every training in a file of trials, or in a part of a study."""
    with np.load(file) as found:
        if "batch_accuracy" in found:  # a part: means over moments already
            method, _, seed = Path(file).stem.rpartition("-")
            yield f"{Path(file).parts[-3]}/{method}_{seed}", found["batch_accuracy"][None].astype(float)
        else:
            for trial in sorted(found.files):
                yield trial, found[trial] / 5000


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    print(HEADER)
    print(line("the truth itself_", truth.only(ranked_paths(len(truth.paths), 1500)).accuracies[None] / 100, truth))
    for file in sys.argv[2:]:
        for name, rows in accuracies_in(file):
            print(line(name, rows, truth))


if __name__ == "__main__":
    main()
