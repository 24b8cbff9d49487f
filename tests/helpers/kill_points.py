"""Kill a training at every call that changes its files, start it again, and compare the results.

    python -m tests.helpers.kill_points CONFIG FOLDER

Everything is imported once; every training is then a cheap fork. Prints the results as JSON.
"""

import hashlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy.ma  # noqa: F401 (here rather than in every child)
import timm.optim  # noqa: F401
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from greedynas.jobs.resolving import load_config
from greedynas.rundir.run_directory import versions
from greedynas.stages.run import read_data
from greedynas.stages.train import train_stage

KILLED = 9
FUNCTIONS = ("fsync", "replace", "rename", "unlink", "mkdir")  # of os
METHODS = ("write", "flush", "truncate")  # of files, which are flushed before they are closed
WALL_CLOCK = {"seconds", "images_per_second", "measured_ratio", "corrected_images_measured"}


class Death:
    """Counts the calls that change files and ends the process before, in the middle of, or after call number `at`."""

    def __init__(self, at: int = -1, when: str = "before"):
        self.at, self.when = at, when
        self.names: list[str] = []

    def watch(self) -> None:
        for name in FUNCTIONS:
            setattr(os, name, self.around(name, getattr(os, name)))
        opened = pathlib.Path.open

        def watched(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
            handle = opened(path, mode, *rest, **named)
            return Handle(handle, self) if set(mode) & set("wax+") else handle

        pathlib.Path.open = watched  # type: ignore[method-assign, assignment]
        submit = ThreadPoolExecutor.submit

        def finished(pool: ThreadPoolExecutor, *work: Any) -> Any:
            """Let training wait for the thread that writes checkpoints, so that calls have a fixed order."""
            future = submit(pool, *work)
            future.exception()
            return future

        ThreadPoolExecutor.submit = finished  # type: ignore[method-assign, assignment]

    def around(self, name: str, function: Callable[..., Any], half: Callable[..., Any] | None = None) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if name == "mkdir" and Path(arguments[0]).exists():
                return function(*arguments, **named)  # raises
            self.names.append(name)
            last = len(self.names) == self.at
            if last and self.when == "before":
                os._exit(KILLED)
            try:
                return (half if last and half is not None and self.when == "middle" else function)(*arguments, **named)
            finally:
                if last:
                    os._exit(KILLED)

        return call


class Handle:
    """A file whose writes are counted."""

    def __init__(self, handle: Any, death: Death):
        self.handle = handle
        for name in METHODS:
            setattr(self, name, death.around(name, getattr(handle, name), self._half if name == "write" else None))

    def _half(self, data: bytes) -> None:
        self.handle.write(data[: len(data) // 2])
        self.handle.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.close()


def in_child(work: Callable[[], None]) -> int:
    """Do the work in a fork and return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(folder: Path) -> dict[str, Any]:
    """Return what must not depend on interruptions: weights, momentum, pool, state and metrics, without wall-clock
    times."""
    newest = sorted((folder / "supernet").glob("step-*.safetensors"))[-1]
    with newest.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    state = json.loads(header["__metadata__"]["state"])
    tensors = {name: tensor.numpy().tobytes().hex() for name, tensor in load_file(newest).items()}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "tensors": tensors,
        "state": {name: value for name, value in state.items() if name not in WALL_CLOCK | {"metrics_length"}},
        "length is known": state["metrics_length"] == (folder / "metrics.jsonl").stat().st_size,
        "metrics": [{name: value for name, value in row.items() if name not in WALL_CLOCK} for row in rows],
        "pool": (folder / "supernet" / "pool.json").read_text(),
        "left over": [file.name for file in folder.rglob("*.tmp")],
    }


def saved(folder: Path) -> int:
    """Return the step of the newest checkpoint after a kill, and check that all files are intact."""
    files = sorted((folder / "supernet").glob("step-*.safetensors"))
    for file in files:
        assert file.stem.endswith(hashlib.sha256(file.read_bytes()).hexdigest()[:16]), file
    for file in (*folder.glob("config.yaml"), *folder.glob("supernet/pool.json")):
        assert yaml.safe_load(file.read_text()) is not None, file
    return int(files[-1].name.split("-")[1]) if files else 0


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [name for name in first if first[name] != second[name]]


def survival(
    dying: Callable[[], None], again: Callable[[], None], expected: dict[str, Any], result: Callable[[], dict[str, Any]]
) -> dict[str, Any] | None:
    """Run `dying` until it dies, then `again`; return the differences from the expected result, or None."""
    died = in_child(dying)
    resumed = in_child(again)
    wrong = differences(expected, result()) if resumed == 0 else [f"exit code {resumed}"]
    return {"exit code": died, "differs": wrong} if wrong or died != KILLED else None


def main(config_file: str, root: Path) -> None:
    torch.set_num_threads(1)  # a fork has only the thread that forked
    config = load_config(config_file)
    read_data(config, torch.device("cpu"))  # triggers late imports
    versions()

    def training(folder: Path, death: Death | None = None, report: Path | None = None) -> Callable[[], None]:
        def work() -> None:
            if death is not None:
                death.watch()
            train_stage(config, folder, Console(quiet=True))
            if report is not None and death is not None:
                report.write_text(json.dumps(death.names))

        return work

    reference, dry, names = root / "reference", root / "dry", root / "names.json"
    assert in_child(training(reference)) == 0
    expected = outcome(reference)
    assert in_child(training(dry, Death(), names)) == 0
    calls = json.loads(names.read_text())
    assert not differences(expected, outcome(dry))
    failures, deaths, progress = [], 0, 0
    for at, name in enumerate(calls, 1):
        # "Before" a call is the same as "after" the previous one, so "after" is only needed for the last call.
        moments = ["before"] + ["middle"] * (name == "write") + ["after"] * (at == len(calls))
        for when in moments:
            folder = root / f"{at}-{when}"
            died = in_child(training(folder, Death(at, when)))
            before, progress = progress, saved(folder)
            assert progress >= before, f"{name} number {at} loses a checkpoint"
            resumed = in_child(training(folder))
            wrong = differences(expected, outcome(folder)) if resumed == 0 else [f"exit code {resumed}"]
            deaths += died == KILLED
            if wrong or died != KILLED:
                failures.append({"call": at, "name": name, "when": when, "exit code": died, "differs": wrong})
            shutil.rmtree(folder)
    assert progress == expected["state"]["step"]
    print(json.dumps({"calls": calls, "deaths": deaths, "failures": failures, "state": expected["state"]}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
