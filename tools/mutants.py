"""Mutation testing: change the code in one place at a time and check whether a test fails.

    python tools/mutants.py --module pool                          every mutant of one module, in minutes
    python tools/mutants.py --module evaluation --sample 60        60 of them, the same ones every time
    python tools/mutants.py --jobs 2                               all mutants, in a night
    python tools/mutants.py --module pool --again                  the survivors without a reason, after a new test
    python tools/mutants.py --report                               a report on the results, in Markdown
    python tools/mutants.py --report --results benchmarks/records/mutants-cpu2-2026-11-18.jsonl.gz

Each mutant is made in a copy of the package, and the tests of its module run, the fastest first, until one fails.
Results are lines of JSON (--results): an interrupted run continues where it stopped, and mutants with a result are not
tested again. Known survivors, each with the reason why no test should detect them, are in surviving_mutants.yaml; the
exit code is 1 if there are others. docs/results/mutants.md has the counts and the reasons.
"""

import argparse
import gzip
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from mutations import Mutant, mutants

ROOT = Path(__file__).parents[1]
KNOWN = Path(__file__).with_name("surviving_mutants.yaml")
LIBRARIES = ("numpy", "onnx", "pymoo.core.population", "pytest", "scipy.stats", "timm", "torch", "torchvision")
COPIED = ("greedynas", "tests", "docs", "tools", "README.md", "pyproject.toml")

DATA_TESTS = [
    "tests/data/test_datasets.py",
    "tests/data/test_specs.py",
    "tests/data/test_loader.py",
    "tests/data/test_unreadable.py",
    "tests/data/test_manifest.py",
    "tests/data/test_copies.py",
]

# The modules of the paper's algorithms, evaluation, loss and split, each with its tests.
MODULES: dict[str, tuple[str, list[str]]] = {
    "filtering": ("greedynas/greedy/filtering.py", ["tests/greedy/test_filtering.py", "tests/greedy/test_training.py"]),
    "pool": ("greedynas/greedy/pool.py", ["tests/greedy/test_pool.py"]),
    "schedule": (
        "greedynas/greedy/schedule.py",
        ["tests/greedy/test_schedule.py", "tests/studies/test_macro.py::test_epochs_within_a_cost"],
    ),
    "training": (
        "greedynas/greedy/training.py",
        [
            "tests/greedy/test_training.py",
            "tests/models/test_losses.py",
            "tests/rundir/test_checkpointing.py",
            "tests/rundir/test_progress.py",
            "tests/greedy/test_around_base.py",
            "tests/greedy/methods/test_method.py",
            "tests/experimental/test_snapshots.py",
            "tests/runtime/parallel/test_ranks.py",
        ],
    ),
    "steps": (
        "greedynas/greedy/steps.py",
        [
            "tests/greedy/test_training.py",
            "tests/models/test_losses.py",
            "tests/greedy/graphs/test_graphs.py",
            "tests/greedy/test_around_base.py",
            "tests/runtime/parallel/test_ranks.py",
        ],
    ),
    "stopping": ("greedynas/greedy/stopping.py", ["tests/greedy/test_schedule.py", "tests/greedy/test_training.py"]),
    "validation": (
        "greedynas/greedy/validation.py",
        [
            "tests/greedy/test_validation.py",
            "tests/greedy/test_training.py",
            "tests/models/test_losses.py",
            "tests/stages/test_search.py",
        ],
    ),
    "sampler": (
        "greedynas/greedy/samplers/sampler.py",
        ["tests/greedy/samplers/test_samplers.py", "tests/greedy/test_training.py"],
    ),
    "greedy": ("greedynas/greedy/samplers/greedy.py", ["tests/greedy/test_training.py"]),
    "fair": (
        "greedynas/greedy/samplers/fair.py",
        ["tests/greedy/samplers/test_samplers.py", "tests/greedy/test_training.py"],
    ),
    "evaluation": (
        "greedynas/greedy/evaluation.py",
        ["tests/greedy/test_evaluation.py", "tests/models/test_losses.py"],
    ),
    "batchnorm": (
        "greedynas/models/batchnorm.py",
        ["tests/models/test_batchnorm.py", "tests/greedy/test_evaluation.py", "tests/models/test_losses.py"],
    ),
    "losses": ("greedynas/models/losses.py", ["tests/models/test_losses.py"]),
    "class_weights": ("greedynas/data/class_weights.py", ["tests/models/test_losses.py"]),
    "search": (
        "greedynas/greedy/search.py",
        [
            "tests/greedy/test_search.py",
            "tests/greedy/searchers/test_searchers.py",
            "tests/greedy/searchers/test_evolution.py",
        ],
    ),
    "task": (
        "greedynas/greedy/searchers/task.py",
        [
            "tests/greedy/searchers/test_evolution.py",
            "tests/greedy/test_search.py",
            "tests/greedy/searchers/test_choice.py",
        ],
    ),
    "evolution": (
        "greedynas/greedy/searchers/evolution.py",
        [
            "tests/greedy/searchers/test_evolution.py",
            "tests/greedy/test_search.py",
            "tests/greedy/searchers/test_choice.py",
        ],
    ),
    "random": ("greedynas/greedy/searchers/random.py", ["tests/greedy/test_search.py"]),
    "choice": ("greedynas/greedy/searchers/choice.py", ["tests/greedy/searchers/test_choice.py"]),
    "feasible": (
        "greedynas/spaces/feasible.py",
        ["tests/spaces/test_feasible.py", "tests/spaces/test_space.py", "tests/spaces/test_budget.py"],
    ),
    "datasets": (
        "greedynas/data/datasets.py",
        DATA_TESTS,
    ),
    "splits": (
        "greedynas/data/splits.py",
        DATA_TESTS,
    ),
    "network_training": (
        "greedynas/stages/network_training.py",
        ["tests/stages/test_network_training.py", "tests/stages/test_retrain.py", "tests/models/test_losses.py"],
    ),
    "testing": ("greedynas/stages/testing.py", ["tests/stages/test_testing.py"]),
}


