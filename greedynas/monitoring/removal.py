"""The removal of runs: only what greedynas has written, never a run that is in use, nothing outside of it."""

import shutil
from pathlib import Path

from greedynas.rundir.locks import Lock
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.text import clean

# What greedynas writes at the top of a run directory; `model.*` and temporary files come on top.
WRITTEN = frozenset(
    (
        ".lock",
        "arch.json",
        "config.yaml",
        "data.json",
        "data.jsonl",
        "hub",
        "latency.json",
        "log.txt",
        "metrics.jsonl",
        "mlruns",
        "models",
        "plan.json",
        "progress.json",
        "report.html",
        "searches",
        "studies",
        "supernet",
        "tensorboard",
        "trackers.json",
    )
)


def check_removable(folder: Path) -> None:
    """Refuse to remove what is not a run, or holds files that greedynas has not written.

    A damaged run can be removed, as long as all names in it are known.

    Raises:
        GreedyNASError: It must not be removed; the message says why.
    """
    if folder.is_symlink():
        raise GreedyNASError(f"{folder} is a link; name the run directory that it points to")
    if not folder.is_dir():
        raise GreedyNASError(f"there is no folder {folder}")
    entries = sorted(entry.name for entry in folder.iterdir())
    if "config.yaml" not in entries or not {"log.txt", ".lock"} & set(entries):
        raise GreedyNASError(f"{folder} is not a run directory, so it is not removed")
    foreign = [name for name in entries if not _is_ours(name)]
    if foreign:
        raise GreedyNASError(
            f"{folder} holds {clean(foreign[0])}, which greedynas has not written: move it away, or remove the folder "
            "by other means"
        )


def remove_run(folder: Path) -> None:
    """Remove a run directory with everything in it, unless a process works on it.

    Raises:
        GreedyNASError: It is in use, is not a run directory, or could not be removed.
    """
    check_removable(folder)
    lock = Lock(folder)
    try:
        shutil.rmtree(folder.resolve())  # links in it are removed, not followed; "." itself could not be removed
    except OSError as error:
        raise GreedyNASError(f"cannot remove {error.filename or folder}: {error.strerror}") from None
    finally:
        lock.close()


def _is_ours(name: str) -> bool:
    return name in WRITTEN or name.startswith("model.") or name.endswith(".tmp")
