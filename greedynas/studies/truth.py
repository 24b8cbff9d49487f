"""NAS-Bench-Macro as ground truth: the accuracy of every network of the `macro` space.

3,969 distinct networks were trained from scratch, three times each; the other 2,592 of the 6,561 paths have copies of
the values of their canonical path. Each accuracy is the highest test accuracy of the 50 epochs of a training, so it is
slightly optimistic.

Source: Su et al., Prioritized Architecture Sampling with Monto-Carlo Tree Search, CVPR 2021; the file
`nas-bench-macro_cifar10.json` of the repository xiusu/NAS-Bench-Macro. It is not part of greedynas; `--truth FILE`
names it.
"""

import itertools
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.greedy.searchers.additive import additive_model
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_bytes
from greedynas.runtime.rng import stream
from greedynas.spaces.costs import IntArray
from greedynas.spaces.paths import OpPath, canonical, compact
from greedynas.spaces.space import Space, load_space

SPACE = "macro"
FILE = "nas-bench-macro_cifar10.json"
PLACES = (Path("../shared/data"), Path("data"), Path())  # default locations of the file
WHERE = "the file is at github.com/xiusu/NAS-Bench-Macro"
SIMILAR = 301  # networks of similar accuracy, over which the variance of a training is pooled

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Truth:
    """The ground truth of all paths of the space, in order; several paths may be one network."""

    space: Space
    paths: IntArray  # (n, layers)
    trainings: Floats  # (n, trainings), test accuracies in percent
    macs: IntArray
    params: IntArray

    @cached_property
    def accuracies(self) -> Floats:
        """The mean over the trainings, which is used as the true accuracy."""
        return self.trainings.mean(1)

    @cached_property
    def network(self) -> IntArray:
        """For each path, the index of the path that represents its network: the canonical path if it is included."""
        forms = [canonical(path, self.space) for path in self.paths.tolist()]
        place: dict[OpPath, int] = {}
        for i, (form, path) in enumerate(zip(forms, self.paths.tolist(), strict=True)):
            if form not in place or form == tuple(path):
                place[form] = i
        return np.array([place[form] for form in forms])

    @cached_property
    def distinct(self) -> IntArray:
        """Indices of one path for each network."""
        return np.unique(self.network)

    def only(self, chosen: IntArray) -> "Truth":
        """Return the truth restricted to some of the paths."""
        return replace(
            self,
            paths=self.paths[chosen],
            trainings=self.trainings[chosen],
            macs=self.macs[chosen],
            params=self.params[chosen],
        )

    def trivial_rankings(self) -> dict[str, Floats]:
        """Return rankings that need no supernet; a supernet that does not beat these is useless."""
        identity = np.array([[op == "ID" for op in layer.ops] for layer in self.space.layers])
        working = ~identity[np.arange(self.paths.shape[1]), self.paths]
        return {
            "FLOPs": self.macs.astype(float),
            "parameters": self.params.astype(float),
            "non-ID ops": working.sum(1).astype(float),
        }

    def additive_model(self) -> Floats:
        """Return the least-squares fit to the truth of a sum of one number for each op of each layer."""
        return additive_model(self.paths, self.accuracies)

    def perfect_predictor(self, draw: int) -> Floats:
        """Return the truth plus noise of the size of its own error, as a mean of few trainings.

        All paths of a network have the same noise.
        """
        noise = stream(0, "noise of the truth", draw).standard_normal(len(self.paths))[self.network]
        return self.accuracies + noise * self.deviations / np.sqrt(self.trainings.shape[1])

    @cached_property
    def deviations(self) -> Floats:
        """Standard deviation of one training, pooled over similar networks, because three trainings are too few."""
        order = np.argsort(self.accuracies, kind="stable")
        variances = self.trainings.var(1, ddof=1)[order]
        padded = np.pad(variances, SIMILAR // 2, mode="edge")
        result = np.empty(len(order))
        result[order] = np.sqrt(np.convolve(padded, np.ones(SIMILAR) / SIMILAR, "valid"))
        return result


def find_truth(file: Path | None) -> Path:
    """Return the named file, or else the file in the first default location that has it."""
    if file is not None:
        return file
    for place in PLACES:
        if (place / FILE).is_file():
            return place / FILE
    raise GreedyNASError(f"NAS-Bench-Macro's ground truth was not found; name it with --truth FILE ({WHERE})")


def read_truth(file: Path, space: Space | None = None) -> Truth:
    """Read the ground truth of the `macro` space; any other space is refused."""
    own = load_space(SPACE)
    if space is not None and _layers(space) != _layers(own):
        raise GreedyNASError(f"the ground truth is that of space {SPACE}, not of {space.name}")
    try:
        data = json.loads(read_bytes(file).decode("utf-8"))
    except GreedyNASError as error:
        raise GreedyNASError(f"{error} ({WHERE})") from None
    except (ValueError, RecursionError):
        raise _refusal(file, "it is not JSON") from None
    paths = np.array(list(itertools.product(*(range(n) for n in own.num_ops))))
    rows = [_row(file, data, compact(path, own)) for path in paths.tolist()]
    if len(data) != len(paths):
        raise _refusal(file, f"it has {len(data):,} networks, the space {len(paths):,}")
    trainings = np.array([accuracies for accuracies, _, _ in rows])
    truth = Truth(own, paths, trainings, *(np.array([row[i] for row in rows]) for i in (1, 2)))
    ours = own.costs(paths)
    if (truth.macs != ours.macs).any() or (truth.params != ours.params).any():
        raise _refusal(file, f"its FLOPs or parameters are not those of space {SPACE}")
    return truth


def _layers(space: Space) -> dict[str, Any]:
    return space.model_dump(exclude={"image_size", "num_classes"})


def _row(file: Path, data: Any, key: str) -> tuple[list[float], int, int]:
    """Return the three accuracies, the FLOPs and the parameters of one network."""
    try:
        entry = data[key]
        accuracies, macs, params = entry["test_acc"], entry["flops"], entry["params"]
        if len(accuracies) == 3 and all(0 <= accuracy <= 100 for accuracy in accuracies):
            return [float(accuracy) for accuracy in accuracies], int(macs), int(params)
    except (KeyError, TypeError, ValueError, IndexError):
        pass
    raise _refusal(file, f"it has no three accuracies, FLOPs and parameters of network {key}") from None


def _refusal(file: Path, why: str) -> GreedyNASError:
    return GreedyNASError(f"{file} is not NAS-Bench-Macro's ground truth: {why} ({WHERE})")