@dataclass(frozen=True)
class Result:
    """The outcome of one mutant; `test` is the first test that failed."""

    id: str
    module: str
    function: str
    line: int
    operator: str
    before: str
    after: str
    outcome: str  # killed, timeout, survived
    test: str | None
    seconds: float


def main() -> int:
    options = _options()
    if options.report:
        print(report(read_results(options.results), known_survivors()))
        return 0
    surprises = 0
    for name in options.module or MODULES:
        if not (ROOT / MODULES[name][0]).exists():
            print(f"{name}: {MODULES[name][0]} does not exist, skipped")
            continue
        surprises += run_module(name, options)
    return 1 if surprises else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--module", action="append", choices=MODULES, help="test only this module; may be given several times"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="at most N mutants of each module, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="the seed of that draw")
    parser.add_argument("--minutes", type=float, default=None, help="start no mutant after this number of minutes")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants at a time")
    parser.add_argument("--again", action="store_true", help="test the survivors without a reason again")
    parser.add_argument("--results", type=Path, default=ROOT / "mutants.jsonl")
    parser.add_argument("--report", action="store_true", help="print tables of the results and exit")
    return parser.parse_args()


def _load_libraries() -> None:
    """Import the libraries of all tests, but not greedynas, so that the fork of each mutant starts at once."""
    import hypothesis

    for library in LIBRARIES:
        importlib.import_module(library)
    # The same examples every time, without the time for finding the smallest one.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", derandomize=True, deadline=None, max_examples=25, phases=phases)


# One module


