"""What the live page of a run shows: the facts and charts of the report, and how far the run is, as plain data."""

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from greedynas.greedy.schedule import Schedule
from greedynas.monitoring.status import RunStatus, status_from
from greedynas.reporting import story
from greedynas.reporting.cells import Table, make_table
from greedynas.reporting.facts import Facts, read_facts
from greedynas.reporting.report import draw_charts
from greedynas.rundir.locks import is_locked
from greedynas.rundir.schemas import Positive, Record
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_bytes
from greedynas.runtime.text import count, duration, epochs, percent
from greedynas.spaces.paths import pretty

PLAN = "plan.json"
POOL_ROWS = 10
# The sections of the page: title, and the charts in it.
SECTIONS = (
    (
        "Supernet training",
        (
            ("supernet_loss", "Loss and learning rate"),
            ("supernet_accuracy", "Accuracy of one path after every epoch"),
            ("pool_steadiness", "Sampling from the pool, and when to stop"),
            ("filtering", "Kept and rejected paths"),
            ("pool_losses", "The candidate pool"),
        ),
    ),
    (
        "Search",
        (
            ("front_macs", "Accuracy against multiply-adds"),
            ("front_params", "Accuracy against parameters"),
            ("front_latency_ms", "Accuracy against predicted latency"),
            ("generations", "Accuracy by generation"),
            ("accuracies", "All evaluated paths"),
            ("ops", "Which ops the best networks use"),
        ),
    ),
    (
        "Networks",
        (
            ("retraining", "Loss and learning rate"),
            ("retraining_accuracy", "Accuracy on the validation images"),
            ("models", "Accuracy and cost"),
        ),
    ),
)


class PlannedStage(Record):
    """A stage of `plan.json`."""

    name: str = Field(max_length=100)
    what: str = Field(max_length=300)
    seconds: Positive


class Plan(Record):
    """`plan.json`: the estimate that `run` made before it started."""

    seconds: Positive
    stages: tuple[PlannedStage, ...] = Field(max_length=50)


def live_state(folder: Path) -> dict[str, Any]:
    """Return what the live page shows now; a run that cannot be read at the moment has a problem and nothing else."""
    try:
        facts = read_facts(folder)
        found = status_from(facts)
        return {
            "problem": None,
            "title": story.headline(facts).title,
            "now": _now(found),
            "progress": None if found.progress is None else found.progress.model_dump(mode="json"),
            "running": found.running,
            "tiles": _tiles(facts, found),
            "tables": {"plan": _table_json(plan_table(facts, found)), "pool": _table_json(_pool_table(facts))},
            "log": list(found.log),
            "charts": {
                name: {"figure": chart.figure.to_dict(), "label": chart.label, "caption": chart.caption}
                for name, chart in draw_charts(facts).items()
            },
        }
    except GreedyNASError as error:
        return {"problem": str(error)}


def _now(found: RunStatus) -> str:
    if found.progress is not None:
        return f"{'' if found.running else 'Interrupted. '}{found.progress.line}"
    return "A process works on this run." if found.running else f"No process works on this run; it is {found.stage}."


def _tiles(facts: Facts, found: RunStatus) -> list[tuple[str, str]]:
    tiles = [("epochs of the supernet", f"{found.epochs} of {found.max_epochs}")]
    tiles += [("π, share of the pool that is new", percent(found.pi))] if found.pi is not None else []
    tiles += [("paths in the pool", f"{found.pool:,}")] if found.pool else []
    tiles += [("accuracy on the supernet", percent(found.val_accuracy))] if found.val_accuracy is not None else []
    if facts.training is not None and facts.training.filterings:
        last = facts.training.filterings[-1]
        tiles.append(("paths kept and rejected last", f"{len(last.kept)} / {len(last.rejected)}"))
    if facts.searches:
        search = facts.searches[-1]
        generation = max((entry.generation for entry in search.found), default=0) + 1
        tiles.append((f"generation of the search {search.name}"[:60], f"{generation}"))
        tiles.append(("paths evaluated", f"{len(search.found):,}"))
    return [*tiles, *story.tiles(facts)[:3]] if facts.chosen is not None else tiles


def _pool_table(facts: Facts) -> Table | None:
    """Return the best paths of the candidate pool."""
    best = sorted(facts.pool, key=lambda entry: float("inf") if entry.loss is None else entry.loss)[:POOL_ROWS]
    if not best:
        return None
    macs = facts.space.costs([entry.path for entry in best]).macs
    columns = {
        "best paths of the pool": [pretty(entry.path, facts.space) for entry in best],
        "loss": ["" if entry.loss is None else f"{entry.loss:.3f}" for entry in best],
        "multiply-adds": [count(int(value)) for value in macs],
    }
    return make_table(columns)


def plan_table(facts: Facts, found: RunStatus) -> Table:
    """Return the plan of the run against what has happened so far."""
    rows = [*_supernet_rows(facts, found), *_time_rows(facts)]
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    names = ("", "planned", "so far")
    return make_table({name: [str(cell) for cell in column] for name, column in zip(names, columns, strict=True)})


def _supernet_rows(facts: Facts, found: RunStatus) -> list[tuple[str, str, str]]:
    settings, training = facts.config.train, facts.training
    rows = [("epochs of the supernet", f"at most {settings.max_epochs}", epochs(found.epochs))]
    last = training.epochs[-1] if training is not None and training.epochs else None
    if last is None or not last.epoch:
        return rows
    schedule = Schedule(settings, settings.batch_size * (last.step // last.epoch))
    optimization, evaluation = schedule.predicted_images(space=facts.space)
    rows.append(("optimization images", count(optimization), count(last.optimization_images)))
    rows.append(("evaluation images", count(evaluation), count(last.evaluation_images)))
    return rows


def _time_rows(facts: Facts) -> list[tuple[str, str, str]]:
    """Return the planned time of each stage against the real one."""
    plan = _read_plan(facts.folder / PLAN)
    training = facts.training
    taken = {
        "supernet": training.steps[-1].seconds if training is not None and training.steps else None,
        "search": sum(search.seconds or 0.0 for search in facts.searches) or None,
        "retraining": sum(m.test.seconds or 0.0 for m in facts.models if m.test is not None) or None,
    }
    planned = {} if plan is None else {stage.name: stage.seconds for stage in plan.stages}
    names = dict.fromkeys([*planned, *(name for name, seconds in taken.items() if seconds is not None)])
    return [(f"time of {name}", _seconds(planned.get(name)), _seconds(taken.get(name))) for name in names]


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


def _read_plan(file: Path) -> Plan | None:
    try:
        return Plan.model_validate_json(read_bytes(file, 10**6))
    except (ValidationError, GreedyNASError):
        return None


def _table_json(table: Table | None) -> dict[str, Any] | None:
    return None if table is None else {"columns": table.columns, "rows": table.rows, "words": sorted(table.words)}


def signature(folder: Path) -> str:
    """Return a text that changes when a file changes that the live page shows, or a process starts or ends."""
    patterns = ["*.json", "*.jsonl", "log.txt", "config.yaml", "supernet/pool.json"]
    patterns += ["searches/*/*", "models/*/*", "models/*/top/*/*"]
    found = []
    for pattern in patterns:
        for file in folder.glob(pattern):
            try:
                about = file.lstat()
            except OSError:
                continue
            found.append((str(file), about.st_size, about.st_mtime_ns))
    return json.dumps([is_locked(folder), *sorted(found)])
