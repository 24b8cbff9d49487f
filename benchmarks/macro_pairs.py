"""How two neighbouring layers count together in the rankings of supernets, and in the truth.

    python benchmarks/macro_pairs.py nas-bench-macro_cifar10.json benchmarks/macro_accuracies_*.npz \
        benchmarks/macro_{unsplit,split}/parts/*.npz > benchmarks/macro_pairs.txt

The files are accuracies of many trials (see `macro_groups.py`; the mean over the last two thirds of the moments counts), or one part of
`greedynas study macro`. A line has tau-b, tau-b of an additive model that was fitted to the supernet's own accuracies (one number for
each op of each layer), tau-b among the paths that skip none of the layers 1, 3 and 6, and the interactions of neighbouring layers in
normal scores: how much more it counts that layer i + 1 is there if layer i is there too. Below zero, the one replaces the other.
"""

import sys
from pathlib import Path

import numpy as np
from macro_groups import FIRST, Numbers, accuracies_in, late_mean, normal_scores, tau

from greedynas.spaces.space import load_space
from greedynas.studies.macro.run import ranked_paths
from greedynas.studies.truth import Truth, read_truth

HEADER = f"{'':58s}   tau   add  within  " + " ".join(f"{i},{i + 1}".rjust(5) for i in range(1, 8))


def line(name: str, scores: Numbers, truth: Truth) -> str:
    ranked = truth.only(ranked_paths(len(truth.paths), len(scores)))
    paths, true = np.array(ranked.paths), ranked.accuracies
    ops = np.concatenate([np.ones((len(paths), 1)), paths == 1, paths == 2], axis=1)
    there = (paths > 0) - 0.5
    pairs = there[:, :-1] * there[:, 1:]
    normal = normal_scores(scores)
    interactions = fitted(np.concatenate([pairs, ops], axis=1), normal)[: pairs.shape[1]]
    whole = (paths[:, FIRST] > 0).all(axis=1)
    taus = tau(scores, true), tau(ops @ fitted(ops, scores), true), tau(scores[whole], true[whole])
    return f"{name:58s} {taus[0]:5.3f} {taus[1]:5.3f}   {taus[2]:5.3f}  " + " ".join(f"{x:5.2f}" for x in interactions)


def fitted(terms: Numbers, values: Numbers) -> Numbers:
    return np.linalg.lstsq(terms, values, rcond=None)[0]


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    print(HEADER)
    print(line("the truth itself", truth.accuracies, truth))
    for file in sys.argv[2:]:
        for name, rows in accuracies_in(file):
            mean = late_mean(rows)
            if np.ptp(mean) > 0:
                print(line(name, mean, truth))


if __name__ == "__main__":
    main()
