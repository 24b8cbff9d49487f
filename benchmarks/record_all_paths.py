"""What would the supernets of `study methods` and `study ablation` say of all 6,561 paths? Their searches saw those within 50M FLOPs.

    python benchmarks/record_all_paths.py nas-bench-macro_cifar10.json > benchmarks/record_all_paths.txt

An estimate. Of the supernets of all records of `study macro` (the stopped ones too, dead ones not) the ranking of all paths is known. On
the paths that the searches of Net1 evaluated two numbers are taken of each of them: τ-b with the truth there, and τ-b over all paths of
an additive model that is fitted there. From both a linear fit tells the τ-b over all paths, by accuracy and by score (half
additive model). Its error is that of supernets which had no part in it: each (record, method) is left out once. Then the same two numbers,
each supernet's on the paths of its own searches, give the estimates.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from record_rankings import HERE, SEEDS, SUPERNETS, evaluated

from greedynas import load_space
from greedynas.additive import blended
from greedynas.studies.correlations import mean_interval, rank_correlations
from greedynas.studies.truth import Truth, read_truth

Floats = NDArray[np.float64]
LEARNED = 0.5  # τ-b over all paths; below it a supernet died or nearly so
SHARE = 0.5  # search.additive of the preset
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
    """τ-b over these paths (indices), and over all paths of an additive model fitted to these."""
    ops = np.asarray(truth.paths)
    design = np.column_stack([np.ones(len(ops)), ops == 1, ops == 2])
    model = design @ np.linalg.lstsq(design[paths], accuracies, rcond=None)[0]
    return [tau_b(accuracies, truth.accuracies[paths]), tau_b(model, truth.accuracies)]


def known_supernets(truth: Truth, searched: list[NDArray[np.int64]]) -> tuple[list[str], Floats, Floats]:
    """Of each supernet that ranked all paths: (record, method), its two numbers, τ-b over all paths by accuracy and by score."""
    groups, seen, whole = [], [], []
    for part in sorted(HERE.glob("macro_*/parts/*.npz")):
        accuracies = np.load(part)["batch_accuracy"].astype(float)
        by_accuracy = tau_b(accuracies, truth.accuracies)
        if by_accuracy < LEARNED:
            print(f"left out: {part.parent.parent.name} {part.stem}, τ-b {by_accuracy:.2f}")
            continue
        groups.append(f"{part.parent.parent.name} {part.stem.rsplit('-', 1)[0]}")
        seen.append(np.mean([seen_there(truth, paths, accuracies[paths]) for paths in searched], axis=0))
        whole.append([by_accuracy, tau_b(blended(truth.paths, accuracies, SHARE), truth.accuracies)])
    return groups, np.array(seen), np.array(whole)


def fitted(seen: Floats, whole: Floats) -> Floats:
    return np.linalg.lstsq(with_constant(seen), whole, rcond=None)[0]


def with_constant(seen: Floats) -> Floats:
    return np.column_stack([np.ones(len(seen)), seen])


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    index = {tuple(path): place for place, path in enumerate(truth.paths)}
    found = {(name, seed): evaluated(name, seed) for name in SUPERNETS for seed in SEEDS}
    places = {key: np.array([index[path] for path in paths]) for key, paths in found.items()}

    groups, seen, whole = known_supernets(truth, [places["Net1", seed] for seed in SEEDS])
    errors = np.zeros_like(whole)
    print(f"\n{len(groups)} supernets whose rankings of all paths are known; means of each group")
    print(
        f"{'':28}{'n':>3}{'searched':>10}{'additive':>10}{'accuracy':>10}{'score':>8}{'   foretold without its group':>30}"
    )
    for group in dict.fromkeys(groups):
        mine = np.array([one == group for one in groups])
        foretold = with_constant(seen[mine]) @ fitted(seen[~mine], whole[~mine])
        errors[mine] = foretold - whole[mine]
        numbers = [*seen[mine].mean(0), *whole[mine].mean(0)]
        told = "".join(f"{number:{width}.3f}" for number, width in zip(numbers, (10, 10, 10, 8), strict=True))
        print(f"{group:28}{mine.sum():3}{told}{foretold.mean(0)[0]:22.3f}{foretold.mean(0)[1]:8.3f}")
    by_group = np.array([errors[[one == group for one in groups]].mean(0) for group in dict.fromkeys(groups)])
    for what, missed in {"a supernet": errors, "the mean of a group": by_group}.items():
        spread = np.sqrt((missed**2).mean(0))
        print(f"error of what is foretold of {what}, root mean square: accuracy {spread[0]:.3f}, score {spread[1]:.3f}")

    weights = fitted(seen, whole)
    estimates = {
        name: with_constant(
            np.array([seen_there(truth, places[name, seed], np.array([*found[name, seed].values()])) for seed in SEEDS])
        )
        @ weights
        for name in SUPERNETS
    }
    print(f"\nestimated τ-b over all paths{'accuracy':>12}{'score':>8}   (mean of five seeds)")
    for name, estimate in estimates.items():
        print(f"{name:28}{estimate.mean(0)[0]:12.3f}{estimate.mean(0)[1]:8.3f}")
    print("\ndifferences of the estimates, 95% over seeds (the errors above are not in it)")
    for ours, theirs in PAIRS:
        told = [mean_interval(list(one)) for one in (estimates[ours] - estimates[theirs]).T]
        cells = [f"{one['mean']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]" for one in told]
        print(f"{f'{ours} − {theirs}':28}accuracy {cells[0]}   score {cells[1]}")


if __name__ == "__main__":
    main()
