"""Searches on a run's supernet: each is a folder `searches/NAME` with a `search.json` that also resumes it."""

import json
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor

from greedynas.data.datasets import Data
from greedynas.data.settings import Told
from greedynas.gpu import engine
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.search import search_steps
from greedynas.greedy.searchers import SEARCHERS
from greedynas.greedy.searchers.choice import choose
from greedynas.greedy.searchers.task import Accuracies, Found, Plan, Searched, Task, make_task
from greedynas.greedy.settings import SearchSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.validation import EVALUATORS, SupernetAccuracies
from greedynas.models.supernet import Supernet
from greedynas.rundir.arch_file import path_arch, read_arch, write_arch
from greedynas.rundir.checkpoints import Checkpoint, Checkpoints, fitting, load_weights, net_weights
from greedynas.rundir.run_directory import NAME
from greedynas.rundir.schemas import VERSIONS, Chosen, Evaluated
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError, first_problem, unknown
from greedynas.runtime.files import read_json, write_json
from greedynas.runtime.parallel import ranks
from greedynas.runtime.terminal import text_column
from greedynas.runtime.text import logger
from greedynas.settings.experiments import hooks_of
from greedynas.settings.loading import changed_section, parse_assignments
from greedynas.settings.schema import Config
from greedynas.spaces.budget import Budget, Limits, parse_limits, told_count
from greedynas.spaces.latency import load_latency_table
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space
from greedynas.stages.run import Run, choose_precisions, read_run_config, read_run_data, supernet_of
from greedynas.stages.search_summary import _choice_told

SCHEMA_VERSION = VERSIONS["search"]
BALANCED = "balanced accuracy"


