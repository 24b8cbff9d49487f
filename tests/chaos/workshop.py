"""The environment of the faults: small data, the command line in cheap forks, and comparable results."""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import numpy.ma  # noqa: F401
import onnx  # noqa: F401
import onnxruntime
import onnxruntime.quantization  # noqa: F401 (all of this here rather than in every fork)
import onnxscript  # noqa: F401
import timm.data.auto_augment
import timm.optim
import timm.scheduler  # noqa: F401
import torch
import yaml

from greedynas.cli import main as cli
from greedynas.deploy import latency_measurement  # noqa: F401
from greedynas.reporting import report  # noqa: F401
from greedynas.rundir.run_directory import versions
from tests.helpers.kill_points import WALL_CLOCK, outcome
from tests.helpers.pictures import paint
from tests.helpers.training import SETTINGS, tiny_space

FLOPS = "60K"
NAME = f"macs-{FLOPS}"
LATENCIES = {"latency_ms", "latency_median_ms", "latency_iqr_ms"}
CLOCKS = WALL_CLOCK | LATENCIES | {"metrics_length", "checkpoint_minutes", "changed_ns"}
PATIENCE = 120  # seconds after which a process counts as hanging


@dataclass
class Process:
    """A command line that is running in a fork."""

    pid: int
    told: Path  # the file with its standard error

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def running(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def listens(self) -> bool:
        """Return whether the process catches SIGTERM, as it does from the beginning of its work to the end."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    def wait(self) -> tuple[int, str]:
        """Return the exit code (negative: the signal that killed it) and the standard error."""
        until = time.monotonic() + PATIENCE
        while self.running():
            if time.monotonic() > until:
                self.kill()
                os.waitpid(self.pid, 0)
                raise AssertionError(f"the process hangs: {self.told.read_text()}")
            time.sleep(0.005)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code, self.told.read_text(errors="replace")


class Workshop:
    """Configs, data, and the runs that faulty ones are compared with."""

    def __init__(self, root: Path):
        torch.set_num_threads(1)  # a fork has only the thread that forked
        versions()
        self.root, self.count = root, 0
        self.photos = paint(root / "photos", {"a": 20, "b": 20, "c": 20}, size=(10, 9))
        self.config = self.write_config("tiny.yaml")
        self._finished: dict[str, tuple[Path, float]] = {}

    def write_config(self, name: str, data: dict[str, Any] | None = None, **train: Any) -> Path:
        often = {"checkpoint_steps": 3, "log_every": 2}
        settings = {
            "space": tiny_space(repeat=1).model_dump(mode="json"),
            "data": {"val_images": 12, "test_images": 6, "workers": 0, "pad": 1, "source": str(self.photos)},
            "train": {**SETTINGS, "max_epochs": 10, **often},
            "search": {"population": 6, "generations": 5},
            "retrain": {"recipe": "rmsprop", "epochs": 8, "batch_size": 14, "ema": 0.9, **often},
        }
        settings["data"] |= data or {}
        settings["train"] |= train
        (self.root / name).write_text(yaml.safe_dump(settings))
        return self.root / name

    def new(self, name: str = "run") -> Path:
        """Return the path of a new folder, without creating it."""
        self.count += 1
        return self.root / f"{name}-{self.count}"

    # Command lines

    def command(self, stage: str, run: Path, config: Path | None = None) -> list[str]:
        file = str(config or self.config)
        return {
            "train": ["train", file, "--out", str(run)],
            "search": ["search", str(run), "--flops", FLOPS],
            "retrain": ["retrain", str(run)],
            "export": ["export", str(run)],
            "run": ["run", file, "--out", str(run), "--flops", FLOPS],
        }[stage]

    def start(self, command: list[str], prepare: Callable[[], object] | None = None) -> Process:
        told = self.new("told")
        told.touch()  # now, because the process may be killed before its first line
        pid = os.fork()
        if pid:
            return Process(pid, told)
        code = 1
        try:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(told, os.O_WRONLY), 2)
            sys.argv = ["greedynas", *command]
            if prepare is not None:
                prepare()
            cli.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def call(self, command: list[str], prepare: Callable[[], object] | None = None) -> tuple[int, str]:
        return self.start(command, prepare).wait()

    # Runs

    def before(self, stage: str) -> Path:
        """Return a run as it is before a stage; if the stage is the first one, the folder does not exist."""
        run = self.new(stage)
        earlier = {"search": "train", "retrain": "search", "export": "retrain"}
        if stage in earlier:
            shutil.copytree(self.finished(earlier[stage])[0], run)
        return run

    def finished(self, stage: str) -> tuple[Path, float]:
        """Return an undisturbed run after a stage, and how long the stage took."""
        if stage not in self._finished:
            run = self.before(stage)
            start = time.monotonic()
            code, told = self.call(self.command(stage, run))
            assert code == 0, told
            self._finished[stage] = run, time.monotonic() - start
        return self._finished[stage]

    def goes_on(self, stage: str, run: Path, config: Path | None = None, like: Path | None = None) -> None:
        """Repeat the command and check that the result is that of an undisturbed run."""
        code, told = self.call(self.command(stage, run, config))
        assert code == 0, told
        assert "Traceback" not in told, told
        different = differences(like or self.finished(stage)[0], run)
        assert not different, different


def refused(ended: tuple[int, str], *words: str, code: int = 2) -> None:
    """Check that a command ended with a one-line error and a failing exit code."""
    found, told = ended
    assert found == code, (found, told)
    assert told.count("\n") == 1, told
    assert told.startswith("error: "), told
    for word in words:
        assert word in told, (word, told)


def differences(first: Path, second: Path) -> list[str]:
    """Return the differences between two runs in weights, metrics, decisions and files, without times."""
    one, other = results(first), results(second)
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def results(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"left over": sorted(str(file.relative_to(run)) for file in run.rglob("*.tmp"))}
    if (run / "supernet").is_dir():
        found |= outcome(run)
    for file in sorted(run.rglob("*")):
        name = str(file.relative_to(run))
        if file.is_dir() or file.name in (".lock", "log.txt", "config.yaml", "plan.json") or "checkpoints" in name:
            continue
        if name.startswith("supernet/"):
            continue
        if file.suffix == ".jsonl":
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            found[name] = [without_clocks(row) for row in rows]
        elif file.suffix == ".json":
            found[name] = json.dumps(json.loads(file.read_text(), object_hook=without_clocks), sort_keys=True)
        else:
            found[name] = "" if file.name == "report.html" else hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def without_clocks(value: dict[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if key not in CLOCKS}


def reached(file: Path, size: int = 1) -> bool:
    return file.exists() and file.stat().st_size >= size


def until(condition: Callable[[], bool], process: Process) -> None:
    """Wait until a condition holds or the process ends."""
    while process.running() and not condition():
        time.sleep(0.002)


begun = partial(reached, size=400)  # a file of metrics with a few lines