def run_module(name: str, options: argparse.Namespace) -> int:
    """Test the mutants of a module that have no result yet; return how many survive without a reason."""
    file, tests = MODULES[name]
    everything = mutants((ROOT / file).read_text())
    chosen = everything
    if options.sample is not None and options.sample < len(chosen):
        chosen = random.Random(options.seed).sample(chosen, options.sample)
    done = {result.id: result for result in read_results(options.results) if result.module == name}
    reasons = known_survivors()
    again = {r.id for r in done.values() if options.again and r.outcome == "survived" and reason(r, reasons) is None}
    missing = [mutant for mutant in chosen if mutant.id not in done or mutant.id in again]
    print(f"{name}: {len(everything)} mutants, {len(chosen)} chosen, {len(missing)} to test", flush=True)
    if missing:
        _load_libraries()
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            places = [_make_place(Path(folder) / str(job)) for job in range(options.jobs)]
            baseline = _baseline(places, tests)
            until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
            for result in run_mutants(name, missing, places, baseline, until):
                done[result.id] = result
                with options.results.open("a") as lines:
                    lines.write(json.dumps(asdict(result)) + "\n")
    results = [done[mutant.id] for mutant in chosen if mutant.id in done]
    counts = Counter(result.outcome for result in results)
    surprises = [result for result in results if result.outcome == "survived" and reason(result, reasons) is None]
    print(f"{name}: {dict(counts)}, of the survivors {len(surprises)} without a reason")
    for result in surprises:
        print(
            f"  {file}:{result.line} {result.function}: {result.operator}\n    - {result.before}\n    + {result.after}"
        )
    return len(surprises)


@dataclass(frozen=True)
class Baseline:
    """The tests without a mutation: their order, and their limits of time."""

    tests: list[str]
    order: dict[str, float]  # seconds of each test
    cpu: float
    wall: float


def _make_place(folder: Path) -> Path:
    """Make a copy of the package and its tests, without other files, as in a fresh clone."""
    folder.mkdir()
    for part in COPIED:
        source = ROOT / part
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        shutil.copytree(source, folder / part, ignore=ignored) if source.is_dir() else shutil.copy(source, folder)
    return folder


def _baseline(places: Sequence[Path], tests: list[str]) -> Baseline:
    for place in places:  # each place gets its own bytecode files, which all its mutants use
        start = time.monotonic()
        child = Child.start(place, tests, {}, 3600, write_bytecode=True)
        while not child.ended():
            time.sleep(0.05)
        if child.outcome != "survived":
            sys.exit(f"the tests fail without a mutation: {child.note.get('failed')}\n{child.log()}")
    wall = time.monotonic() - start
    print(f"  {len(child.note['seconds'])} tests, {child.cpu:.0f} s of CPU time", flush=True)
    return Baseline(tests, child.note["seconds"], 10 + 3 * child.cpu, 120 + 20 * wall)


def run_mutants(
    name: str, missing: Sequence[Mutant], places: Sequence[Path], baseline: Baseline, until: float | None
) -> Iterator[Result]:
    """Test the mutants, as many at a time as there are places."""
    file = MODULES[name][0]
    waiting, free, running = list(missing), list(places), dict[Path, tuple[Mutant, Child]]()
    while running or (waiting and (until is None or time.monotonic() < until)):
        while waiting and free and (until is None or time.monotonic() < until):
            place, mutant = free.pop(), waiting.pop(0)
            _write_source(place / file, mutant.source)
            running[place] = mutant, Child.start(place, baseline.tests, baseline.order, baseline.cpu, baseline.wall)
        time.sleep(0.02)
        for place, (mutant, child) in list(running.items()):
            if child.ended():
                del running[place]
                free.append(place)
                facts = {key: getattr(mutant, key) for key in ("id", "function", "line", "operator", "before", "after")}
                failed = child.note.get("failed")
                yield Result(module=name, outcome=child.outcome, test=failed, seconds=round(child.seconds, 1), **facts)


def _write_source(file: Path, source: str) -> None:
    file.write_text(source)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()  # Python would confuse two mutants of equal length written in the same second


# One mutant


