"""The tables of `study searchers`: what evaluating a path gives, and the best value within limits.

- `macro`: the accuracies of NAS-Bench-Macro;
- `synthetic`: invented accuracies of the space `mobilenet` (7^21 paths) with interactions of two and three layers;
- recorded supernets: `batch_accuracy` of all paths of `macro`, from a `.npz` file or the folder of a `study macro`;
- CSV files: one column for each decision, then the accuracy, then the costs. A search is restricted to the rows.
"""

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from greedynas.greedy.searchers.task import Task, make_task
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_arrays, read_bytes
from greedynas.runtime.rng import stream
from greedynas.spaces.budget import Budget
from greedynas.spaces.costs import CostTable, IntArray
from greedynas.spaces.paths import OpPath
from greedynas.spaces.ranked import MAX_STEPS
from greedynas.spaces.space import Space, load_space
from greedynas.studies.truth import SPACE, find_truth, read_truth

Floats = NDArray[np.float64]
Limits = Mapping[str, float]  # upper limits by cost
SYNTHETIC = "synthetic"
RECORDED = "batch_accuracy"  # the array of a part of `study macro`
ACCURACIES = ("accuracy", "top1", "test_acc", "val_acc", "test_acc_seeds")  # names of the column of accuracies
NEAREST = 30  # rows that count as neighbours where a table has only some of the paths


@dataclass(frozen=True)
class Table:
    """A table, which a part of the study reads again from where it came."""

    name: str  # also of its parts
    kind: str  # macro, synthetic, supernet or csv
    file: str | None
    group: str  # tables of one group are summarised together
    default_limits: tuple[tuple[tuple[str, float], ...], ...] = ((),)


@dataclass(frozen=True)
class Problem:
    """A task and the value of each path; `best` is None where nobody knows the best value."""

    task: Task
    values: Any  # a function of paths
    best: float | None


def find_tables(sources: Sequence[str], truth: Path | None) -> list[Table]:
    """Return the tables that the command line names; a folder gives one for each recorded supernet."""
    macs = [(("macs", 60e6),), (("macs", 50e6),)]
    found: list[Table] = []
    for source in sources:
        path = Path(source)
        if source == SPACE:
            found.append(Table(SPACE, SPACE, str(find_truth(truth)), SPACE, ((), *macs)))
        elif source == SYNTHETIC:
            found.append(Table(SYNTHETIC, SYNTHETIC, None, SYNTHETIC, ((("macs", 330e6),),)))
        elif path.suffix == ".csv":
            found.append(Table(path.stem, "csv", source, path.stem))
        elif path.suffix == ".npz" or path.is_dir():
            files = sorted((path / "parts").glob("*.npz")) if path.is_dir() else [path]
            recorded = [file for file in files if not path.is_dir() or _has_accuracies(file)]
            if not recorded:
                raise GreedyNASError(f"{source} has no recorded supernets (parts/*.npz with {RECORDED})")
            group = path.resolve().name if path.is_dir() else path.stem
            found += [Table(file.stem, "supernet", str(file), group, tuple(macs)) for file in recorded]
        else:
            raise GreedyNASError(
                f"unknown table {source!r}: {SPACE}, {SYNTHETIC}, a CSV file, a .npz file, or the folder of a study macro"
            )
    names = [table.name for table in found]
    if len(set(names)) < len(names):
        raise GreedyNASError("two tables have the same name; rename one of the files")
    return found


def _has_accuracies(file: Path) -> bool:
    with np.load(file) as arrays:
        return RECORDED in arrays.files


def open_table(kind: str, file: str | None, limits: Limits) -> Problem:
    """Return the problem of finding the best path of a table within limits."""
    if kind == "csv":
        return _rows_problem(read_rows(Path(str(file))), limits)
    if kind == SYNTHETIC:
        return _synthetic_problem(limits)
    return _macro_problem(_macro_values(kind, str(file)), limits)


def _budget(limits: Limits) -> Budget:
    unknown = [cost for cost in limits if cost not in ("macs", "params")]
    if unknown:
        raise GreedyNASError(f"this table has no cost {unknown[0]!r}, only macs and params")
    return Budget.model_validate({f"max_{cost}": round(limit) for cost, limit in limits.items()})


# The space macro


