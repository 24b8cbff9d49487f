"""`greedynas study searchers`: compare searchers by the best value after each evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from greedynas.greedy.search import search_steps
from greedynas.greedy.searchers import SEARCHERS
from greedynas.greedy.searchers.task import Plan, Searched
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.budget import parse_count
from greedynas.studies.searchers.results import searchers_study
from greedynas.studies.searchers.tables import Problem, find_tables, open_table
from greedynas.studies.study import Part, publish, run_parts

NAMES = ("model", "evolution", "aging", "local", "random")
BLOCK = 25  # seeds of a part
Limit = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class SearchersOptions:
    """The options of the study."""

    tables: tuple[str, ...] = ("synthetic",)
    searchers: tuple[str, ...] = NAMES
    limits: tuple[Limit, ...] | None = None  # None: those that belong to each table
    evaluations: int = 1000
    population: int = 50
    seeds: tuple[int, ...] = tuple(range(100))
    truth: Path | None = None
    jobs: int | None = None


def study_searchers(folder: Path, options: SearchersOptions, console: Console) -> dict[str, Any]:
    """Search every table with every searcher and seed, and publish the regret over the number of evaluations."""
    for searcher in options.searchers:
        if searcher not in SEARCHERS:
            raise SEARCHERS.unknown(searcher)
    tables = find_tables(options.tables, options.truth)
    parts = []
    for table in tables:
        for limit in table.default_limits if options.limits is None else options.limits:
            open_table(table.kind, table.file, dict(limit)).task.sample(1, np.random.default_rng(0))  # refuse it now
            for searcher in options.searchers:
                for start in range(0, len(options.seeds), BLOCK):
                    seeds = options.seeds[start : start + BLOCK]
                    settings = {
                        "table": table.name,
                        "group": table.group,
                        "kind": table.kind,
                        "file": table.file,
                        "limits": dict(limit),
                        "searcher": searcher,
                        "seeds": list(seeds),
                        "evaluations": options.evaluations,
                        "population": options.population,
                    }
                    name = f"{table.name}-{limit_name(limit)}-{searcher}-{seeds[0]}to{seeds[-1]}"
                    parts.append(Part(name, search_block, settings, frozenset({"file", "group"})))
    done = run_parts(folder, parts, console, options.jobs)
    whole = {
        "tables": list(options.tables),
        "searchers": list(options.searchers),
        "evaluations": options.evaluations,
        "population": options.population,
        "seeds": list(options.seeds),
    }
    return publish(folder, searchers_study(list(done.values()), whole), console)


def search_block(folder: Path, settings: dict[str, Any], console: Console) -> dict[str, Any]:
    """Search one table with one searcher and some seeds, and return the best value after each evaluation."""
    problem = open_table(settings["kind"], settings["file"], settings["limits"])
    curves = [
        best_so_far(problem, settings["searcher"], settings["population"], settings["evaluations"], seed)
        for seed in settings["seeds"]
    ]
    return {"best": problem.best, "curves": np.array(curves)}


def best_so_far(problem: Problem, searcher: str, population: int, evaluations: int, seed: int) -> NDArray[np.float64]:
    """Return the best value after 1, 2, … evaluations; after the end of a search it stays the same."""
    plan = Plan(problem.task, (), population, -(-evaluations // population), seed)
    searched = Searched(problem.task)
    for searched in search_steps(plan, problem.values, searcher):
        if len(searched.found) >= evaluations:
            break
    values = [entry.accuracy for entry in searched.found][:evaluations]
    return np.pad(np.maximum.accumulate(values), (0, evaluations - len(values)), mode="edge")


def limit_name(limit: Limit) -> str:
    """Return the name of limits in parts and tables, such as `macs60000000`."""
    return "-".join(f"{cost}{value:.12g}" for cost, value in limit) or "all"


def parse_limits(texts: Sequence[str] | None) -> tuple[Limit, ...] | None:
    """Return the limits of the command line: `none`, or `COST=VALUE`, several costs separated by commas."""
    if not texts:
        return None
    return tuple(dict.fromkeys(() if text == "none" else tuple(map(_limit, text.split(","))) for text in texts))


def _limit(text: str) -> tuple[str, float]:
    cost, equals, value = text.partition("=")
    try:
        if cost.strip() and equals:
            return cost.strip(), float(value) if _is_number(value) else float(parse_count(value))
    except GreedyNASError:
        pass
    raise GreedyNASError(f"--limit takes none or COST=VALUE, such as macs=60M, got {text!r}")


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False