@dataclass(frozen=True)
class Request:
    """One search: what `search.json` must agree with to be resumed."""

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
    searcher: str,
    objectives: tuple[str, ...],
    pool_init: bool,
    name: str | None,
    assignments: list[str],
    seed: int | None,
    settings: SearchSettings | None = None,
) -> list[Request]:
    """The searches that a command line asks for: one, or one for each value of the limit that is given several times."""
    if searcher not in SEARCHERS:
        raise SEARCHERS.unknown(searcher)
    for objective in objectives:
        if objective not in limits:
            raise unknown("objective", objective, list(limits))
    config = read_run_config(folder)
    settings = settings or changed_section(config, "search", parse_assignments(assignments))
    budgets = parse_limits(limits)
    if name is not None and (len(budgets) > 1 or not NAME.fullmatch(name)):
        raise GreedyNASError(
            f"--name names one search, in letters, digits, '.', '_' and '-': got {name!r} for {len(budgets)}"
        )
    chosen = config.seed if seed is None else seed
    return [
        Request(
            name or default_name(budget, searcher, objectives, pool_init),
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
    named: Told | None = None,
) -> list[dict[str, Any]]:
    """Run (or resume) searches in a run directory; the chosen networks go to `models/NAME/arch.json`."""
    with Run.open(folder, named) as run:
        config = run.config()
        net, state, data, precision = load_supernet(run, config, data)
        latency = None
        if latency_table is not None:
            table = load_latency_table(latency_table)
            latency = table.cost_table(net.space)
            if table.unpriceable_share() > 0:
                told = f"{table.unpriceable_share():.1%} of all paths use an op that {latency_table} has no latency for"
                logger.info("%s; a latency limit leaves them out", told)
                console.print(f"{told}; a latency limit leaves them out", highlight=False, markup=False)
        hooks = hooks_of(config.experimental)
        tasks = [make_task(net.space, request.budget, request.objectives, latency, hooks.score) for request in requests]
        for task in tasks:  # refuses a budget that no path keeps, before any work
            task.sample(1, np.random.default_rng(0))
        settings = requests[0].settings
        accuracies = EVALUATORS[settings.evaluator](net, data, settings, config.seed, precision)
        if isinstance(accuracies, SupernetAccuracies):
            schedule = Schedule(config.train, len(data.train))
            accuracies = hooks.accuracies(accuracies, run.supernet, schedule, state.step)
        pool = [path for path, _ in state.pool.best()]
        results = []
        for request, task in zip(requests, tasks, strict=True):
            results.append(
                run_search(run.folder, request, task, accuracies, data, pool, state.step, console, config.experimental)
            )
        ranks.on_first(lambda: write_json(folder / "arch.json", read_arch(folder, requests[0].name)))
    return results


def load_supernet(run: Run, config: Config, data: Data | None = None) -> tuple[Supernet, TrainState, Data, str]:
    """Return the trained supernet of a run, its state, its data, and the precision to evaluate in."""
    tensors, state = _finished_checkpoint(run.load_checkpoint(), config, run.folder)
    device = choose_device(config.device)
    engine.use(config.engine)
    data = data or read_run_data(run, config, device)
    run.check_data(data)
    net = _with_weights(config, tensors, len(data.class_names), device, run.folder)
    return net, state, data, choose_precisions(config, device)[1]


def supernet_in(folder: Path, device: torch.device) -> Supernet:
    """Return the trained supernet of a run directory. Neither its lock is taken nor are its images read."""
    config = read_run_config(folder)
    tensors, _ = _finished_checkpoint(Checkpoints(folder / "supernet").load(), config, folder)
    classifier = tensors.get("net.classifier.weight")
    classes = config.space.num_classes if classifier is None else len(classifier)
    return _with_weights(config, tensors, classes, device, folder)


def _finished_checkpoint(
    checkpoint: Checkpoint | None, config: Config, folder: Path
) -> tuple[dict[str, Tensor], TrainState]:
    """Return the tensors and the state of a checkpoint of a training that is over."""
    if checkpoint is None:
        raise GreedyNASError(f"{folder} has no supernet yet; train one with greedynas train")
    with fitting(folder / "supernet"):
        state = TrainState.from_json(checkpoint[1], config.space)
    if state.stopped is None:
        raise GreedyNASError(
            f"the supernet in {folder} is not fully trained (step {state.step}); give its train command again"
        )
    return checkpoint[0], state


def _with_weights(
    config: Config, tensors: dict[str, Tensor], num_classes: int, device: torch.device, folder: Path
) -> Supernet:
    net = supernet_of(config, num_classes, device)
    with fitting(folder / "supernet"):
        load_weights(net, net_weights(tensors))
    return net


def run_search(
    folder: Path,
    request: Request,
    task: Task,
    accuracies: Accuracies,
    data: Data,
    pool: list[OpPath],
    step: int,
    console: Console,
    experimental: dict[str, Any],
) -> dict[str, Any]:
    """Run one search, saved after every generation, and choose its network."""
    file = folder / "searches" / request.name / "search.json"
    wanted = _settings_json(request, task, step, experimental, accuracies, data.balanced)
    known = ranks.on_first(lambda: [astuple(entry) for entry in read_search(file, wanted, task.space)])
    earlier = [Found(tuple(path), *rest) for path, *rest in known]
    before: dict[str, Any] | None = ranks.on_first(lambda: read_chosen(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    settings = request.settings
    first = pool if request.pool_init else []
    plan = Plan(task, first, settings.population, settings.generations, request.seed)
    generations = search_steps(plan, accuracies, request.searcher, earlier)
    start, searched = time.perf_counter(), Searched(task)
    with _progress(console) as progress:
        bar = progress.add_task(f"search {request.name}", total=settings.generations, told="")
        for searched in generations:
            if len(searched.found) > len(earlier):
                write_json(file, {**wanted, **_found_json(searched)})
            told = f"evaluated {len(searched.found)}  best {searched.best.accuracy:.4f}"
            progress.update(bar, advance=1, told=told)
    result = {**wanted, **_found_json(searched), "seconds": time.perf_counter() - start}
    images = float(getattr(accuracies, "images", len(data.val)))  # behind every accuracy
    result["chosen"] = chosen = chosen_json(request, searched, images, before)
    if before is not None and before.get("path") != chosen["path"]:
        ranks.on_first(lambda: refuse_trained(folder, request.name))
    write_json(file, result)
    ranks.on_first(lambda: write_arch(folder, {key: chosen[key] for key in chosen if key != "choice"}))
    logger.info(
        "search %s: %d of the first generation from the pool, %d random; %d evaluated, %d rejected; best %.4f",
        request.name,
        searched.from_pool,
        sum(entry.generation == 0 for entry in searched.found) - searched.from_pool,
        len(searched.found),
        searched.rejected,
        searched.best.accuracy,
    )
    if how := _choice_told(result):
        logger.info("search %s: %s", request.name, how)
    return result


_FOUND = TypeAdapter(list[Evaluated])


def read_search(file: Path, wanted: dict[str, Any], space: Space) -> list[Found]:
    """What an interrupted search of the same settings has evaluated; other settings under its name are refused.

    Another tolerance is none of them: it chooses again from what was evaluated.
    """
    if not file.exists():
        return []
    saved = read_json(file)
    if isinstance(saved.get("settings"), dict):  # with the defaults of settings that did not exist when it was written
        free = {"tolerance": wanted["settings"]["tolerance"]}
        saved["settings"] = {**SearchSettings().model_dump(mode="json"), **saved["settings"], **free}
    different = [key for key in wanted if saved.get(key) != json.loads(json.dumps(wanted[key]))]
    try:
        found = [
            Found(entry.path, entry.accuracy, entry.generation)
            for entry in _FOUND.validate_json(json.dumps(saved["found"]))
        ]
        space.check_paths([entry.path for entry in found]) if found else None
    except (ValueError, KeyError) as error:
        told = first_problem(error) if isinstance(error, ValidationError) else error
        raise GreedyNASError(f"{file} cannot be read ({told}); remove it to search again") from None
    if different:
        raise GreedyNASError(
            f"{file.parent} holds a search with another {', '.join(different)}; give this one another --name"
        )
    return found


def read_chosen(file: Path) -> dict[str, Any] | None:
    """Return what a finished search chose, or None where it is not finished."""
    saved = read_json(file).get("chosen")
    try:
        if saved is not None:
            Chosen.model_validate_json(json.dumps(saved))
    except ValidationError as error:
        raise GreedyNASError(f"{file} cannot be read ({first_problem(error)}); remove it to search again") from None
    return saved


def chosen_json(request: Request, searched: Searched, images: float, before: dict[str, Any] | None) -> dict[str, Any]:
    """Return the chosen network of a finished search, with what it was chosen from.

    `before` is what the same search chose before. The choice of a version without `search.tolerance` stays, because it may be
    trained by now, unless another tolerance than the default is asked for.
    """
    tolerance = request.settings.tolerance
    if before is not None and "choice" not in before and tolerance == SearchSettings().tolerance:
        kept = [entry for entry in searched.found if list(entry.path) == before.get("path")]
        if kept:
            return found_json(request.name, kept[0], searched)
    choice = choose(searched, images, tolerance)
    numbers = {key: getattr(choice, key) for key in ("tolerance", "images", "margin", "tied", "within")}
    told = {"choice": {**numbers, "best": _rows(searched, [choice.best])[0]}}
    return {**found_json(request.name, choice.chosen, searched), **told}


def found_json(name: str, found: Found, searched: Searched) -> dict[str, Any]:
    score = {"score": _rows(searched, [found])[0]["score"]} if searched.task.score is not None else {}
    return {**arch_json(name, found, searched.task), **score}


def refuse_trained(folder: Path, name: str) -> None:
    """Refuse another choice where the training of the one before has begun."""
    home = folder / "models" / name
    if (home / "retrain.json").exists():
        raise GreedyNASError(
            f"{home} is trained already, and this tolerance chooses another network: give it another --name"
        )


def arch_json(name: str, found: Found, task: Task) -> dict[str, Any]:
    """What `arch.json` says of a network before it is retrained."""
    more = {key: _priced(table(np.array([found.path])))[0] for key, table in task.tables.items()}
    return {**path_arch(name, found.path, task.space), **more, "supernet_accuracy": found.accuracy}


def default_name(budget: Budget, searcher: str, objectives: tuple[str, ...], pool_init: bool) -> str:
    """`macs-330M`, `params-5M-random`, `front-macs-params`…"""
    parts = ["front", *objectives] if objectives else []
    for cost, (low, high) in budget.limits().items():
        parts.append("-".join([cost, *(told_count(limit) for limit in (low, high) if limit is not None)]))
    parts += ["random"] if searcher == "random" else []
    parts += ["no-pool"] if searcher == "evolution" and not pool_init else []
    return "-".join(parts or ["all"])


def _priced(costs: NDArray[Any]) -> list[Any]:
    """None for a latency that the table cannot tell: JSON has no other word for it."""
    return [None if np.isnan(cost) else cost for cost in costs.tolist()]


def _settings_json(
    request: Request, task: Task, step: int, experimental: dict[str, Any], accuracies: Accuracies, balanced: bool
) -> dict[str, Any]:
    supernets = getattr(accuracies, "supernets", 1)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": request.name,
        "space": task.space.name,
        "supernet_step": step,
        **({"supernets": supernets} if supernets > 1 else {}),
        **({"experimental": experimental} if experimental else {}),
        **({"metric": BALANCED} if balanced else {}),  # of `accuracy`; else it is the share of correct images
        "searcher": request.searcher,
        "budget": request.budget.model_dump(exclude_none=True),
        "objectives": list(task.objectives),
        "pool_init": request.pool_init,
        "settings": request.settings.model_dump(mode="json"),
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
    """Return what `search.json` says of evaluated paths."""
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


def _progress(console: Console) -> Progress:
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), text_column("{task.fields[told]}"))
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
