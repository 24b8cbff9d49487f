"""Kill a retraining at every call that changes its files, start it again, and compare the results.

    python -m tests.helpers.kill_retraining RUN FOLDER [TOP]

RUN has a finished search; TOP of its networks get a short training first (default 1: none). Every retraining is a fork,
as in `tests.helpers.kill_points`. Prints the results as JSON.
"""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm.data.auto_augment
import timm.optim
import timm.scheduler  # noqa: F401 (here rather than in every child)
import torch
from rich.console import Console

from greedynas.settings.schema import RetrainSettings
from greedynas.stages.retrain import retrain_stage
from greedynas.stages.run import read_data, read_run_config
from tests.helpers.kill_points import KILLED, WALL_CLOCK, Death, in_child, survival

SETTINGS = {"recipe": "rmsprop", "epochs": 2, "batch_size": 27, "ema": 0.9, "checkpoint_steps": 3, "log_every": 2}


def outcome(run: Path) -> dict[str, Any]:
    """Return what must not depend on interruptions: all files except checkpoints, without wall-clock times."""
    found: dict[str, Any] = {}
    for file in (run / "arch.json", run / "model.safetensors", *sorted((run / "models" / "macs-60K").iterdir())):
        name = str(file.relative_to(run))
        if file.suffix == ".jsonl":
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            found[name] = [{key: value for key, value in row.items() if key not in WALL_CLOCK} for row in rows]
        elif file.suffix == ".json":
            found[name] = json.dumps(json.loads(file.read_text(), object_hook=_without_wall_clock), sort_keys=True)
        elif file.is_file():
            found[name] = file.read_bytes().hex()
        else:
            found[name] = "a folder"
    found["left over"] = [file.name for file in run.rglob("*.tmp")]
    return found


def _without_wall_clock(value: dict[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if key not in WALL_CLOCK}


def main(searched: Path, root: Path, top: int = 1) -> None:
    settings = RetrainSettings(**SETTINGS, top=top, top_epochs=1)
    torch.set_num_threads(1)  # a fork has only the thread that forked
    read_data(read_run_config(searched), torch.device("cpu"))  # triggers late imports

    def retraining(folder: Path, death: Death | None = None, report: Path | None = None) -> Callable[[], None]:
        def work() -> None:
            if death is not None:
                death.watch()
            retrain_stage(folder, Console(quiet=True), settings=settings)
            if report is not None and death is not None:
                report.write_text(json.dumps(death.names))

        return work

    def copy(name: str) -> Path:
        return shutil.copytree(searched, root / name)

    names = root / "names.json"
    reference = copy("reference")
    assert in_child(retraining(reference)) == 0
    expected = outcome(reference)
    assert in_child(retraining(copy("dry"), Death(), names)) == 0
    calls = json.loads(names.read_text())
    failures, deaths, moments = [], 0, 0
    for at, name in enumerate(calls, 1):
        if name in ("fsync", "flush"):  # they only matter if the whole machine dies
            continue
        for when in ["before"] + ["middle"] * (name == "write"):
            moments += 1
            folder = copy(f"{at}-{when}")
            works = retraining(folder, Death(at, when)), retraining(folder)
            failure = survival(*works, expected, partial(outcome, folder))
            deaths += failure is None or failure["exit code"] == KILLED
            if failure is not None:
                failures.append({"call": at, "name": name, "when": when, **failure})
            shutil.rmtree(folder)
    print(json.dumps({"calls": calls, "deaths": deaths, "moments": moments, "failures": failures}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *(int(top) for top in sys.argv[3:]))
