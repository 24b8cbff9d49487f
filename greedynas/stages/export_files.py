"""The files of an export in a network's folder: their names, `export.json`, and the copies at the top of the run."""

import hashlib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from greedynas.deploy.formats import FORMATS
from greedynas.deploy.formats.format import CARD, Classifier, Format, format_of, known_formats
from greedynas.models.model_file import WEIGHTS
from greedynas.rundir.schemas import VERSIONS, Exported, read_record
from greedynas.runtime.devices import cpu_name
from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.runtime.files import TEMPORARY, move_atomically, read_json, write_atomically

SCHEMA_VERSION = VERSIONS["export"]
RECORD = "export.json"
STAGING = f"export{TEMPORARY}"  # the folder in which files are made and checked
FILE_NAME = re.compile(r"model\.[A-Za-z0-9_.\-]+")


@dataclass(frozen=True)
class Converted:
    """A file that was converted and checked.

    Attributes:
        format: Its format.
        precision: Its precision.
        classify: The function that runs it; None where this machine cannot run it.
        agrees: The largest difference from PyTorch, if it was compared.
        recorded: Its entry of an earlier export, whose accuracy is kept; None: it is new.
    """

    format: Format
    precision: str
    classify: Classifier | None
    agrees: dict[str, Any] | None = None
    recorded: dict[str, Any] | None = None

    @property
    def file(self) -> str:
        return self.format.file_name(self.precision)


@dataclass(frozen=True)
class Timing:
    """The latency of a file in milliseconds: undisturbed, and as the rounds of the measurement had it.

    Attributes:
        lowest: The lowest median of a round, which is that of a quiet machine.
        median: The median of the rounds.
        spread: The interquartile range of the rounds.
    """

    lowest: float
    median: float
    spread: float

    @classmethod
    def of(cls, rounds: NDArray[np.float64]) -> "Timing":
        """Return the timing from the median of each round."""
        low, middle, high = np.percentile(rounds, [25, 50, 75]).tolist()
        return cls(float(rounds.min()), middle, high - low)


def check_names(formats: Sequence[Format]) -> None:
    """Refuse formats whose files are not named like the network's other files, or would overwrite each other.

    Args:
        formats: The formats of one export.

    Raises:
        GreedyNASError: A file name does not begin with `model.`, or two formats write the same file.
    """
    owners: dict[str, str] = {}
    for format in formats:
        for name in _file_names(format):
            if not FILE_NAME.fullmatch(name) or name == CARD:
                raise GreedyNASError(f"the format {format.name!r} cannot write {name!r}: use a name like model.onnx")
            if owners.setdefault(name, format.name) != format.name:
                raise GreedyNASError(f"the formats {owners[name]!r} and {format.name!r} both write {name}")


def check_precisions(formats: Sequence[Format], precisions: Sequence[str] | None) -> None:
    """Refuse a precision that none of the formats has."""
    known = list(dict.fromkeys(one for format in formats for one in format.precisions))
    for precision in precisions or ():
        if precision not in known:
            raise unknown("precision", precision, known)


def missing_precisions(
    format: Format, precisions: Sequence[str] | None, earlier: dict[str, Any] | None
) -> tuple[str, ...]:
    """Return the precisions of a format that are wanted and that an earlier export has not made or tried."""
    wanted = [one for one in format.precisions if precisions is None or one in (format.reference, *precisions)]
    tried = {entry["file"] for part in ("files", "skipped") for entry in (earlier or {}).get(part, ())}
    return tuple(one for one in wanted if format.file_name(one) not in tried)


def reopened(home: Path, earlier: dict[str, Any] | None) -> list[Converted]:
    """Open the files of an earlier export again, as far as their runtimes are installed, to time them beside new ones."""
    found = []
    for entry in (earlier or {}).get("files", ()):
        format = format_of_entry(entry)
        if format is not None and format.is_installed():
            found.append(
                Converted(format, entry["precision"], format.open(home / entry["file"]), entry.get("agrees"), entry)
            )
    return found


def in_order(
    new: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]], formats: Sequence[Format]
) -> list[dict[str, Any]]:
    """Return the entries of files, with those of an earlier export whose runtime is missing here, by format."""
    entries = {entry["file"]: entry for entry in (*earlier, *new)}
    names = [format.file_name(precision) for format in formats for precision in format.precisions]
    order = {name: number for number, name in enumerate(names)}
    return sorted(entries.values(), key=lambda entry: order.get(entry["file"], len(order)))


def _file_names(format: Format) -> list[str]:
    return [
        name for precision in format.precisions for name in (format.file_name(precision), *format.companions(precision))
    ]


def file_facts(home: Path, one: Converted, top1: float | None, latency: Timing | None) -> dict[str, Any]:
    """Return the entry of `export.json` for a file."""
    parts = one.format.companions(one.precision)
    size = sum(_size_of(home / name) for name in (one.file, *parts))
    facts: dict[str, Any] = {"file": one.file, "format": one.format.name, "precision": one.precision, "bytes": size}
    top1 = top1 if one.recorded is None else one.recorded.get("top1")
    facts |= {"sha256": digest_of(home / one.file), "top1": top1}
    facts |= {"latency_ms": None if latency is None else latency.lowest}
    if latency is not None:
        facts |= {"latency_median_ms": latency.median, "latency_iqr_ms": latency.spread}
    facts |= {"companions": {name: digest_of(home / name) for name in parts}} if parts else {}
    return facts | ({} if one.agrees is None else {"agrees": one.agrees})