@lru_cache(maxsize=4)
def _macro_values(kind: str, file: str) -> Floats:
    """Return the values of all paths of the space in order, in percent."""
    if kind == SPACE:
        return read_truth(Path(file)).accuracies
    values = np.asarray(read_arrays(Path(file), [RECORDED])[RECORDED], dtype=float)
    if values.shape != (load_space(SPACE).size,) or not np.isfinite(values).all():
        raise GreedyNASError(f"{file} does not have the accuracies of all {load_space(SPACE).size:,} paths of {SPACE}")
    return 100 * values


def _macro_problem(values: Floats, limits: Limits) -> Problem:
    space = load_space(SPACE)
    task = make_task(space, _budget(limits))
    everything = np.array(list(itertools.product(*map(range, space.num_ops))))
    places = 3 ** np.arange(len(space.num_ops))[::-1]
    best = float(values[task.feasible(everything)].max(initial=-np.inf))
    return Problem(task, lambda paths: values[np.array(paths) @ places].tolist(), best)


# A synthetic space


@dataclass(frozen=True)
class Synthetic:
    """Invented accuracies: costlier ops are mostly better, and ops depend on those of other layers.

    Every pair of layers interacts, and so do any three consecutive ones, which no searcher here models.
    """

    space: Space
    seed: int = 0

    @cached_property
    def _numbers(self) -> tuple[Floats, Floats, Floats]:
        rng, layers, most = (
            stream(self.seed, "synthetic accuracies"),
            len(self.space.num_ops),
            max(self.space.num_ops),
        )
        cost = self.space.cost_tables["macs"].entries.astype(float)
        size = np.log1p(cost / cost.mean())
        ops = 0.4 * (size - size.mean(1, keepdims=True)) / size.std() + rng.normal(0, 0.25, (layers, most))
        pairs = rng.normal(0, 0.05, (layers, layers, most, most))
        triples = rng.normal(0, 0.1, (layers, most, most, most))
        return ops, pairs, triples

    def __call__(self, paths: Sequence[OpPath]) -> list[float]:
        ops, pairs, triples = self._numbers
        chosen = np.array(paths)
        layers = np.arange(chosen.shape[1])
        first, second = np.triu_indices(len(layers), 1)
        total = ops[layers, chosen].sum(1) + pairs[first, second, chosen[:, first], chosen[:, second]].sum(1)
        total += triples[layers[2:], chosen[:, :-2], chosen[:, 1:-1], chosen[:, 2:]].sum(1)
        return [round(value, 9) for value in (70 + total).tolist()]


def _synthetic_problem(limits: Limits) -> Problem:
    space = load_space("mobilenet")
    return Problem(make_task(space, _budget(limits)), Synthetic(space), None)


# CSV files


@dataclass(frozen=True)
class Rows:
    """The rows of a CSV file, with decisions as indices; rows with the same decisions are averaged."""

    name: str
    decisions: tuple[tuple[str, ...], ...]  # the values of each decision, in order
    paths: IntArray
    accuracies: Floats
    costs: dict[str, Floats]


@dataclass(frozen=True)
class Decision:
    """A layer of a table, as far as paths are parsed."""

    ops: tuple[str, ...]


@dataclass(frozen=True)
class Decisions:
    """What searchers need to know of a space."""

    name: str
    layers: tuple[Decision, ...]

    @property
    def num_ops(self) -> tuple[int, ...]:
        """The number of values of each decision."""
        return tuple(len(layer.ops) for layer in self.layers)


@dataclass(frozen=True)
class RowTask(Task):
    """A task whose feasible paths are given rows, in ascending order of their keys."""

    paths: IntArray = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))

    def feasible(self, paths: IntArray) -> NDArray[np.bool_]:
        return self.place(paths) >= 0

    def place(self, paths: IntArray) -> IntArray:
        """Return the row of each path, -1 where there is none."""
        keys, own = paths @ self._radix, self._keys
        place = np.minimum(np.searchsorted(own, keys), len(own) - 1)
        return np.where(own[place] == keys, place, -1)

    def sample(self, n: int, rng: np.random.Generator) -> list[OpPath]:
        return [tuple(path) for path in self.paths[rng.integers(len(self.paths), size=n)].tolist()]

    def ranked(self, values: Sequence[Floats], steps: int = MAX_STEPS) -> Iterator[OpPath]:
        sums = np.sum([layer[self.paths[:, i]] for i, layer in enumerate(values)], axis=0)
        return (tuple(self.paths[row].tolist()) for row in np.argsort(-sums, kind="stable"))

    def neighbours(self, path: OpPath) -> list[OpPath]:
        """Return the rows that differ in one decision; of a table with only some of the paths, the nearest rows."""
        if len(self.paths) == np.prod(self.space.num_ops):
            return super().neighbours(path)
        distance = (self.paths != np.array(path)).sum(1)
        near = np.argsort(distance, kind="stable")[: NEAREST + 1]
        return [tuple(self.paths[row].tolist()) for row in near if distance[row] > 0]

    @cached_property
    def _radix(self) -> IntArray:
        return np.cumprod([1, *self.space.num_ops[:0:-1]])[::-1]

    @cached_property
    def _keys(self) -> IntArray:
        return self.paths @ self._radix


