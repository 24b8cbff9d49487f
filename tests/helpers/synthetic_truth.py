"""A synthetic ground truth in the format of NAS-Bench-Macro, for tests that must not need the real file.

Every path of the space `macro` has an accuracy: the sum of one number for each op of each layer, of similar size as in
the real benchmark, one for each pair of ops in two layers, and some noise. Paths that are the same network have the
same accuracies.
"""

import itertools
from typing import Any

import numpy as np

from greedynas import load_space
from greedynas.spaces.paths import canonical

LAYERS = (1.6, 1.3, 1.6, 0.85, 0.85, 1.05, 0.4, 0.4)  # effect of an op of the layer, in points
OPS = (-1.0, 0.35, 0.65)  # identity, MB3_K3, MB6_K5
PAIRS, NETWORKS, TRAININGS = 0.12, 0.2, 0.18  # standard deviations, in points


def synthetic_truth(seed: int = 0) -> dict[str, dict[str, Any]]:
    """Return the content of `nas-bench-macro_cifar10.json` with synthetic accuracies: an entry for each of the 3^8
    paths."""
    space, rng = load_space("macro"), np.random.default_rng(seed)
    paths = np.array(list(itertools.product(range(3), repeat=8)))
    accuracies = 90.5 + (np.array(LAYERS) * np.array(OPS)[paths]).sum(1)
    for first, second in itertools.combinations(range(8), 2):
        accuracies += rng.normal(0, PAIRS, (3, 3))[paths[:, first], paths[:, second]]
    accuracies += rng.normal(0, NETWORKS, len(paths))
    trainings = accuracies[:, None] + rng.normal(0, TRAININGS, (len(paths), 3))
    place = {tuple(path): i for i, path in enumerate(paths.tolist())}
    own = trainings[[place[canonical(path, space)] for path in place]].clip(0, 100)
    costs = space.costs(paths)
    return {
        "".join(map(str, path)): {
            "test_acc": own[i].tolist(),
            "mean_acc": float(own[i].mean()),
            "std": float(own[i].std()),
            "params": int(costs.params[i]),
            "flops": int(costs.macs[i]),
        }
        for path, i in place.items()
    }
