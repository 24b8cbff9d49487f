"""How much a command prints: the options --quiet and --verbose."""

import logging
from typing import Any

from greedynas.runtime.terminal import LINE_SECONDS

VERBOSE_SECONDS = 5.0  # between two lines of progress

_chosen = "normal"


def choose(name: str) -> None:
    """Set the volume of this command: "quiet", "normal" or "verbose"."""
    global _chosen
    _chosen = name
    if name == "verbose":
        _show_log()


def console_options() -> dict[str, Any]:
    """Return the options of a console at the chosen volume."""
    return {"quiet": _chosen == "quiet", "line_seconds": VERBOSE_SECONDS if _chosen == "verbose" else LINE_SECONDS}


def _show_log() -> None:
    """Show what goes to `log.txt` on standard error as well, without the lines of progress, which are shown anyway."""
    logger = logging.getLogger("greedynas")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno == logging.INFO and not hasattr(record, "progress"))
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
