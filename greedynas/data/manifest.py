"""The identity of a run's images, stored in its `data.jsonl`: their names, their contents, and how they were split.

A resumed run must find the same images. Their location does not matter: files are identified by their names below the
folder that `--data` names, and by their contents.

When a run starts, every file is read once, or only its first and last 16 KiB if all files together exceed 4 GB (see
`sources`). Later, only files whose size or time of last change (ctime, which only the system can set) has changed are
read again; a copied data set is read once more.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.data.folders import shown_path
from greedynas.data.sources import Files, Splits, file_digest
from greedynas.rundir.schemas import VERSIONS
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import write_atomically

FILE = "data.jsonl"
SCHEMA_VERSION = VERSIONS["data"]
MAX_BYTES = 4 * 10**9  # about ten million images
ROLES = ("train", "val", "test", "archive")
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Manifest:
    """The identity of a run's images. Roles, names, sizes, times and hashes have one entry for each file."""

    classes: tuple[str, ...]
    whole: bool  # whether files were hashed as a whole
    roles: tuple[str, ...] = ()  # the set that a file is in
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    times: tuple[int, ...] = ()  # of the last change, in ns; 0: not trusted
    hashes: tuple[str, ...] = ()  # "": it cannot be read
    arrays: dict[str, str] = field(default_factory=dict)  # hashes of sets that are not files
    held_out: dict[str, list[int]] = field(default_factory=dict)  # rows of the training set, if it is not files
    skipped: tuple[str, ...] = ()  # images that cannot be decoded

    def digest(self) -> str:
        """Return the identity in 32 characters, which covers everything except the sizes and times."""
        found = hashlib.blake2b(digest_size=16)
        rest = [self.classes, self.whole, self.arrays, self.held_out, self.skipped]
        found.update(json.dumps(rest, sort_keys=True).encode())
        for columns in zip(self.roles, self.names, self.hashes, strict=True):
            found.update("\0".join(columns).encode(errors="surrogateescape") + b"\n")
        return found.hexdigest()

    def places(self) -> dict[str, int]:
        """Return the rows of all files by name."""
        return {name: row for row, name in enumerate(self.names)}


# Making one


def make_manifest(splits: Splits, rows: dict[str, Rows] | None, skipped: Sequence[str] = ()) -> Manifest:
    """Return the manifest of a data set; files whose hashes are unknown are read.

    Without `rows`, which define what is held out of the training set, all of it has the role `train`.
    """
    classes = tuple(splits.train.class_names[label] for label in np.unique(splits.train.labels))
    manifest = Manifest(classes, splits.whole(), skipped=tuple(skipped))
    arrays, held_out = {}, {}
    sources = splits.sources()
    held = {part: rows[part] for part in ("val", "test") if part not in sources} if rows is not None else {}
    if splits.late_test is not None:  # it is unknown until it is read at the end
        sources.pop("test", None)
    if splits.archives is not None:
        sources["archive"] = splits.archives
    for name, source in sources.items():
        if isinstance(source, Files):
            roles = [name] * len(source)
            for part, own in held.items() if name == "train" else ():
                for row in own.tolist():
                    roles[row] = part
            manifest = _with_files(manifest, source, roles)
            continue
        arrays[name] = source.all_digest
        if name == "train":
            held_out = {part: own.tolist() for part, own in held.items() if len(own)}
    return replace(manifest, arrays=arrays, held_out=held_out)


def _with_files(manifest: Manifest, source: Files, roles: Sequence[str]) -> Manifest:
    times = source.trusted_times()  # before reading: a file that changes while it is read will be read again
    hashes = source.digests(np.arange(len(source)), manifest.whole)
    return replace(
        manifest,
        roles=(*manifest.roles, *roles),
        names=(*manifest.names, *source.names()),
        sizes=(*manifest.sizes, *source.stats[0].tolist()),
        times=(*manifest.times, *times.tolist()),
        hashes=(*manifest.hashes, *(digest.decode() for digest in hashes)),
    )


def recall(kept: Manifest, splits: Splits) -> None:
    """Copy the hashes of unchanged files from a manifest into the data set, so that they are not read again."""
    splits.read_whole = kept.whole
    places = kept.places()
    for source in _file_sources(splits):
        sizes, times = source.stats
        known = np.array([places.get(name, -1) for name in source.names()], np.int64)
        rows = np.flatnonzero(known >= 0)
        old = known[rows]
        same = (np.array(kept.sizes, np.int64)[old] == sizes[rows]) & (
            np.array(kept.times, np.int64)[old] == times[rows]
        )
        source.recall(rows[same], [kept.hashes[place].encode() for place in old[same]])