class Child:
    """A fork that runs the tests of one place and leaves a note about them."""

    def __init__(self, pid: int, place: Path, wall: float):
        self.pid, self.place, self.wall = pid, place, wall
        self.start_time = time.monotonic()
        self.outcome, self.note, self.cpu, self.seconds = "", dict[str, object](), 0.0, 0.0

    @classmethod
    def start(
        cls,
        place: Path,
        tests: Sequence[str],
        order: dict[str, float],
        cpu: float,
        wall: float = 36000,
        write_bytecode: bool = False,
    ) -> "Child":
        (place / "note.json").unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            try:
                _run_tests(place, tests, order, cpu, write_bytecode)
            finally:
                os._exit(99)
        return cls(pid, place, wall)

    def ended(self) -> bool:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        self.seconds = time.monotonic() - self.start_time
        if pid == 0:
            if self.seconds > self.wall:
                os.killpg(self.pid, signal.SIGKILL)
            return False
        note = self.place / "note.json"
        self.note = json.loads(note.read_text()) if note.exists() else {}
        self.cpu = usage.ru_utime + usage.ru_stime
        signals = (signal.SIGXCPU, signal.SIGKILL)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in signals:
            self.outcome = "timeout"
        else:
            self.outcome = "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        return True

    def log(self) -> str:
        return (self.place / "log.txt").read_text()[-3000:]


def _run_tests(place: Path, tests: Sequence[str], order: dict[str, float], cpu: float, write_bytecode: bool) -> None:
    """Run pytest in the forked process with its own limits, then end the process."""
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, resource.RLIM_INFINITY))
    log = os.open(place / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(place)
    sys.path[0] = str(place)  # instead of tools/
    sys.dont_write_bytecode = not write_bytecode
    os.environ |= {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    os.environ["PYTEST_XDIST_WORKER"] = "mutant"  # one thread; without this, tests/conftest.py takes two
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not timed"]
    note = Note(place / "note.json", order)
    code = pytest.main([*arguments, "--hypothesis-profile=mutants", *tests], plugins=[note])
    sys.stdout.flush()
    note.write()
    os._exit(int(code))


class Note:
    """A pytest plugin that runs the fastest tests first and records their times and the first failure."""

    def __init__(self, file: Path, order: dict[str, float]):
        self.file, self.order = file, order
        self.seconds: dict[str, float] = {}
        self.failed: str | None = None

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: self.order.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def write(self) -> None:
        self.file.write_text(json.dumps({"seconds": self.seconds, "failed": self.failed}))


# Results


def read_results(file: Path) -> list[Result]:
    """Return the newest result of each mutant, in the order of the file."""
    found: dict[tuple[str, str], Result] = {}
    data = file.read_bytes() if file.exists() else b""
    for line in (gzip.decompress(data) if file.suffix == ".gz" else data).splitlines():
        result = Result(**json.loads(line))
        found[result.module, result.id] = result
    return list(found.values())


def known_survivors() -> list[dict[str, str]]:
    return yaml.safe_load(KNOWN.read_text()) if KNOWN.exists() else []


def reason(result: Result, known: Sequence[dict[str, str]]) -> str | None:
    """Return the known reason why no test should detect this mutant, or None."""
    for entry in known:
        same = entry["module"] == result.module and entry["function"] == result.function
        if same and (entry["before"], entry["after"]) == (result.before, result.after):
            return entry["why"]
    return None


def report(results: Sequence[Result], known: Sequence[dict[str, str]]) -> str:
    """Return the counts by module, then the survivors of each, grouped by the reason why no test detects them."""
    lines = ["| module | mutants | tested | killed | too slow | survived |", "|---|--:|--:|--:|--:|--:|"]
    rest = []
    for name, (file, _) in MODULES.items():
        if not (ROOT / file).exists():
            continue
        everything = mutants((ROOT / file).read_text())
        present = {mutant.id for mutant in everything}
        own = [result for result in results if result.module == name and result.id in present]
        counts = Counter(result.outcome for result in own)
        columns = (len(everything), len(own), counts["killed"], counts["timeout"], counts["survived"])
        lines.append(f"| `{name}` | {' | '.join(map(str, columns))} |")
        reasons: dict[str, list[str]] = {}
        for result in sorted(own, key=lambda result: result.line):
            if result.outcome == "survived":
                where = f"`{result.function}`: " if result.function else ""
                change = f"  - {where}`{result.before}` → `{result.after}`"
                reasons.setdefault(reason(result, known) or "?", []).append(change)
        if reasons:
            rest += ["", f"### {name}", ""]
        for why, changes in reasons.items():
            rest += [f"- {why}", *changes]
    return "\n".join([*lines, "", "## The mutants that survive", *rest])


if __name__ == "__main__":
    sys.exit(main())
