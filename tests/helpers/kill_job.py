"""Kill a whole job in each of its stages, start it again, and compare the networks and their weights.

    python -m tests.helpers.kill_job CONFIG FOLDER

Every job is a fork, as in `tests.helpers.kill_points`. Prints the results as JSON.
"""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from greedynas.jobs import job
from greedynas.jobs.resolving import load_config
from tests.helpers.kill_points import KILLED, Death, in_child, survival

LIMITS = {"macs": (["60K"], None), "params": (None, None), "latency_ms": (None, None)}
STAGES = ("train_stage", "search_stage", "retrain_stage", "retrain_stage", "export_stage", "write_report")
FILES = (
    *("arch.json", "model.safetensors", "model.onnx", "models/random/arch.json", "models/random/model.safetensors"),
    *("models/macs-60K/test.json", "models/random/test.json", "searches/macs-60K/search.json"),  # contain times
)


def outcome(run: Path) -> dict[str, str]:
    """Return the contents of files that must not depend on interruptions, to the byte."""
    found = {name: (run / name).read_bytes().hex() for name in FILES}
    for name in FILES[-3:]:
        facts = json.loads((run / name).read_text())
        found[name] = json.dumps({key: value for key, value in facts.items() if key != "seconds"})
    found["report"] = str((run / "report.html").stat().st_size > 10**6)
    found["left over"] = str([file.name for file in run.rglob("*.tmp")])
    return found


def main(config_file: str, root: Path) -> None:
    torch.set_num_threads(1)  # a fork has only the thread that forked
    config = load_config(config_file)

    def running(folder: Path, death: Death | None = None, report: Path | None = None) -> Callable[[], None]:
        ends: list[int] = []  # of the stages, in calls that change files

        def counted(stage: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                result = stage(*arguments, **named)
                ends.append(len(death.names) if death is not None else 0)
                return result

            return call

        def work() -> None:
            if death is not None:
                death.watch()
            for name in set(STAGES):
                setattr(job, name, counted(getattr(job, name)))
            job.run_job(config, folder, LIMITS, Console(quiet=True), with_random=True)
            if report is not None:
                report.write_text(json.dumps(ends))

        return work

    assert in_child(running(root / "reference")) == 0
    expected, failures, deaths = outcome(root / "reference"), [], 0
    assert in_child(running(root / "dry", Death(), root / "ends.json")) == 0
    ends = [0, *json.loads((root / "ends.json").read_text())]
    # In the middle of every stage, and at the last write of the longer ones.
    moments = {(first + last) // 2: stage for stage, (first, last) in zip(STAGES, pairwise(ends), strict=True)}
    moments |= {ends[3]: "retrain_stage", ends[4]: "retrain_stage", ends[5]: "export_stage"}
    for at, stage in sorted(moments.items()):
        folder = root / f"{stage}-{at}"
        failure = survival(running(folder, Death(at)), running(folder), expected, partial(outcome, folder))
        deaths += failure is None or failure["exit code"] == KILLED
        if failure is not None:
            failures.append({"stage": stage, "call": at, **failure})
        shutil.rmtree(folder)
    print(json.dumps({"deaths": deaths, "failures": failures}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
