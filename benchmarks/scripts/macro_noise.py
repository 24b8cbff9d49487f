"""Estimate the real accuracy of NAS-Bench-Macro's best network, whose 93.127% is the highest of 3,969 noisy means.

    python benchmarks/scripts/macro_noise.py nas-bench-macro_cifar10.json > noise.txt

A network that one or two of the three trainings choose is judged by the other trainings, and by all three. It is
compared with the network with the largest op in every layer, which almost every greedy supernet finds. Last, the script
computes the result of training the first few networks of each ranking of the record of `study macro` once and choosing
the best of them.
"""

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from records import MACRO

from greedynas.experimental.additive import blended
from greedynas.spaces.space import load_space
from greedynas.studies.truth import Truth, read_truth


def main() -> None:
    truth = read_truth(Path(sys.argv[1]), load_space("macro"))
    trainings, mean = truth.trainings, truth.accuracies
    print(f"{'chosen':28s} the other trainings   all three")
    for count in (1, 2):
        for size in (1, 20):
            found = []
            for seen in combinations(range(3), count):
                others = [i for i in range(3) if i not in seen]
                best = np.argsort(-trainings[:, seen].mean(1), kind="stable")[:size]
                found.append((trainings[np.ix_(best, others)].mean(), mean[best].mean()))
            label = f"best{f' {size}' if size > 1 else ''} by {count} of them"
            print("{:28s} {:19.3f} {:11.3f}".format(label, *np.mean(found, axis=0)))
    largest = len(mean) - 1
    print(f"{'largest everywhere':28s} {mean[largest]:19.3f} {mean[largest]:11.3f}   ", np.round(trainings[largest], 2))
    print(f"{'best by all three':28s} {'':19s} {mean.max():11.3f}")
    for method in ("uniform", "fair", "greedy", "greedy-0.61"):
        for count in (1, 5):
            found = [
                choice
                for file in sorted(MACRO.glob(f"parts/{method}-4*.npz"))
                for choice in trained(truth, file, count)
            ]
            print("{:28s} {:19.3f} {:11.3f}".format(f"{method}, best of first {count}", *np.mean(found, axis=0)))


def trained(truth: Truth, file: Path, count: int) -> list[tuple[float, float]]:
    """Return the accuracy, in the other trainings and in all, of the best of the first networks by each training."""
    score = blended(truth.paths, np.load(file)["batch_accuracy"], 0.5)
    first = truth.distinct[np.argsort(-score[truth.distinct], kind="stable")[:count]]
    best = [(seen, first[truth.trainings[first, seen].argmax()]) for seen in range(3)]
    return [(np.delete(truth.trainings[one], seen).mean(), truth.accuracies[one]) for seen, one in best]


if __name__ == "__main__":
    main()
