"""The files of an export in the folder of a network: their names, `export.json`, and copies at the top of the run."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from greedynas.deploy.formats import FORMATS
from greedynas.deploy.formats.format import CARD, Classifier, Format, format_of, known_formats
from greedynas.models.model_file import WEIGHTS
from greedynas.rundir.schemas import VERSIONS, Exported, read_record
from greedynas.runtime.devices import cpu_name
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import TEMPORARY, read_json, write_atomically

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
        classify: What runs it; None where this machine cannot.
        agrees: How far it is from PyTorch, if it was compared.
    """

    format: Format
    precision: str
    classify: Classifier | None
    agrees: dict[str, Any] | None = None

    @property
    def file(self) -> str:
        return self.format.file_name(self.precision)


def check_names(formats: Sequence[Format]) -> None:
    """Refuse formats whose files would lie elsewhere than others of the network, or replace each other.

    Args:
        formats: The formats of one export.

    Raises:
        GreedyNASError: A name does not begin with `model.`, or two formats have it.
    """
    owners: dict[str, str] = {}
    for format in formats:
        for name in _file_names(format):
            if not FILE_NAME.fullmatch(name) or name == CARD:
                raise GreedyNASError(f"the format {format.name!r} cannot write {name!r}: names are like model.onnx")
            if owners.setdefault(name, format.name) != format.name:
                raise GreedyNASError(f"the formats {owners[name]!r} and {format.name!r} both write {name}")


def _file_names(format: Format) -> list[str]:
    return [
        name for precision in format.precisions for name in (format.file_name(precision), *format.companions(precision))
    ]


def file_facts(home: Path, one: Converted, top1: float | None, latency: float | None) -> dict[str, Any]:
    """Return what `export.json` says of a file."""
    parts = one.format.companions(one.precision)
    size = sum((home / name).stat().st_size for name in (one.file, *parts))
    facts: dict[str, Any] = {"file": one.file, "format": one.format.name, "precision": one.precision, "bytes": size}
    facts |= {"sha256": digest_of(home / one.file), "top1": top1, "latency_ms": latency}
    facts |= {"companions": {name: digest_of(home / name) for name in parts}} if parts else {}
    return facts | ({} if one.agrees is None else {"agrees": one.agrees})


def this_machine(formats: Sequence[Format]) -> dict[str, str]:
    """Return what decides whether a precision can be run, and how fast."""
    runtimes = dict.fromkeys(format.runtime() for format in formats if not format.is_pytorch)
    return {"machine": cpu_name(), "runtime": ", ".join(runtimes) or f"torch {torch.__version__}"}


def finished_export(home: Path, digest: str) -> dict[str, Any] | None:
    """Return an earlier export, if it is whole and need not be done again.

    Args:
        home: The folder of the network.
        digest: The SHA-256 of the weights.

    Returns:
        What `export.json` holds; None where it is of other weights, a file is missing or damaged, or it left something out on
        another machine or in another version, which may work here.
    """
    try:
        result = read_record(home / RECORD, Exported)
        ours = result["schema_version"] == SCHEMA_VERSION and result["weights"] == digest
        if not ours or result["model"] != home.name or not all(_is_whole(home, entry) for entry in result["files"]):
            return None  # of other weights, or not written by us, or damaged
        formats = [FORMATS[name]() for name in result["formats"] if name in FORMATS]
        card = all(format.card == "inside" for format in formats) or (home / CARD).is_file()
        complete = len(formats) == len(result["formats"])  # without its plugin, a format cannot be tried again
        here = not result["skipped"] or not complete or this_machine(formats).items() <= result.items()
        return result if card and here else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ImportError):
        return None


def _is_whole(home: Path, entry: dict[str, Any]) -> bool:
    """Return whether the files of an entry have names of ours and the content that the record says.

    Of a format whose plugin is not here, the names may be any that a format can have.
    """
    format = format_of_entry(entry)
    names = {entry["file"]: entry["sha256"], **entry.get("companions", {})}
    known = all(FILE_NAME.fullmatch(name) for name in names) if format is None else set(names) <= {*_file_names(format)}
    return known and all(digest_of(home / name) == expected for name, expected in names.items())


def format_of_entry(entry: dict[str, Any]) -> Format | None:
    """Return the format of a file in `export.json`; those of older versions do not name it."""
    name = entry.get("format")
    if name is None:
        return format_of(Path(entry["file"]))
    return FORMATS[name]() if name in FORMATS else None


def remove_old(home: Path, published: Path | None) -> None:
    """Remove files of other weights: they must not stay where the new ones fail."""
    formats = list(known_formats())
    names = {name for format in formats for name in _file_names(format)} | _recorded_names(home)
    for name in (RECORD, *sorted(name for name in names if FILE_NAME.fullmatch(name) and name not in (WEIGHTS, CARD))):
        (home / name).unlink(missing_ok=True)
    if published is not None:
        for name in sorted({name for format in formats for name in _published_names(format)} - {WEIGHTS}):
            (published / name).unlink(missing_ok=True)


def _recorded_names(home: Path) -> set[str]:
    """Return the files of an earlier export, maybe of a plugin that is not here any more."""
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
    """Put the reference files of the chosen network at the top of the run as well."""
    known = [FORMATS[name]() for name in formats if name in FORMATS]  # without its plugin, a file stays where it is
    for name in (name for format in known for name in _published_names(format)):
        if not (folder / name).is_file() or digest_of(folder / name) != digest_of(home / name):
            write_atomically(folder / name, (home / name).read_bytes())


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
