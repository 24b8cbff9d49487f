"""Text for people: cleaned of characters that could harm a terminal, with readable numbers and units."""

import logging
import unicodedata
from collections.abc import Mapping

# Invisible characters that the spelling of some languages and some emoji need.
JOINERS = "\u200c\u200d"


def clean(text: str, lines: bool = False) -> str:
    r"""Return the text with everything that is not a letter, mark, digit, symbol or space written as an escape.

    With `lines`, line breaks stay. A byte of a file name that is not UTF-8 becomes `\xff`.

    >>> clean("a\x1b[2J\nb\u202e")
    'a\\x1b[2J\\nb\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(letter if _is_harmless(letter, lines) else _escape(letter) for letter in text)


def _is_harmless(letter: str, lines: bool) -> bool:
    return (
        letter.isprintable()
        or letter in JOINERS
        or (lines and letter == "\n")
        or unicodedata.category(letter) == "Zs"  # spaces of other scripts, and non-breaking ones
    )


def _escape(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # Python's representation of a byte that it could not decode
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")


def _clean_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = clean(record.getMessage()), ()
    return True


logger = logging.getLogger("greedynas")
logger.addFilter(_clean_record)  # on the logger, so that every handler gets clean records


COSTS = {
    "macs": "multiply-adds",
    "params": "parameters",
    "latency_ms": "latency",
    "ram": "bytes of RAM",
    "flash": "bytes of flash",
}


def count(value: float) -> str:
    """Return a number with three significant digits and a unit; whole numbers below a thousand stay exact."""
    return "".join(_scaled(value))


def percent(value: float) -> str:
    return f"{value:.1%}"


def points(value: float) -> str:
    """Return a difference of two shares in percentage points."""
    return f"{100 * value:.1f} points"


def milliseconds(value: float) -> str:
    """Return a time in milliseconds with its unit; below a tenth, in microseconds."""
    return f"{_three(value)} ms" if value >= 0.1 or value <= 0 else f"{_three(1000 * value)} µs"


def size(value: float) -> str:
    """Return a number of bytes with its unit: `1.23 MB`."""
    scaled, unit = _scaled(value)
    return f"{scaled} {unit}B" if unit else f"{scaled} bytes"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def epochs(number: int) -> str:
    return "1 epoch" if number == 1 else f"{number:,} epochs"


def cost(name: str, value: float) -> str:
    """Return a cost with its unit: `1.02M multiply-adds`, `0.61 ms`."""
    return milliseconds(value) if name == "latency_ms" else f"{count(value)} {COSTS[name]}"


def table_of(values: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(str(key), "not installed" if value is None else str(value)) for key, value in values.items()]


def _scaled(value: float) -> tuple[str, str]:
    """Return a number scaled to its prefix, and the prefix: 1234567 -> ("1.23", "M")."""
    for prefix, base in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * base:
            return _three(value / base), prefix
    return f"{value:.0f}", ""


def _three(value: float) -> str:
    """Return three significant digits without an exponent; trailing zeros of a fraction are dropped."""
    text = f"{value:.{max(0, 2 - _exponent(value))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _exponent(value: float) -> int:
    return int(f"{value:.2e}".partition("e")[2]) if value else 0
