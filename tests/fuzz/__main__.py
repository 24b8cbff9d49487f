"""Fuzz the command line: `python -m tests.fuzz --seconds 600`, or `make fuzz SECONDS=600`.

First the corpus is repeated. Then inputs of all kinds are tried in turn, which hypothesis makes from valid ones and
from the corpus. None may end in a traceback, hang for more than 30 s, take more than 2 GB or write outside the run
directory. A failing input is made smaller and written to the corpus, where the tests find it. With --keep, some inputs
that are refused in a new way are kept as well: they reach other parts of the program and are mutated further later.
"""

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.generators import Target, targets
from tests.fuzz.kinds import CORPUS, NAME, cases, make_run
from tests.fuzz.runner import Bench, Outcome
from tests.helpers.pictures import paint

TURN = 20  # inputs of a kind before the next kind
LONG = 5.0  # seconds
MOST_NEW = 6  # inputs of a kind that one run of this program keeps because they are new
MOST_BYTES = 30_000  # of an input that is kept

# Loaded once, before processes are forked.
MODULES = """greedynas.deploy.prediction greedynas.stages.search greedynas.stages.retrain greedynas.stages.export
greedynas.reporting.report greedynas.spaces.describe greedynas.spaces.drawing greedynas.spaces.latency greedynas.jobs.job
greedynas.jobs.resolving timm pymoo.algorithms.moo.nsga2 plotly.graph_objects jinja2 greedynas.studies.ranking.run"""


class Found(AssertionError):
    """Raised for an input that fails."""

    def __init__(self, content: bytes | str, outcome: Outcome):
        super().__init__(outcome.problem)
        self.content, self.outcome = content, outcome


class Fuzzer:
    """Tries inputs and counts the tried, the failing and the new ones."""

    def __init__(self, bench: Bench, keep: bool):
        self.bench, self.keep = bench, keep
        self.tried: Counter[str] = Counter()
        self.codes: Counter[int] = Counter()
        self.found: list[str] = []
        self.seen: set[str] = set()
        self.new: Counter[str] = Counter()
        self.slowest, self.largest = 0.0, 0

    def try_input(self, kind: str, content: bytes | str, suffix: str) -> Outcome:
        outcome = self.bench.try_input(kind, content, suffix)
        self.tried[kind] += 1
        self.codes[outcome.code] += 1
        self.slowest = max(self.slowest, outcome.seconds)
        self.largest = max(self.largest, outcome.memory)
        return outcome

    def repeat_corpus(self) -> None:
        for name, _, file, word in cases():
            kind = "/".join(name.split("/")[:-1])
            content = word if file is None else file.read_bytes()
            outcome = self.try_input(kind, content, "" if file is None else file.suffix)
            self.seen.add(signature(kind, outcome))
            if outcome.problem is not None:
                self.report(kind, content, outcome, name)

    def turn(self, target: Target, number: int, until: float) -> None:
        """Try some inputs of a kind; make the first failing one smaller and report it."""

        @seed(number)
        @settings(
            max_examples=TURN,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(target.inputs)
        def try_some(content: bytes | str) -> None:
            if time.monotonic() > until:
                return
            outcome = self.try_input(target.kind, content, target.suffix)
            if outcome.problem is not None and outcome.seconds > LONG:  # too slow to make smaller
                self.report(target.kind, content, outcome, self.save(target, content, "found"))
            elif outcome.problem is not None:
                raise Found(content, outcome)
            self.remember(target, content, outcome)

        try:
            try_some()
        except Found as failure:
            self.report(target.kind, failure.content, failure.outcome, self.save(target, failure.content, "found"))

    def remember(self, target: Target, content: bytes | str, outcome: Outcome) -> None:
        """Keep an input that is refused in a new way."""
        mark = signature(target.kind, outcome)
        if outcome.code != 2 or mark in self.seen:
            return
        self.seen.add(mark)
        if self.keep and self.new[target.kind] < MOST_NEW and len(content) <= MOST_BYTES:
            self.new[target.kind] += 1
            self.save(target, content, "new")

    def save(self, target: Target, content: bytes | str, why: str) -> str:
        if isinstance(content, str):
            name = target.kind.removeprefix("words/")
            file = CORPUS / "words" / ("found" if why == "found" else "") / f"{name}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            known: list[str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
            file.write_text(json.dumps([*known, content], indent=0) + "\n", encoding="utf-8")
            return str(file)
        file = CORPUS / target.kind / f"{why}-{hashlib.sha256(content).hexdigest()[:8]}{target.suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return str(file)

    def report(self, kind: str, content: bytes | str, outcome: Outcome, where: str) -> None:
        told = "\n    ".join(outcome.told.strip().splitlines()[-6:])
        self.found.append(f"{kind}: {outcome.problem} ({where})\n    {content!r:.200}\n    {told}")
        print(f"FOUND {self.found[-1]}", flush=True)


def signature(kind: str, outcome: Outcome) -> str:
    """Return how an input is refused, without names and numbers."""
    line = (outcome.told.strip().splitlines() or [""])[-1]
    line = re.sub(r"/\S+|'[^']*'|\"[^\"]*\"|\d+(\.\d+)?(e[+-]?\d+)?", "_", line)
    return f"{kind} {outcome.code} {line[:90]}"


def prepare(folder: Path) -> tuple[Bench, Path]:
    """Make a finished run with an export in other processes, because a process that has trained cannot be forked."""
    photos = paint(folder / "photos", {"a": 20, "b": 20, "c": 20}, size=(10, 9))

    def run_cli(*command: Any) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "greedynas", *map(str, command)], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    run = make_run(folder, photos, run_cli)
    code, _, told = run_cli("export", run)
    assert code == 0, told
    exported = (folder / "model.onnx").write_bytes((run / "models" / NAME / "model.onnx").read_bytes())
    assert exported
    return Bench(run, next(photos.rglob("*.png")), folder / "work"), folder / "model.onnx"


