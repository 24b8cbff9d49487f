"""Give an input to the command line in a process of its own, and judge the outcome.

The process is a fork of this one, which has loaded everything that a command needs, so a start takes milliseconds and
commands cannot affect each other.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from greedynas.cli import main as cli
from tests.fuzz.kinds import FILES, WORDS, lay

SECONDS = 30.0  # after which a command counts as hanging
MEMORY = 2 * 10**9  # bytes that a command may take, including the loaded libraries


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command, and the problem with it (None: no problem)."""

    code: int
    told: str
    seconds: float
    memory: int
    problem: str | None


class Bench:
    """A finished run and an image with which inputs are tried."""

    def __init__(self, base: Path, image: Path, folder: Path):
        self.base, self.image, self.folder = base, image, folder
        folder.mkdir(exist_ok=True)

    def try_input(self, kind: str, content: bytes | str, suffix: str = "") -> Outcome:
        """Put the input in its place in a copy of the run, and run the command that reads it."""
        with tempfile.TemporaryDirectory(dir=self.folder) as root:
            run, file = Path(root) / "run", Path(root) / f"input{suffix}"
            shutil.copytree(self.base, run)
            if isinstance(content, bytes):
                file.write_bytes(content)
                command = lay(FILES[kind], content, file, run, self.image)
            else:
                command = lay(WORDS[kind.removeprefix("words/")], b"", None, run, self.image, content)
            before = _outside(Path(root))
            outcome = call_forked(command, Path(root))
            if outcome.problem is None and _outside(Path(root)) != before:
                return Outcome(outcome.code, outcome.told, outcome.seconds, outcome.memory, "it wrote outside the run")
            return outcome


def _outside(root: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in root.rglob("*") if "run" not in file.relative_to(root).parts}


def call_forked(command: list[str], folder: Path) -> Outcome:
    """Run the command line in a fork, with its output in temporary files; return the outcome."""
    files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_the_command(command, folder, [file.fileno() for file in files])
    hangs = False
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if not hangs and time.monotonic() - start > SECONDS:
            hangs = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.003)
    told = []
    for file in files:
        file.seek(0)
        told.append(file.read().decode(errors="replace"))
        file.close()
    seconds, memory = time.monotonic() - start, usage.ru_maxrss * 1024
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, told[1], seconds, memory, _problem(code, *told, hangs, memory))


def _be_the_command(command: list[str], folder: Path, files: list[int]) -> None:
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        logging.getLogger("greedynas").handlers.clear()
        sys.argv = ["greedynas", *command]
        cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _problem(code: int, printed: str, told: str, hangs: bool, memory: int) -> str | None:
    lines = told.splitlines()
    if hangs:
        return f"it hangs: more than {SECONDS:.0f} s"
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    if "Traceback (most recent call last)" in told + printed:
        return "a traceback"
    if memory > MEMORY:
        return f"it took {memory / 1e9:.1f} GB"
    if code not in (0, 2):
        return f"exit code {code}"
    if code == 2 and not (lines and lines[-1].startswith("error: ")):
        return "exit code 2 without an error message"
    if any(not line.startswith("warning: ") for line in lines[: -1 if code == 2 else None]):
        return "more than one line, and warnings"
    if any(not line.isprintable() for line in told.split("\n") + printed.split("\n")):
        return "control characters"
    return None
