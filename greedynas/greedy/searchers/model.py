"""Model-based search: a ridge regression on ops and pairs of ops chooses the paths to evaluate.

The model predicts the accuracy of a path as a sum of one number for each op of each layer and one for each pair of ops
in two layers (second-order feature maps, as in Rendle, Factorization Machines, ICDM 2010). There are many more numbers
than paths, but two paths with m equal ops have an inner product of m and m (m - 1) / 2 of these features, so that the
regression is solved in the space of the evaluated paths (ridge regression in dual variables, Saunders et al., ICML
1998). That costs the same in a space of 7^21 paths as in one of 3^8.

Every round, a fifth of a population, is fitted to all evaluated paths and proposes the feasible paths with the highest
predictions, and a few random ones. Candidates are the best paths of two additive approximations of the model, which are listed exactly within
all limits (`Task.ranked`), improved by changes of single ops under the whole model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from greedynas.greedy.searchers.task import Found, Plan, Proposal, Searcher, Task, initial_population
from greedynas.spaces.costs import IntArray
from greedynas.spaces.paths import OpPath

Floats = NDArray[np.float64]
ROUNDS = 5  # rounds of the model for each generation of the plan
RANDOM_SHARE = 0.1  # of a round
PAIR_SHARES = (0.0, 0.25, 0.5, 0.75)  # weight of pairs; the rest is that of single ops
PENALTIES = 10.0 ** np.arange(-4, 1.5, 0.5)  # of the ridge regression, for features of norm 1
MOST_COMPARED = 300  # paths on which weight and penalty are chosen
MOST_FITTED = 2000  # paths
STARTS = 100  # paths taken from each additive approximation
DIGITS = 9  # of predictions that are compared; the last ones depend on the linear algebra library
MAX_CLIMBS = 10  # changes of single ops, one after the other


def model(plan: Plan) -> Searcher:
    """Propose the initial paths, half of them from the pool, and then the paths with the highest predictions."""
    task, size = plan.task, max(1, plan.population // ROUNDS)
    paths, from_pool = initial_population(task, plan.pool, plan.population, plan.rng(0), plan.population // 2)
    everything = yield Proposal(paths, from_pool=from_pool)
    for generation in range(1, 1 + ROUNDS * plan.generations):
        rng, seen = plan.rng(generation), {entry.path for entry in everything}
        predicted = best_predicted(task, Surrogate.fit(*_fitted(everything), task.space.num_ops), everything, size)
        chosen = [path for path in predicted if path not in seen][: size - rng.binomial(size, RANDOM_SHARE)]
        chosen += task.new_random_paths(size - len(chosen), seen | set(chosen), rng)
        if not chosen:
            return  # every feasible path has been evaluated
        everything = everything + (yield Proposal(chosen))


@dataclass(frozen=True)
class Surrogate:
    """A fitted model: f(path) = constant + the numbers of its ops + the numbers of its pairs of ops.

    A cell is an op of a layer; the cells of all layers are numbered consecutively.
    """

    num_ops: tuple[int, ...]
    constant: float
    ops: Floats  # (cells,)
    pairs: Floats  # (cells, cells), symmetric, zero within a layer

    @classmethod
    def fit(cls, paths: IntArray, values: Floats, num_ops: Sequence[int]) -> "Surrogate":
        """Return the model of n paths and their values, with weight of pairs and penalty chosen by leave-one-out.

        Values that are farther below the median than the best is above it count as if they were as far: how bad a bad
        path is says little about the good ones, and would dominate the squared errors.
        """
        layers, middle = len(num_ops), np.median(values)
        values = np.maximum(values, 2 * middle - values.max())
        mean, scale = float(values.mean()), float(values.std()) or 1.0
        onehot, targets = one_hot(paths, num_ops), (values - mean) / scale
        some = np.unique(np.linspace(0, len(paths) - 1, min(len(paths), MOST_COMPARED)).astype(int))
        share, penalty = _choose(onehot[some] @ onehot[some].T, targets[some], layers)
        kernel = _kernel(onehot @ onehot.T, layers, share)
        kernel[np.diag_indices(len(paths))] += penalty
        weights = np.linalg.solve(kernel, targets) * scale
        pairs = onehot.T @ (onehot * weights[:, None]) * (2 * share / (layers * max(layers - 1, 1)))
        for cells in _layers(num_ops):
            pairs[cells, cells] = 0
        return cls(tuple(num_ops), mean, (1 - share) / layers * (weights @ onehot), pairs)

    def predict(self, paths: IntArray) -> Floats:
        """Return the predictions of paths (n, layers)."""
        onehot = one_hot(paths, self.num_ops)
        return self.constant + onehot @ self.ops + ((onehot @ self.pairs) * onehot).sum(1) / 2

    def effects(self, onehot: Floats) -> Floats:
        """Return the number of each cell beside given ops; for shares instead of ops, the mean number."""
        return self.ops + onehot @ self.pairs


def best_predicted(task: Task, surrogate: Surrogate, found: Sequence[Found], count: int) -> list[OpPath]:
    """Return feasible paths in descending order of their predictions, among them at least `count` new ones if possible."""
    order = sorted(found, key=lambda entry: -entry.accuracy)
    good = np.array([entry.path for entry in order[: max(10, len(order) // 4)]])
    around = one_hot(good, surrogate.num_ops).mean(0)
    starts = [tuple(path) for path in good[:10].tolist()] + _additive_best(task, surrogate, around)
    best = _climb(task, surrogate, np.array(list(dict.fromkeys(starts))), len(found) + count)
    around = one_hot(best[:1], surrogate.num_ops)[0]
    starts = [tuple(path) for path in best.tolist()] + _additive_best(task, surrogate, around)
    best = _climb(task, surrogate, np.array(list(dict.fromkeys(starts))), len(found) + count)
    return [tuple(path) for path in best.tolist()]


def one_hot(paths: IntArray, num_ops: Sequence[int]) -> Floats:
    """Return which cells n paths use: (n, cells) of zeros and ones."""
    starts = np.cumsum([0, *num_ops])
    result = np.zeros((len(paths), starts[-1]))
    result[np.arange(len(paths))[:, None], paths + starts[:-1]] = 1
    return result


def _additive_best(task: Task, surrogate: Surrogate, around: Floats) -> list[OpPath]:
    """Return the feasible paths that are best by the effects of their ops beside other ops, or shares of ops."""
    effects = surrogate.effects(around)
    return list(islice(task.ranked([effects[cells] for cells in _layers(surrogate.num_ops)]), STARTS))


def _climb(task: Task, surrogate: Surrogate, starts: IntArray, keep: int) -> IntArray:
    """Return the best `keep` of the starts and of the feasible paths that changes of single ops lead to, best first."""
    paths, values = _best(starts, surrogate.predict(starts), keep)
    expanded: set[OpPath] = set()
    for _ in range(MAX_CLIMBS):
        fresh = [path for path in map(tuple, paths[:STARTS].tolist()) if path not in expanded]
        if not fresh:
            break
        expanded.update(fresh)
        changed, predictions = _changes(surrogate, np.array(fresh))
        if len(paths) == keep:
            better = predictions > values[-1]
            changed, predictions = changed[better], predictions[better]
        feasible = task.feasible(changed)
        paths, values = _best(
            np.concatenate([paths, changed[feasible]]), np.concatenate([values, predictions[feasible]]), keep
        )
    return paths


def _best(paths: IntArray, values: Floats, keep: int) -> tuple[IntArray, Floats]:
    """Return the `keep` distinct paths of the highest values, best first, and of equal ones the first in their order.

    Paths stay rows of arrays: as tuples, tens of thousands of them would keep Python's garbage collector busy for longer
    than all the rest takes.
    """
    as_bytes = np.ascontiguousarray(paths, dtype=np.uint8).view(f"V{paths.shape[1]}").ravel()
    _, distinct = np.unique(as_bytes, return_index=True)
    order = distinct[np.argsort(-values[distinct].round(DIGITS), kind="stable")[:keep]]
    return paths[order], values[order]


def _changes(surrogate: Surrogate, paths: IntArray) -> tuple[IntArray, Floats]:
    """Return all paths that differ in one op from one of these, with their predictions."""
    onehot = one_hot(paths, surrogate.num_ops)
    effects, values = surrogate.effects(onehot), surrogate.predict(paths)
    changed, predictions = [], []
    for layer, cells in enumerate(_layers(surrogate.num_ops)):
        own = effects[:, cells]
        gains = own - own[np.arange(len(paths)), paths[:, layer]][:, None]
        rows, ops = np.nonzero(np.arange(own.shape[1]) != paths[:, layer, None])
        others = paths[rows]
        others[:, layer] = ops
        changed.append(others)
        predictions.append(values[rows] + gains[rows, ops])
    return np.concatenate(changed), np.concatenate(predictions)


def _layers(num_ops: Sequence[int]) -> Iterator[slice]:
    """Yield the cells of each layer."""
    start = 0
    for count in num_ops:
        yield slice(start, start + count)
        start += count


def _fitted(found: Sequence[Found]) -> tuple[IntArray, Floats]:
    """Return the paths and values to fit. Of very many, those are the best half and every n-th of the others."""
    if len(found) > MOST_FITTED:
        order = sorted(found, key=lambda entry: -entry.accuracy)
        rest = order[MOST_FITTED // 2 :]
        found = order[: MOST_FITTED // 2] + rest[:: -(-len(rest) // (MOST_FITTED // 2))]
    return np.array([entry.path for entry in found]), np.array([entry.accuracy for entry in found])


def _kernel(equal: Floats, layers: int, share: float) -> Floats:
    """Return the inner products of the features of paths from the numbers of their equal ops."""
    single, pair = (1 - share) / layers, share / (layers * max(layers - 1, 1))
    return equal * (pair * equal + (single - pair))


def _choose(equal: Floats, targets: Floats, layers: int) -> tuple[float, float]:
    """Return the weight of pairs and the penalty with the lowest leave-one-out error (Allen's PRESS, 1974)."""
    best = (np.inf, 0.0, 1.0)
    for share in PAIR_SHARES:
        roots, vectors = np.linalg.eigh(_kernel(equal, layers, share))
        rotated, squares = vectors.T @ targets, vectors**2
        for penalty in PENALTIES.tolist():
            inverse = 1 / (np.maximum(roots, 0) + penalty)
            errors = (vectors @ (inverse * rotated)) / (squares @ inverse)
            best = min(best, (float(errors @ errors), share, penalty))
    return best[1], best[2]