def rounds(chosen: list[Target], rng: random.Random) -> Iterator[tuple[Target, int]]:
    while True:
        for target in rng.sample(chosen, len(chosen)):
            yield target, rng.randrange(2**32)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="time for new inputs, after the corpus")
    parser.add_argument("--seed", type=int, default=None, help="seed of the inputs; random by default")
    parser.add_argument("--kind", action="append", help="try only this kind; may be given several times")
    parser.add_argument("--skip-corpus", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep inputs that are refused in a new way")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for module in MODULES.split():
        with suppress(ImportError):
            __import__(module)
    number = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    with tempfile.TemporaryDirectory() as root:
        bench, exported = prepare(Path(root))
        fuzzer = Fuzzer(bench, asked.keep)
        if not asked.skip_corpus:
            fuzzer.repeat_corpus()
            print(f"corpus: {sum(fuzzer.tried.values())} inputs repeated", flush=True)
        chosen = [target for target in targets(bench.base, exported) if not asked.kind or target.kind in asked.kind]
        start, before = time.monotonic(), sum(fuzzer.tried.values())
        until = start + asked.seconds
        for target, turn in rounds(chosen, random.Random(number)):
            if time.monotonic() > until:
                break
            fuzzer.turn(target, turn, until)
    total = sum(fuzzer.tried.values())
    print(
        f"seed {number}: {total - before:,} new inputs of {len(chosen)} kinds in {time.monotonic() - start:.0f} s; "
        f"slowest {fuzzer.slowest:.1f} s, most memory {fuzzer.largest / 1e9:.2f} GB; "
        f"refused {fuzzer.codes[2]:,}, accepted {fuzzer.codes[0]:,}; "
        f"{len(fuzzer.found)} found, {sum(fuzzer.new.values())} kept for being new"
    )
    return 1 if fuzzer.found else 0


if __name__ == "__main__":
    sys.exit(main())
