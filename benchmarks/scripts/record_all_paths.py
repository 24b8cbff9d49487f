"""Estimate how the supernets of `study methods` and `study ablation` rank all 6,561 paths, from those within 50M FLOPs.

    python benchmarks/scripts/record_all_paths.py nas-bench-macro_cifar10.json > all_paths.txt

The estimate is for pairs of supernets with the same seed, from the paths that both evaluated. Two numbers are computed
for each: τ-b with the truth over these paths, and τ-b over all paths of an additive model fitted to these. A linear fit
predicts from them the τ-b over all paths, by accuracy and by score (half additive model). It is fitted, on the same
paths, to the supernets for which all values are known: those of the record of `study macro`, of the two stopped records
and of the first rivals (`benchmarks/records/tuning.md`), without collapsed ones.

To measure the error of such an estimate, the difference between every two groups of known supernets (a method of a
record) is predicted by a fit to the others.
"""

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from record_rankings import SEEDS, evaluated
from records import MACRO, tuning_data

from greedynas import load_space
from greedynas.experimental.additive import blended
from greedynas.studies.correlations import mean_interval, rank_correlations
from greedynas.studies.truth import Truth, read_truth

Floats = NDArray[np.float64]
LEARNED = 0.5  # τ-b over all paths, below which a supernet counts as collapsed
SHARE = 0.5  # search.additive of the preset
RECORDED = ("record uniform", "record greedy-0.61")  # over all paths, their order is reversed
PAIRS = [
    ("Net1", "uniform"),
    ("Net1", "uniform-E"),
    ("Net6", "Net1"),
    ("Net2", "Net1"),
    ("Net3", "Net1"),
    ("Net6", "Net2"),
]
PAIRS += [("greedy", rival) for rival in ("uniform", "uniform-E", "fair")]


def tau_b(scores: Floats, truth: Floats) -> float:
    return rank_correlations(scores, truth)["tau_b"] or 0.0


def seen_there(truth: Truth, paths: NDArray[np.int64], accuracies: Floats) -> list[float]:
    """Return a constant, τ-b over some paths (indices), and τ-b over all paths of an additive model fitted to these."""
    ops = np.asarray(truth.paths)
    design = np.column_stack([np.ones(len(ops)), ops == 1, ops == 2])
    model = design @ np.linalg.lstsq(design[paths], accuracies, rcond=None)[0]
    return [1.0, tau_b(accuracies, truth.accuracies[paths]), tau_b(model, truth.accuracies)]


def known_supernets(truth: Truth) -> tuple[NDArray[np.str_], list[Floats], Floats]:
    """Return group, accuracies, and τ-b of accuracies and score of each supernet that ranked all paths."""
    groups, rankings, whole = [], [], []
    with tuning_data() as folder:
        records = {"record": MACRO} | {name: folder / "macro" / name for name in ("split", "unsplit", "unstable")}
        parts = [
            (name, part.stem, np.load(part)["batch_accuracy"].astype(float))
            for name, record in records.items()
            for part in sorted(record.glob("parts/*.npz"))
            if not part.name.startswith("nwot-")  # untrained networks are not supernets
        ]
    for record, name, accuracies in parts:
        by_accuracy = tau_b(accuracies, truth.accuracies)
        if by_accuracy < LEARNED:
            print(f"left out: {record} {name}, τ-b {by_accuracy:.2f}")
            continue
        groups.append(f"{record} {name.rsplit('-', 1)[0]}")
        rankings.append(accuracies)
        whole.append([by_accuracy, tau_b(blended(truth.paths, accuracies, SHARE), truth.accuracies)])
    return np.array(groups), rankings, np.array(whole)


def fitted(seen: Floats, whole: Floats) -> Floats:
    return np.linalg.lstsq(seen, whole, rcond=None)[0]


def missed_differences(groups: NDArray[np.str_], seen: Floats, whole: Floats) -> Floats:
    """Return, for every two groups, the error of the difference of their means as predicted by a fit to the others."""
    missed = []
    for first, second in combinations(np.unique(groups), 2):
        weights = fitted(*(one[(groups != first) & (groups != second)] for one in (seen, whole)))
        errors = seen @ weights - whole
        missed.append(errors[groups == first].mean(0) - errors[groups == second].mean(0))
    return np.array(missed)


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    index = {tuple(path): place for place, path in enumerate(truth.paths)}
    groups, rankings, whole = known_supernets(truth)
    print(f"{len(groups)} supernets in {len(np.unique(groups))} groups whose rankings of all paths are known")
    for pair in PAIRS:
        estimates, missed, on_them = [], [], []
        for seed in SEEDS:
            found = [evaluated(name, seed) for name in pair]
            common = sorted(found[0].keys() & found[1].keys())
            paths = np.array([index[path] for path in common])
            seen = np.array([seen_there(truth, paths, accuracies[paths]) for accuracies in rankings])
            ours = np.array([seen_there(truth, paths, np.array([one[path] for path in common])) for one in found])
            estimates.append(ours @ fitted(seen, whole))
            missed.append(missed_differences(groups, seen, whole))
            on_them.append([seen[groups == group, 1].mean() for group in RECORDED])
        error = np.sqrt((np.mean(missed, axis=0) ** 2).mean(0))
        record = ", ".join(f"{group} {tau:.3f}" for group, tau in zip(RECORDED, np.mean(on_them, axis=0), strict=True))
        print(f"\n{pair[0]}, {pair[1]} (by accuracy on these paths alone: {record})")
        for column, what in enumerate(("accuracy", "score")):
            first, second = np.array(estimates)[:, :, column].T
            difference = mean_interval(list(first - second))
            interval = f"{difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"
            spread = f"{interval} over seeds; error of the estimate {error[column]:.3f}"
            print(f"  {what:10}{first.mean():.3f}, {second.mean():.3f}   {spread}")


if __name__ == "__main__":
    main()
