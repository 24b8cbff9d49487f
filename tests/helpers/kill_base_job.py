"""Kill a job around a pretrained network in each of its steps, start it again, and compare the networks and their weights.

    python -m tests.helpers.kill_base_job CONFIG FOLDER

The uninterrupted job runs in this process, so that everything is imported once; every other one is a fork, as in
`tests.helpers.kill_points`. Prints the results as JSON.
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
from greedynas.jobs.machine_speed import known_pace
from greedynas.jobs.resolving import load_config
from greedynas.spaces.budget import parse_limits
from greedynas.stages import train
from greedynas.stages.run import read_data
from tests.helpers.base_runs import FOUND, LIMITS
from tests.helpers.kill_points import KILLED, Death, survival

# The end of each step, as (module, function): the base is fine-tuned, the supernet trained, searched, and so on.
STEPS = {
    "base": (train, "adapted_network"),
    "supernet": (job, "train_stage"),
    "search": (job, "search_stage"),
    "fine-tuning": (job, "retrain_stage"),
    "export": (job, "export_stage"),
}
WEIGHTS = ("models/base/model.safetensors", f"models/{FOUND}/model.safetensors", "model.safetensors")
RECORDS = ("arch.json", "models/base/arch.json", "models/base/test.json", f"models/{FOUND}/test.json")


def outcome(run: Path, exported: bool) -> dict[str, str]:
    """Return the contents of files that must not depend on interruptions."""
    supernet = sorted((run / "supernet").glob("step-*.safetensors"))[-1]
    with supernet.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")  # contains times
        found = {"supernet": (file.seek(8 + header), file.read())[1].hex()}
    found |= {name: (run / name).read_bytes().hex() for name in WEIGHTS}
    for name in (*RECORDS, f"searches/{FOUND}/search.json"):
        facts = json.loads((run / name).read_text())
        found[name] = json.dumps({key: value for key, value in facts.items() if key != "seconds"})
    if exported:
        found |= {"onnx": (run / "model.onnx").read_bytes().hex(), "report": str((run / "report.html").is_file())}
    return {**found, "left over": str([file.name for file in run.rglob("*.tmp")])}


def main(config_file: str, root: Path) -> None:
    torch.set_num_threads(1)  # a fork has only the thread that forked
    config = load_config(config_file)
    data = read_data(config, torch.device("cpu"))
    known_pace(config, data, torch.device("cpu"), parse_limits(LIMITS)[0])  # the forks need not measure again

    ends = [0]  # of the steps, in calls that change files

    def running(folder: Path, death: Death | None = None, exports: bool = False) -> Callable[[], None]:

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                result = function(*arguments, **named)
                ends.append(len(death.names) if death is not None else 0)
                return result

            return call

        def work() -> None:
            if death is not None:
                death.watch()
            if not exports:  # it takes longer than all other steps
                job.export_stage = job.report_export = job.write_report = lambda *_, **__: {
                    "report": None,
                    "worth": None,
                }
            for module, name in STEPS.values():
                setattr(module, name, counted(getattr(module, name)))
            job.run_job(config, folder, LIMITS, Console(quiet=True))

        return work

    running(root / "whole", Death(), True)()
    expected = outcome(root / "whole", True)
    ends = ends.copy()
    assert len(ends) == 1 + len(STEPS)
    failures, deaths, states = [], 0, {}
    for step, (first, last) in zip(STEPS, pairwise(ends), strict=True):
        exports = step == "export"
        for at in {(first + last) // 2} | ({last} if step == "base" else set()):
            folder, wanted = root / f"{step}-{at}", expected
            if not exports:
                wanted = {name: value for name, value in expected.items() if name not in ("onnx", "report")}
            dying = running(folder, Death(at), exports)
            result = partial(outcome, folder, exports)
            failure = survival(dying, running(folder, exports=exports), wanted, result)
            deaths += failure is None or failure["exit code"] == KILLED
            states[f"{step} {at}"] = [first, last]
            if failure is not None:
                failures.append({"step": step, "call": at, **failure})
            shutil.rmtree(folder)
    print(json.dumps({"deaths": deaths, "failures": failures, "steps": states}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
