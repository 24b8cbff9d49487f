"""The setting `engine`: whether networks run in the quickest known way or as plain PyTorch would run them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from greedynas.runtime.errors import GreedyNASError

Mode = Literal["auto", "on", "off"]
MODES: tuple[Mode, ...] = ("auto", "on", "off")
_mode: Mode = "auto"


def use(mode: Mode) -> None:
    """Set when the engine is used: `auto` if it applies and is fast, `off` never, `on` if it can run (for tests)."""
    global _mode
    if mode not in MODES:
        raise GreedyNASError(f"unknown engine mode {mode!r}; known: {', '.join(MODES)}")
    _mode = mode


def mode() -> Mode:
    """Return when the engine is used."""
    return _mode


@contextmanager
def using(mode: Mode) -> Iterator[None]:
    """Use the engine in another mode within a `with` block."""
    before = _mode
    use(mode)
    try:
        yield
    finally:
        use(before)
