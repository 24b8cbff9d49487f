"""Measure how well the supernets of `study methods` and `study ablation` rank the paths that their searches evaluated.

    python benchmarks/scripts/record_rankings.py nas-bench-macro_cifar10.json > searched_paths.txt

Prints Kendall's τ-b between accuracy on the supernet and the ground truth, for each pair over the paths (within 50M
FLOPs) that both of them evaluated with the same seed, and the difference with its 95% interval. Net1 is uniform
sampling with greedy's settings; `uniform` and `uniform-E` have the settings that were frozen for uniform sampling.
"""

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from records import ABLATION, METHODS

from greedynas import load_space
from greedynas.spaces.paths import OpPath
from greedynas.studies.correlations import mean_interval, rank_correlations
from greedynas.studies.truth import read_truth

SEEDS = range(500, 505)
SUPERNETS = {
    "uniform": METHODS / "parts" / "uniform",
    "uniform-E": METHODS / "parts" / "uniform-E",
    "fair": METHODS / "parts" / "fair",
    "greedy": METHODS / "parts" / "greedy",
    "Net1": ABLATION / "parts" / "plain",
    "Net2": ABLATION / "parts" / "filter",
    "Net3": ABLATION / "parts" / "pool-stop",
    "Net6": ABLATION / "parts" / "filter-pool-stop",
}


def evaluated(name: str, seed: int) -> dict[OpPath, float]:
    """Return the accuracy on the supernet of all searched paths, by path."""
    arrays = np.load(f"{SUPERNETS[name]}-{seed}.npz")
    searches = [key.removesuffix("_paths") for key in arrays.files if key.endswith("_paths")]
    return {
        tuple(path): float(accuracy)
        for search in searches
        for path, accuracy in zip(arrays[f"{search}_paths"].tolist(), arrays[f"{search}_accuracy"], strict=True)
    }


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    true = dict(zip(map(tuple, truth.paths), truth.accuracies.tolist(), strict=True))
    print(f"{'':22}{'first':>8}{'second':>8}   first − second, 95%          paths of both")
    for ours, theirs in combinations(SUPERNETS, 2):
        taus, common = [], []
        for seed in SEEDS:
            found = [evaluated(name, seed) for name in (ours, theirs)]
            paths = sorted(found[0].keys() & found[1].keys())
            accuracies = np.array([true[path] for path in paths])
            taus.append(
                [rank_correlations(np.array([one[path] for path in paths]), accuracies)["tau_b"] for one in found]
            )
            common.append(len(paths))
        first, second = np.mean(taus, axis=0)
        difference = mean_interval([a - b for a, b in taus])
        interval = f"{difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"
        print(f"{f'{ours}, {theirs}':22}{first:8.3f}{second:8.3f}   {interval:28}{np.mean(common):6.0f}")


if __name__ == "__main__":
    main()