def this_machine(formats: Sequence[Format], earlier: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the processor and the runtimes, which decide whether a precision runs here and how fast.

    Those of an earlier export are kept where they are not installed here.
    """
    here = [format for format in formats if format.is_installed()]
    runtimes = dict.fromkeys(format.runtime() for format in here if not format.is_pytorch)
    if len(here) < len(formats) and earlier is not None:
        names = {runtime.split()[0] for runtime in runtimes}
        runtimes |= {one: None for one in earlier["runtime"].split(", ") if one.split()[0] not in names}
    return {"machine": cpu_name(), "runtime": ", ".join(runtimes) or f"torch {torch.__version__}"}


def finished_export(home: Path, digest: str) -> dict[str, Any] | None:
    """Return an earlier export if it is complete and need not be repeated.

    Args:
        home: The folder of the network.
        digest: The SHA-256 of the weights.

    Returns:
        The content of `export.json`; None if it belongs to other weights, a file is missing or damaged, or another
        machine or version left out a file that may work here.
    """
    try:
        result = read_record(home / RECORD, Exported)
        ours = result["schema_version"] == SCHEMA_VERSION and result["weights"] == digest
        if not ours or result["model"] != home.name or not all(_is_whole(home, entry) for entry in result["files"]):
            return None  # it belongs to other weights, was not written by greedynas, or is damaged
        formats = [FORMATS[name]() for name in result["formats"] if name in FORMATS]
        card = all(format.card == "inside" for format in formats) or (home / CARD).is_file()
        complete = len(formats) == len(result["formats"])  # without its plugin, a format cannot be tried again
        here = not result["skipped"] or not complete or this_machine(formats, result).items() <= result.items()
        return result if card and here else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ImportError):
        return None


def _is_whole(home: Path, entry: dict[str, Any]) -> bool:
    """Return whether the files of an entry have permitted names and the recorded content.

    If the plugin of the format is not loaded, every name that a format could use is permitted.
    """
    format = format_of_entry(entry)
    names = {entry["file"]: entry["sha256"], **entry.get("companions", {})}
    known = all(FILE_NAME.fullmatch(name) for name in names) if format is None else set(names) <= {*_file_names(format)}
    return known and all(digest_of(home / name) == expected for name, expected in names.items())


def format_of_entry(entry: dict[str, Any]) -> Format | None:
    """Return the format of an entry in `export.json`, by the file's name where an older version wrote no format."""
    name = entry.get("format")
    if name is None:
        return format_of(Path(entry["file"]))
    return FORMATS[name]() if name in FORMATS else None


def remove_old(home: Path, published: Path | None) -> None:
    """Remove the exported files of earlier weights, so that none is left if the new export fails."""
    formats = list(known_formats())
    names = {name for format in formats for name in _file_names(format)} | _recorded_names(home)
    for name in (RECORD, *sorted(name for name in names if FILE_NAME.fullmatch(name) and name not in (WEIGHTS, CARD))):
        remove(home / name)
    if published is not None:
        for name in sorted({name for format in formats for name in _published_names(format)} - {WEIGHTS}):
            remove(published / name)


def _recorded_names(home: Path) -> set[str]:
    """Return the files of an earlier export, including those of a plugin that is no longer installed."""
    try:
        return {str(entry["file"]) for entry in read_json(home / RECORD)["files"]}
    except (GreedyNASError, KeyError, TypeError):
        return set()


def _published_names(format: Format) -> list[str]:
    if not format.published:
        return []
    card = [CARD] if format.card == "beside" else []
    return [format.file_name(format.reference), *format.companions(format.reference), *card]


def publish(home: Path, folder: Path, formats: Sequence[str]) -> None:
    """Copy the reference files of the chosen network to the top of the run."""
    known = [FORMATS[name]() for name in formats if name in FORMATS]  # without its plugin, a file is not copied
    for name in (name for format in known for name in _published_names(format)):
        if not (folder / name).is_file() or digest_of(folder / name) != digest_of(home / name):
            write_atomically(folder / name, (home / name).read_bytes())


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of a folder's files."""
    if file.is_dir():
        inside = sorted(part for part in file.rglob("*") if part.is_file())
        names = [f"{part.relative_to(file).as_posix()} {digest_of(part)}" for part in inside]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def move(source: Path, target: Path) -> None:
    """Move a file or a folder to its place, where an older one may be."""
    if source.is_dir():
        remove(target)
    move_atomically(source, target)


def remove(file: Path) -> None:
    """Remove a file, or the folder that a format writes as one, if it exists."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def _size_of(file: Path) -> int:
    parts = [part for part in file.rglob("*") if part.is_file()] if file.is_dir() else [file]
    return sum(part.stat().st_size for part in parts)