def times_changed(kept: Manifest, now: Manifest) -> bool:
    """Return whether files were read again because of their times, so that the new times should be stored."""
    return any(old not in (0, new) for old, new in zip(kept.times, now.times, strict=True))


def rows_of(kept: Manifest, splits: Splits) -> dict[str, Rows]:
    """Return the split that a run started with, for a data set that has been found to be the same."""
    sources = splits.sources()
    found: dict[str, Rows] = {}
    if isinstance(splits.train, Files):
        places = kept.places()
        roles = np.array([kept.roles[places[name]] for name in splits.train.names()])
        found = {part: np.flatnonzero(roles == part) for part in ("train", "val", "test")}
    else:
        found = {part: np.array(sorted(own), np.int64) for part, own in kept.held_out.items()}
        held = np.concatenate([np.empty(0, np.int64), *found.values()])
        if len(np.unique(held)) < len(held) or (len(held) and held.max() >= len(splits.train)):
            raise GreedyNASError(f"{FILE} of this run is damaged (held_out); start a new run with another --out")
        found["train"] = np.setdiff1d(np.arange(len(splits.train)), held)
    none = np.empty(0, np.int64)
    own_test = np.arange(len(sources["test"])) if "test" in sources else found.get("test", none)
    return {"train": found["train"], "val": none if "val" in sources else found.get("val", none), "test": own_test}


def _file_sources(splits: Splits) -> list[Files]:
    sources = (*splits.sources().values(), splits.archives)
    return [source for source in sources if isinstance(source, Files)]


# Comparing two


def refuse_difference(kept: Manifest, splits: Splits, folder: Path) -> None:
    """Raise with a line that names the first difference from the data set that the run in `folder` started with.

    The split is not compared, because the run keeps its own.
    """
    now = make_manifest(splits, None)
    if change := _classes_differ(kept, now) or _names_differ(kept, now, splits) or _contents_differ(kept, now, splits):
        raise _refusal(change, folder)


def refuse_other_identity(kept: Manifest, now: Manifest, folder: Path) -> None:
    """Raise in the same way for two manifests, and also compare the split and the images that cannot be decoded."""
    if kept.digest() == now.digest():
        return
    change = _classes_differ(kept, now) or _names_differ(kept, now, None) or _contents_differ(kept, now, None)
    raise _refusal(change or _decoding_differs(kept, now) or "they are split differently", folder)


def _refusal(change: str, folder: Path) -> GreedyNASError:
    return GreedyNASError(
        f"{change}: the images are not those that {folder} was started with; "
        "restore them, or start a new run with another --out"
    )


def _classes_differ(kept: Manifest, now: Manifest) -> str:
    lost = [name for name in kept.classes if name not in now.classes]
    new = [name for name in now.classes if name not in kept.classes]
    if lost:
        return f"class {lost[0]!r} is missing{f' and class {new[0]!r} is new' if new else ''}"
    return f"class {new[0]!r} is new" if new else ""


def _names_differ(kept: Manifest, now: Manifest, splits: Splits | None) -> str:
    before, after = kept.places(), now.places()
    lost = [name for name in kept.names if name not in after]
    new = [name for name in now.names if name not in before]
    if not lost:
        return f"{_shown(new[0])} is new{_and_more(len(new) - 1)}" if new else ""
    content = kept.hashes[before[lost[0]]]
    twin = next((name for name in new if content and now.hashes[after[name]] == content), None)
    if twin is not None:
        return f"{_shown(lost[0])} is now called {_shown(twin)}{_and_more(len(lost) + len(new) - 2)}"
    return f"{_shown(lost[0])} is missing{_out_of_reach(lost[0], splits)}{_and_more(len(lost) + len(new) - 1)}"


def _and_more(count: int) -> str:
    return f" ({count:,} more file{'s are' if count > 1 else ' is'} missing or new)" if count > 0 else ""


