"""A study: a folder of parts, and their combined results as `study.json`, a page and tables.

    parts = [Part(f"{method}-{seed}", train_and_rank, {...}) for ...]
    done = run_parts(folder, parts, console, jobs)
    publish(folder, Study("macro", ...), console)

A part is a function of its settings: `work(folder, settings, console) -> result`. Its result is written when it is
complete (`parts/NAME.json`, arrays in `parts/NAME.npz`); repeating a command computes only missing parts. A part may
keep files in `parts/NAME/`, such as a run directory from which it resumes. More parts may be added at any time.
"""

import io
import json
import math
import multiprocessing
import os
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from greedynas.reporting.cells import Table, rich_table
from greedynas.rundir.locks import Lock
from greedynas.rundir.run_directory import differences, versions
from greedynas.rundir.schemas import VERSIONS
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_arrays, read_json, write_atomically, write_json
from greedynas.runtime.parallel import ranks
from greedynas.runtime.signals import Stopped, signals_caught
from greedynas.runtime.terminal import make_console
from greedynas.runtime.text import duration, size, table_of
from greedynas.settings.loading import validated

if TYPE_CHECKING:
    from greedynas.reporting.charts import Chart

SCHEMA_VERSION = VERSIONS["study"]
QUICK_NOTE = "Computed with --quick: small sizes that show how the study works; the results are not meaningful."
Work = Callable[[Path, dict[str, Any], Console], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """A piece of work. `work` is a module-level function, so that another process can import it."""

    name: str
    work: Work
    settings: dict[str, Any]  # everything that the result depends on, as JSON
    free: frozenset[str] = (
        frozenset()
    )  # settings that the result does not depend on, which may differ from those of a finished part


@dataclass(frozen=True)
class Done:
    """A finished part."""

    name: str
    settings: dict[str, Any]
    result: dict[str, Any]
    arrays: dict[str, NDArray[Any]] = field(repr=False)
    seconds: float
    machine: str
    versions: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """Charts side by side under one heading, such as the paper's figure and ours."""

    title: str
    charts: "dict[str, Chart]"  # by label: "The paper", "Ours"
    note: str = ""


@dataclass(frozen=True)
class Study:
    """The results of a study."""

    name: str
    title: str  # the answer, in one line
    lead: str
    settings: dict[str, Any]
    results: dict[str, Any]
    tables: list[Table]
    draw: Callable[[], list[Panel]]  # needs plotly
    parts: Sequence[Done] = ()  # the parts behind the results, perhaps from other machines


# Parts


def run_parts(folder: Path, parts: Sequence[Part], console: Console, jobs: int | None = None) -> dict[str, Done]:
    """Return the results of all parts by name, after computing the missing ones, `jobs` at a time.

    Under torchrun, all ranks work together on one part after the other.
    """
    with _locked(folder) if ranks.is_first() else nullcontext():
        missing = _missing(folder, parts)
        if len(missing) < len(parts):
            _say(console, f"{len(parts) - len(missing)} of {len(parts)} parts are already finished")
        jobs = min(jobs or default_jobs(), max(len(missing), 1))
        if jobs == 1 or ranks.size() > 1:
            for part in missing:
                _compute(folder, part, console)
                ranks.on_first(partial(_report_finished, part.name, len(parts), folder, console))
        else:
            _run_in_processes(folder, missing, jobs, len(parts), console)
        return {part.name: read_part(folder, part.name) for part in parts}


def _missing(folder: Path, parts: Sequence[Part]) -> list[Part]:
    """Return the parts that have no result yet; rank 0 decides."""

    def names() -> list[str]:
        for part in parts:
            _refuse_differences(folder, part)
        return [part.name for part in parts if not _file(folder, part.name).exists()]

    missing = ranks.on_first(names)
    return [part for part in parts if part.name in missing]


def default_jobs() -> int:
    """Return the number of GPUs, or of CPU cores on a machine without GPUs."""
    return torch.cuda.device_count() or cores()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_part(folder: Path, name: str) -> Done:
    saved = read_json(_file(folder, name))
    try:
        arrays = {}
        if saved["arrays"]:
            arrays = read_arrays(_file(folder, name).with_suffix(".npz"), saved["arrays"])
        settings = _completed(saved["settings"], f"{folder}, part {name}")
        return Done(
            name, settings, saved["result"], arrays, saved["seconds"], saved["machine"], dict(saved["versions"])
        )
    except (KeyError, TypeError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise GreedyNASError(f"{_file(folder, name)} cannot be read ({error}); remove it to compute it again") from None


def machine() -> str:
    """Return a description of the processor that does the work."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} of {cores()} cores"


def _compute(folder: Path, part: Part, console: Console) -> str:
    """Compute a part and write its result; return its name."""
    start = time.perf_counter()
    result = part.work(folder / "parts" / part.name, part.settings, console)
    arrays = {key: value for key, value in result.items() if isinstance(value, np.ndarray)}
    if arrays:  # written before the JSON file, which marks the part as finished
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        write_atomically(_file(folder, part.name).with_suffix(".npz"), buffer.getvalue())
    record = {
        "schema_version": SCHEMA_VERSION,
        "part": part.name,
        "machine": machine(),
        "versions": versions(),
        "settings": part.settings,
        "seconds": time.perf_counter() - start,
        "arrays": sorted(arrays),
        "result": json_safe({key: value for key, value in result.items() if key not in arrays}),
    }
    write_json(_file(folder, part.name), record)
    return part.name


def _run_in_processes(folder: Path, parts: Sequence[Part], jobs: int, total: int, console: Console) -> None:
    context = multiprocessing.get_context("spawn")
    numbers = context.SimpleQueue()
    for number in range(jobs):
        numbers.put(number)
    _say(console, f"{len(parts)} parts to compute, {jobs} at a time")
    start = (numbers, max(1, cores() // jobs), torch.cuda.device_count())
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=start) as pool:
        running = {pool.submit(_compute_quietly, folder, part) for part in parts}
        try:
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    _report_finished(_name_of(future), total, folder, console)
        except (
            BaseException
        ):  # report the error now, not after hours; the other parts resume from their checkpoints the next time
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _compute_quietly(folder: Path, part: Part) -> str:
    """Compute a part in a worker process, which writes a checkpoint of its training when it is stopped."""
    try:
        with signals_caught():
            return _compute(folder, part, make_console(quiet=True))
    except Stopped as stopped:
        os._exit(stopped.exit_code)


def _start_worker(numbers: Any, threads: int, gpus: int) -> None:
    number = numbers.get()
    if gpus > 1:  # in time, because CUDA reads the variable on first use
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(gpu) for gpu in range(gpus))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number % gpus]
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _name_of(future: "Future[str]") -> str:
    try:
        return future.result()
    except BrokenProcessPool:
        raise GreedyNASError(
            "a process that worked on a part was killed, perhaps because memory ran out; give the command again with fewer --jobs"
        ) from None


def _report_finished(name: str, total: int, folder: Path, console: Console) -> None:
    done = len(list((folder / "parts").glob("*.json")))
    seconds = read_json(_file(folder, name))["seconds"]
    _say(console, f"{name}: {duration(seconds)} ({done} of {max(done, total)} parts)")


def _refuse_differences(folder: Path, part: Part) -> None:
    saved = read_json(_file(folder, part.name))
    if not saved:
        return
    wanted = json.loads(json.dumps(part.settings))
    found = differences(_completed(saved.get("settings", {}), f"{folder}, part {part.name}"), wanted)
    different = [text for key, text in found.items() if key not in part.free]
    if different:
        raise GreedyNASError(
            f"{folder} holds the part {part.name} with other settings: {'; '.join(different):.600}. "
            "Name another folder, or use the same settings"
        )


def _completed(settings: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a part in today's form, whichever version computed it."""
    if not isinstance(settings.get("config"), dict):
        return settings
    config = validated(modernised(settings["config"]), source)
    return {**settings, "config": config.model_dump(mode="json")}


def modernised(config: dict[str, Any]) -> dict[str, Any]:
    """Return settings of version 0.1 under their current names; removed settings must have had no effect."""
    train, search = dict(config.get("train", {})), dict(config.get("search", {}))
    experimental = dict(config.get("experimental", {}))
    for name, value, section in (
        ("snapshots", 1, train),
        ("split_after_identity", False, train),
        ("additive", 0.0, search),
    ):
        if section.get(name, value) != value:
            experimental[name] = section[name]
        section.pop(name, None)
    for name, value in (("ema", 0.0), ("supernets", 1)):
        if train.get(name, value) == value:
            train.pop(name, None)
    rest = {key: value for key, value in config.items() if key != "samplers"}
    own = dict(dict(config.get("samplers", {})).get(train.get("sampler"), {}))  # `train` already has its values
    if "max_epochs" in own:
        rest["study_epochs"] = own["max_epochs"]
    return {**rest, "train": train, "search": search, "experimental": experimental}


def _file(folder: Path, name: str) -> Path:
    return folder / "parts" / f"{name}.json"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a study, so that one process at a time works on it."""
    if folder.is_dir() and not (folder / "parts").exists() and any(folder.iterdir()):
        raise GreedyNASError(f"{folder} is not empty and not a greedynas study; name another folder")
    try:
        (folder / "parts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GreedyNASError(f"cannot write to {folder}: {error.strerror}") from None
    lock = Lock(folder / "parts")
    try:
        yield
    finally:
        lock.close()


# The end of a study


def publish(folder: Path, study: Study, console: Console) -> dict[str, Any]:
    """Write `study.json` and the page, print the tables, and return what `--json` prints."""
    return ranks.on_first(lambda: _publish(folder, study, console))


def _publish(folder: Path, study: Study, console: Console) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    if study.settings.get("quick"):
        study = replace(study, lead=f"{study.lead} {QUICK_NOTE}")
    record = {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "title": study.title,
        **_made_by(study.parts),
        "settings": study.settings,
        "results": study.results,
    }
    record = json_safe(record)
    write_json(folder / "study.json", record)
    for table in study.tables:
        console.print(rich_table(table))
    _say(console, study.title)
    if study.settings.get("quick"):
        _say(console, QUICK_NOTE)
    if find_spec("plotly") is None:
        _say(console, f"{folder / 'study.json'}; for the page, install plotly and give the same command again")
        return record
    file = folder / "study.html"
    write_atomically(file, _page(folder, study, record).encode("utf-8", errors="replace"))
    _say(console, f"Study: {file} ({size(file.stat().st_size)}, opens in any browser)")
    return {**record, "page": str(file)}


def _made_by(parts: Sequence[Done]) -> dict[str, Any]:
    """Return the machines and versions that computed the parts; for a study without parts, those of this process."""
    if not parts:
        return {"machine": machine(), "versions": versions()}
    keys = dict.fromkeys(key for part in parts for key in part.versions)
    found = {key: list(dict.fromkeys(part.versions.get(key) for part in parts)) for key in keys}
    return {
        "machine": ", ".join(sorted({part.machine for part in parts})),
        "versions": {key: one[0] if len(one) == 1 else ", ".join(map(str, one)) for key, one in found.items()},
    }


def _page(folder: Path, study: Study, record: dict[str, Any]) -> str:
    from greedynas.reporting.pages import render_page

    charts: dict[str, Chart] = {}
    panels = []
    for panel in study.draw():
        names = {f"chart{len(charts) + i}": label for i, label in enumerate(panel.charts)}
        charts |= dict(zip(names, panel.charts.values(), strict=True))
        panels.append({"title": panel.title, "note": panel.note, "charts": list(names.items())})
    return render_page(
        "study.html",
        charts,
        study=study,
        folder=folder.resolve().name,
        panels=panels,
        machine=record["machine"],
        versions=table_of(record["versions"]),
        settings=json.dumps(record["settings"], indent=1, ensure_ascii=False),
    )


def json_safe(value: Any) -> Any:
    """Convert a value to plain JSON types: numpy numbers become Python numbers, non-finite numbers null."""
    if isinstance(value, dict):
        return {str(key): json_safe(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(inner) for inner in value]
    if isinstance(value, np.generic):
        return json_safe(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)
