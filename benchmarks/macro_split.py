"""What `train.split_after_identity` does to a ranking of `macro`: the same settings and seeds, with and without it.

    python benchmarks/macro_split.py nas-bench-macro_cifar10.json > benchmarks/macro_split.txt

Greedy, 60 epochs (seed 100 without the split: 61), 1,500 paths, accuracies of the same moments. A line has tau-b, tau-b among the
paths that skip none of the layers 1, 3 and 6, and the true accuracy of the best path and of the best 20.
"""

import sys
from pathlib import Path

import numpy as np
from macro_groups import FIRST, tau

from greedynas.spaces.space import load_space
from greedynas.studies.macro.run import ranked_paths
from greedynas.studies.truth import read_truth

HERE = Path(__file__).parent
WITHOUT, WITH = "g60-const-p50-e.5-k6-zero-wdall", "g60-b256-lr.2-const-p50-e.5-k6-zero-wdall-skip"


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    chosen = ranked_paths(len(truth.paths), 1500)
    ranked = truth.only(chosen)
    whole = (np.array(ranked.paths)[:, FIRST] > 0).all(axis=1)

    def show(name: str, rows: np.ndarray) -> None:
        scores, true = rows.mean(axis=0), ranked.accuracies
        order = np.argsort(-scores, kind="stable")
        taus = f"{tau(scores, true):5.3f}   {tau(scores[whole], true[whole]):5.3f}"
        print(f"{name:44s} {taus}   {true[order[0]]:5.2f} {true[order[:20]].mean():5.2f}")

    without, split = (np.load(HERE / f"macro_accuracies_{name}.npz") for name in ("eighth", "eleventh"))
    recorded = np.load(HERE / "macro_unsplit" / "parts" / "greedy-100.npz")["batch_accuracy"][chosen]
    print(f"{'':44s}   tau  within    best    20")
    for seed in (1, 2):
        for name, rows in (("shared", without[f"{WITHOUT}_{seed}"]), ("split", split[f"{WITH}_{seed}"][1::2])):
            show(f"seed {seed}, {name}, after 20, 40 and 60 epochs", rows)
            show(f"seed {seed}, {name}, after 60 epochs", rows[-1:])
    show("seed 100, shared, five moments from 17 on", recorded[None])
    show("seed 100, split, five moments from 20 on", split[f"{WITH}_100"][-5:])


if __name__ == "__main__":
    main()
