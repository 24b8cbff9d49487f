"""Searches on a run's supernet: each writes `searches/NAME/search.json`, from which it can also be resumed."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from greedynas.data.datasets import Data
from greedynas.data.settings import DataOptions
from greedynas.greedy.methods.method import Method
from greedynas.greedy.samplers.learning import probabilities_in
from greedynas.greedy.samplers.sampler import make_sampler
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.searchers import SEARCHERS
from greedynas.greedy.searchers.choice import choose
from greedynas.greedy.searchers.task import Accuracies, Found, Plan, Searched, Task, make_task
from greedynas.greedy.settings import EVALUATORS, SearchSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.validation import SupernetAccuracies
from greedynas.rundir.arch_file import path_arch, read_arch, write_arch
from greedynas.rundir.progress import Progress
from greedynas.rundir.run_directory import NAME
from greedynas.rundir.schemas import VERSIONS, Chosen, Evaluated
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError, first_problem, unknown
from greedynas.runtime.files import read_json, write_json
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger, percent
from greedynas.settings.experiments import hooks_of
from greedynas.settings.loading import changed_section, parse_assignments
from greedynas.settings.schema import Config
from greedynas.spaces.budget import Budget, Limits, parse_limits, short_limit
from greedynas.spaces.latency import load_latency_table
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space
from greedynas.stages.run import Run, choose_precisions, read_run_config
from greedynas.stages.search_summary import describe_result_choice
from greedynas.stages.trained_supernet import load_supernet, unfinished_sentence, unfinished_step

SCHEMA_VERSION = VERSIONS["search"]
BALANCED = "balanced accuracy"
FOR_FRONTS = "evolution"
FROM_POOL = ("evolution", "model", "aging", "local", "reinforce")  # built-in searchers that start from the pool
BUILT_IN = (*FROM_POOL, "derivation", "random")


@dataclass(frozen=True)
class Request:
    """The settings of one search, which must agree with `search.json` to resume it."""

    name: str
    budget: Budget
    searcher: str
    objectives: tuple[str, ...]  # empty: the limited costs
    pool_init: bool
    settings: SearchSettings
    seed: int


def make_requests(
    folder: Path,
    limits: Limits,
    searcher: str | None,
    objectives: tuple[str, ...],
    pool_init: bool,
    name: str | None,
    assignments: list[str],
    seed: int | None,
    settings: SearchSettings | None = None,
    now: bool = False,
) -> list[Request]:
    """Return the requested searches: one, or one for each value of a limit that is given several times.

    Without a searcher, the run's usual one is taken. With `now`, they are of the newest checkpoint of a supernet that may not
    be fully trained, whose step their default names end with.
    """
    if searcher is not None and searcher not in SEARCHERS:
        raise SEARCHERS.unknown(searcher)
    for objective in objectives:
        if objective not in limits:
            raise unknown("objective", objective, list(limits))
    config = read_run_config(folder)
    settings = settings or changed_section(config, "search", parse_assignments(assignments))
    usual = usual_searcher(config, settings, objectives)
    searcher = searcher or usual
    if searcher == "derivation" and objectives:
        raise GreedyNASError("the searcher 'derivation' takes one path within limits; for --front, use evolution")
    budgets = parse_limits(limits)
    if name is not None and (len(budgets) > 1 or not NAME.fullmatch(name)):
        raise GreedyNASError(
            f"--name names one search, with letters, digits, '.', '_' and '-'; got {name!r} for {len(budgets)} searches"
        )
    chosen = config.seed if seed is None else seed
    step = unfinished_step(folder, config) if now else None
    return [
        Request(
            name or _at_step(default_name(budget, searcher, objectives, pool_init, usual), step),
            budget,
            searcher,
            objectives,
            pool_init,
            settings,
            chosen,
        )
        for budget in budgets
    ]


def search_stage(
    folder: Path,
    requests: list[Request],
    latency_table: Path | None,
    console: Console,
    data: Data | None = None,
    named: DataOptions | None = None,
    now: bool = False,
) -> list[dict[str, Any]]:
    """Run or resume searches in a run directory, and return their records.

    The chosen networks are written to `models/NAME/arch.json`. With `now`, a supernet that is not fully trained is
    searched as well, which the records say.
    """
    with Run.open(folder, named) as run:
        config = run.config()
        net, state, data, precision = load_supernet(run, config, data, now=now)
        if state.stopped is None:
            console.print(f"{unfinished_sentence(state.epoch, state.step)}", highlight=False, markup=False)
        latency = None
        if latency_table is not None:
            table = load_latency_table(latency_table)
            latency = table.cost_table(net.space)
            if table.unpriceable_share() > 0:
                note = f"{table.unpriceable_share():.1%} of all paths use an op that {latency_table} has no latency for"
                logger.info("%s; a latency limit excludes them", note)
                console.print(f"{note}; a latency limit excludes them", highlight=False, markup=False)
        hooks = hooks_of(config.experimental)
        score = hooks.refine_score(hooks.score, net.space, data, config.seed)
        tasks = [make_task(net.space, request.budget, request.objectives, latency, score) for request in requests]
        for task in tasks:  # raises an error for a budget that no path keeps, before any work is done
            task.sample(1, np.random.default_rng(0))
        settings = requests[0].settings
        accuracies = EVALUATORS[settings.evaluator](net, data, settings, config.seed, precision)
        if isinstance(accuracies, SupernetAccuracies):
            schedule = Schedule(config.train, len(data.train))
            accuracies = hooks.accuracies(accuracies, run.supernet, schedule, state.step)
        pool = [path for path, _ in state.pool.best()]
        precision = choose_precisions(config, choose_device(config.device))[0]

        def steps(
            plan: Plan, evaluate: Accuracies, searcher: str, earlier: Sequence[Found], home: Path
        ) -> Iterator[Searched]:
            return hooks.search(plan, evaluate, searcher, earlier, home, config.train, precision)

        results = []
        for request, task in zip(requests, tasks, strict=True):
            results.append(
                run_search(
                    run.folder, request, task, accuracies, data, pool, state, console, config.experimental, steps
                )
            )
        ranks.on_first(lambda: write_json(folder / "arch.json", read_arch(folder, requests[0].name)))
    return results


def _at_step(name: str, step: int | None) -> str:
    return name if step is None else f"{name}-step-{step}"


def run_search(
    folder: Path,
    request: Request,
    task: Task,
    accuracies: Accuracies,
    data: Data,
    pool: list[OpPath],
    state: TrainState,
    console: Console,
    experimental: dict[str, Any],
    steps: Callable[[Plan, Accuracies, str, Sequence[Found], Path], Iterator[Searched]],
) -> dict[str, Any]:
    """Run one search, save it after every generation, and return its record with the chosen network."""
    file = folder / "searches" / request.name / "search.json"
    wanted = _settings_json(request, task, state, experimental, accuracies, data.balanced)
    known = ranks.on_first(lambda: [astuple(entry) for entry in read_search(file, wanted, task.space)])
    earlier = [Found(tuple(path), *rest) for path, *rest in known]
    before: dict[str, Any] | None = ranks.on_first(lambda: read_chosen(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    settings = request.settings
    first = pool if request.pool_init else []
    probabilities = probabilities_in(state.memory, task.space.num_ops)
    plan = Plan(task, first, settings.population, settings.generations, request.seed, probabilities)
    generations = steps(plan, accuracies, request.searcher, earlier, file.parent)
    written = set(earlier)
    start, searched = time.perf_counter(), Searched(task)
    title, total = f"search {request.name}", plan.evaluations
    if earlier and before is None:
        text = f"Resuming {title}: {len(earlier):,} of at most {total:,} paths are evaluated"
        console.print(text, highlight=False, markup=False)
    with Progress(console, title, total, len(earlier), unit="path", folder=file.parent) as progress:
        for searched in generations:
            if not written.issuperset(searched.found):
                write_json(file, {**wanted, **_found_json(searched)})
            best = searched.best.accuracy
            progress.update(len(searched.found), [f"best {percent(best)} on the supernet"], best=best)
    result = {**wanted, **_found_json(searched), "seconds": time.perf_counter() - start}
    images = float(getattr(accuracies, "images", len(data.val)))  # that each accuracy is measured on
    result["chosen"] = chosen = chosen_json(request, searched, images, before)
    if before is not None and before.get("path") != chosen["path"]:
        ranks.on_first(lambda: refuse_trained(folder, request.name))
    write_json(file, result)
    ranks.on_first(lambda: write_arch(folder, {key: chosen[key] for key in chosen if key != "choice"}))
    logger.info(
        "search %s: %d paths of the first generation from the pool, %d random; %d evaluated, %d rejected; best %.4f",
        request.name,
        searched.from_pool,
        sum(entry.generation == 0 for entry in searched.found) - searched.from_pool,
        len(searched.found),
        searched.rejected,
        searched.best.accuracy,
    )
    if how := describe_result_choice(result):
        logger.info("search %s: %s", request.name, how)
    return result


_FOUND = TypeAdapter(list[Evaluated])


def read_search(file: Path, wanted: dict[str, Any], space: Space) -> list[Found]:
    """Return the paths that an interrupted search of this name has evaluated; other settings are refused.

    The tolerance may differ: it only repeats the choice among the evaluated paths.
    """
    if not file.exists():
        return []
    saved = read_json(file)
    if isinstance(saved.get("settings"), dict):  # settings that are newer than the file have their defaults
        free = {"tolerance": wanted["settings"]["tolerance"]}
        defaults = SearchSettings().model_dump(mode="json", exclude={"searcher"})
        saved["settings"] = {**defaults, **saved["settings"], **free}
    different = [key for key in wanted if saved.get(key) != json.loads(json.dumps(wanted[key]))]
    try:
        found = [
            Found(entry.path, entry.accuracy, entry.generation)
            for entry in _FOUND.validate_json(json.dumps(saved["found"]))
        ]
        space.check_paths([entry.path for entry in found]) if found else None
    except (ValueError, KeyError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise GreedyNASError(f"{file} cannot be read ({problem}); remove it to search again") from None
    if different:
        raise GreedyNASError(f"{file.parent} holds a search with another {', '.join(different)}; choose another --name")
    return found


def read_chosen(file: Path) -> dict[str, Any] | None:
    """Return the network that a finished search chose, or None if the search is not finished."""
    saved = read_json(file).get("chosen")
    try:
        if saved is not None:
            Chosen.model_validate_json(json.dumps(saved))
    except ValidationError as error:
        raise GreedyNASError(f"{file} cannot be read ({first_problem(error)}); remove it to search again") from None
    return saved


def chosen_json(request: Request, searched: Searched, images: float, before: dict[str, Any] | None) -> dict[str, Any]:
    """Return the chosen network of a finished search, and how it was chosen.

    `before` is the earlier choice of the same search. A choice by a version without `search.tolerance` is kept, because
    the network may be trained already, unless a tolerance other than the default is requested.
    """
    tolerance = request.settings.tolerance
    if before is not None and "choice" not in before and tolerance == SearchSettings().tolerance:
        kept = [entry for entry in searched.found if list(entry.path) == before.get("path")]
        if kept:
            return found_json(request.name, kept[0], searched)
    choice = choose(searched, images, tolerance)
    numbers = {key: getattr(choice, key) for key in ("tolerance", "images", "margin", "tied", "within")}
    record = {"choice": {**numbers, "best": _rows(searched, [choice.best])[0]}}
    return {**found_json(request.name, choice.chosen, searched), **record}


def found_json(name: str, found: Found, searched: Searched) -> dict[str, Any]:
    score = {"score": _rows(searched, [found])[0]["score"]} if searched.task.score is not None else {}
    return {**arch_json(name, found, searched.task), **score}


def refuse_trained(folder: Path, name: str) -> None:
    """Refuse another choice if the training of the earlier one has started."""
    home = folder / "models" / name
    if (home / "retrain.json").exists():
        raise GreedyNASError(
            f"{home} is trained already, but this tolerance chooses another network: search under another --name"
        )


def arch_json(name: str, found: Found, task: Task) -> dict[str, Any]:
    """Return the content of `arch.json` before the network is retrained."""
    more = {key: _priced(table(np.array([found.path])))[0] for key, table in task.tables.items()}
    return {**path_arch(name, found.path, task.space), **more, "supernet_accuracy": found.accuracy}


def usual_searcher(config: Config, settings: SearchSettings, objectives: Sequence[str] = ()) -> str:
    """Return the searcher of a run for which none is named: derivation after a method with architecture parameters."""
    if objectives:
        return FOR_FRONTS
    learned = isinstance(make_sampler(config.train.sampler), Method)
    return settings.searcher or ("derivation" if learned else "evolution")


def default_name(
    budget: Budget, searcher: str, objectives: tuple[str, ...], pool_init: bool, usual: str = FOR_FRONTS
) -> str:
    """Return the name of a search by its settings, such as `macs-330M`, `params-5M-random` or `front-macs-params`.

    The usual searcher of a run is not part of the name.
    """
    parts = ["front", *objectives] if objectives else []
    for cost, (low, high) in budget.limits().items():
        parts.append("-".join([cost, *(short_limit(cost, limit) for limit in (low, high) if limit is not None)]))
    parts += [searcher] if searcher in BUILT_IN and searcher != usual else []
    parts += ["no-pool"] if searcher in FROM_POOL and not pool_init else []
    return "-".join(parts or ["all"])


def _priced(costs: NDArray[Any]) -> list[Any]:
    """Return the costs with None for a latency that the table does not contain, because JSON has no NaN."""
    return [None if np.isnan(cost) else cost for cost in costs.tolist()]


def _settings_json(
    request: Request,
    task: Task,
    state: TrainState,
    experimental: dict[str, Any],
    accuracies: Accuracies,
    balanced: bool,
) -> dict[str, Any]:
    supernets = getattr(accuracies, "supernets", 1)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": request.name,
        "space": task.space.name,
        "supernet_step": state.step,
        **(
            {"unfinished_epochs": state.epoch} if state.stopped is None else {}
        ),  # of a supernet that is not trained yet
        **({"supernets": supernets} if supernets > 1 else {}),
        **({"experimental": experimental} if experimental else {}),
        **({"metric": BALANCED} if balanced else {}),  # of `accuracy`; without it, the share of correct images
        "searcher": request.searcher,
        "budget": request.budget.model_dump(exclude_none=True),
        "objectives": list(task.objectives),
        "pool_init": request.pool_init,
        "settings": request.settings.model_dump(mode="json", exclude={"searcher"}),
        "seed": request.seed,
    }


def _found_json(searched: Searched) -> dict[str, Any]:
    return {
        "from_pool": searched.from_pool,
        "rejected": searched.rejected,
        "found": _rows(searched, searched.found),
        "front": _rows(searched, searched.front()),
    }


def _rows(searched: Searched, found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return the entries of `search.json` for evaluated paths."""
    paths = np.array([entry.path for entry in found])
    columns = {name: _priced(table(paths)) for name, table in searched.task.tables.items()}
    if searched.task.score is not None:
        scores = dict(zip((entry.path for entry in searched.found), searched.worth.tolist(), strict=True))
        columns["score"] = [scores[entry.path] for entry in found]
    return [
        {"path": list(entry.path), "accuracy": entry.accuracy, "generation": entry.generation}
        | {name: values[i] for name, values in columns.items()}
        for i, entry in enumerate(found)
    ]