@dataclass(frozen=True)
class RowCosts:
    """A cost of the rows of a task."""

    costs: Floats
    place: Any  # RowTask.place

    def __call__(self, paths: IntArray) -> Floats:
        return self.costs[self.place(paths)]


@lru_cache(maxsize=4)
def read_rows(file: Path) -> Rows:
    """Read a CSV file: the columns before the accuracy are decisions, those after it are costs.

    A column whose name begins with "path" has one digit for each decision. The accuracy's column has one of the names in
    `ACCURACIES`; several numbers in a cell are several trainings, of which the mean is taken.
    """
    try:
        header, *lines = [line for line in csv.reader(read_bytes(file).decode("utf-8").splitlines()) if line]
        column = next(i for i, name in enumerate(header) if name.strip() in ACCURACIES)
    except (UnicodeDecodeError, csv.Error, ValueError):
        raise GreedyNASError(f"{file} is not a CSV file with a line of names and at least one row") from None
    except StopIteration:
        raise GreedyNASError(f"{file} has no column of accuracies, named {', '.join(ACCURACIES)}") from None
    try:
        cells = [_decisions(header[:column], line[:column]) for line in lines]
        accuracies = np.array([np.mean([float(one) for one in line[column].split()]) for line in lines])
        numbers = [[float(cell) if cell else np.nan for cell in line[column + 1 :]] for line in lines]
        costs = np.array(numbers).reshape(len(lines), len(header) - column - 1)
        columns = [sorted(set(values), key=_by_number) for values in zip(*cells, strict=True)]
        paths = np.array([[columns[i].index(cell) for i, cell in enumerate(line)] for line in cells])
    except (ValueError, IndexError):
        raise GreedyNASError(
            f"{file} has a row that does not fit its line of names, or a cell that is no number"
        ) from None
    if not lines or not columns or not np.isfinite(accuracies).all():
        raise GreedyNASError(f"{file} has no rows, no decisions, or an accuracy that is no number")
    distinct, rows = np.unique(paths, axis=0, return_inverse=True)
    count = np.bincount(rows.ravel())
    means = [np.bincount(rows.ravel(), values) / count for values in (accuracies, *costs.T)]
    names = [name.strip() for name in header[column + 1 :]]
    return Rows(file.stem, tuple(map(tuple, columns)), distinct, means[0], dict(zip(names, means[1:], strict=True)))


def _decisions(names: list[str], cells: list[str]) -> list[str]:
    """Return the decisions of a row; a path of digits is split."""
    if len(cells) != len(names):
        raise ValueError("a row with fewer cells")
    return [one for name, cell in zip(names, cells, strict=True) for one in (cell if _is_path(name) else [cell])]


def _is_path(name: str) -> bool:
    return name.strip().startswith("path")


def _by_number(cell: str) -> tuple[float, str]:
    try:
        return float(cell), cell
    except ValueError:
        return np.inf, cell


def _rows_problem(rows: Rows, limits: Limits) -> Problem:
    kept = np.ones(len(rows.paths), dtype=bool)
    for cost, limit in limits.items():
        if cost not in rows.costs:
            raise GreedyNASError(f"{rows.name} has no cost {cost!r}, only {', '.join(rows.costs) or 'none at all'}")
        kept &= rows.costs[cost] <= limit
    if not kept.any():
        raise GreedyNASError(f"{rows.name} has no row within {dict(limits)}")
    space = cast(Space, Decisions(rows.name, tuple(Decision(values) for values in rows.decisions)))
    tables: dict[str, CostTable] = {}
    task = RowTask(space, Budget(), tuple(limits), tables, paths=rows.paths[kept])
    tables |= {cost: cast(CostTable, RowCosts(rows.costs[cost][kept], task.place)) for cost in limits}
    values = rows.accuracies[kept]
    return Problem(task, lambda paths: values[task.place(np.array(paths))].tolist(), float(values.max()))