def _out_of_reach(name: str, splits: Splits | None) -> str:
    """Return a note on the folder that cannot be listed, if that is why a file is missing, else an empty text."""
    for source in _file_sources(splits) if splits is not None else ():
        for folder, why in source.unlisted:
            if (source.root.decode(errors="surrogateescape") + name).startswith(folder + "/"):
                return f" ({folder} cannot be listed: {why})"
    return ""


def _contents_differ(kept: Manifest, now: Manifest, splits: Splits | None) -> str:
    places = now.places()
    for row, name in enumerate(kept.names):
        place = places[name]
        if kept.hashes[row] == now.hashes[place]:
            continue
        if not kept.hashes[row]:
            return f"{_shown(name)} can be read now, but could not be read when the run started"
        if not now.hashes[place]:
            return f"{_shown(name)} cannot be read{_why_unreadable(name, splits)}"
        return f"{_shown(name)} has changed"
    for part in sorted({*kept.arrays, *now.arrays}):
        if kept.arrays.get(part) != now.arrays.get(part):
            return f"the {part} images have changed"
    return ""


def _why_unreadable(name: str, splits: Splits | None) -> str:
    for source in _file_sources(splits) if splits is not None else ():
        names = source.names()
        if name in names:
            return f" ({file_digest(source.files[names.index(name)], whole=False)[1]})"
    return ""


def _decoding_differs(kept: Manifest, now: Manifest) -> str:
    for name in now.skipped:
        if name not in kept.skipped:
            return f"{_shown(name)} cannot be decoded here"
    for name in kept.skipped:
        if name not in now.skipped:
            return f"{_shown(name)} can be decoded now, but was left out when the run started"
    return ""


def _shown(name: str) -> str:
    return shown_path(name)


# Reading and writing


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a run, or None if it has none (yet)."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
        with file.open("rb") as handle:
            return _parsed(json.loads(line) for line in handle)
    except OSError as error:
        raise GreedyNASError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, StopIteration) as error:
        raise GreedyNASError(
            f"{file} is damaged ({type(error).__name__}: {error}); start a new run with another --out"
        ) from None


def _parsed(lines: Iterator[Any]) -> Manifest:
    head = next(lines)
    if head["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema version {head['schema_version']!r:.20}")
    columns: dict[str, list[Any]] = {"roles": [], "names": [], "sizes": [], "times": [], "hashes": []}
    for line in lines:
        for column, value, kind in zip(columns.values(), _values(line), (str, str, int, int, str), strict=True):
            column.append(_of(kind, value))
    if not set(columns["roles"]) <= set(ROLES) or len(set(columns["names"])) < len(columns["names"]):
        raise ValueError("a file is in no set or in two")
    held_out = {part: [_of(int, row) for row in rows] for part, rows in head["held_out"].items()}
    if not set(held_out) <= {"val", "test"} or min((row for rows in held_out.values() for row in rows), default=0) < 0:
        raise ValueError("held_out")
    found = Manifest(
        classes=tuple(_of(str, name) for name in head["classes"]),
        whole=_of(bool, head["whole"]),
        **{name: tuple(column) for name, column in columns.items()},
        arrays={_of(str, part): _of(str, digest) for part, digest in head["arrays"].items()},
        held_out=held_out,
        skipped=tuple(_of(str, name) for name in head["skipped"]),
    )
    if found.digest() != head["digest"]:
        raise ValueError("its content does not match its digest")
    return found


def _values(line: Any) -> list[Any]:
    return [line["set"], line["name"], line["bytes"], line["changed_ns"], line["hash"]]


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind or (isinstance(value, int) and not -1 <= value < 2**63):
        raise TypeError(f"{value!r:.40} should be of type {kind.__name__}")
    return value


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a run: one line for the whole set, then one for each file."""
    head = {
        "schema_version": SCHEMA_VERSION,
        "digest": manifest.digest(),
        "classes": manifest.classes,
        "whole": manifest.whole,
        "arrays": manifest.arrays,
        "held_out": manifest.held_out,
        "skipped": manifest.skipped,
    }
    keys = ("set", "name", "bytes", "changed_ns", "hash")
    columns = (manifest.roles, manifest.names, manifest.sizes, manifest.times, manifest.hashes)
    lines = [json.dumps(head), *(json.dumps(dict(zip(keys, row, strict=True))) for row in zip(*columns, strict=True))]
    write_atomically(folder / FILE, ("\n".join(lines) + "\n").encode())
