"""Numbers as people read them: 1.02M, 86.4%, 0.61 ms, 163 kB."""

from collections.abc import Mapping

from greedynas.budget import Budget

COSTS = {"macs": "multiply-adds", "params": "parameters", "latency_ms": "latency"}


def count(value: float) -> str:
    """Three significant digits and a unit; whole numbers below a thousand stay as they are."""
    return "".join(_scaled(value))


def percent(value: float) -> str:
    return f"{value:.1%}"


def points(value: float) -> str:
    """A difference of two shares."""
    return f"{100 * value:.1f} points"


def milliseconds(value: float) -> str:
    return f"{_three(value)} ms"


def size(value: float) -> str:
    """Bytes."""
    scaled, unit = _scaled(value)
    return f"{scaled} {unit}B" if unit else f"{scaled} bytes"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def epochs(number: int) -> str:
    return "1 epoch" if number == 1 else f"{number:,} epochs"


def cost(name: str, value: float) -> str:
    """With its unit: `1.02M multiply-adds`, `0.61 ms`."""
    return milliseconds(value) if name == "latency_ms" else f"{count(value)} {COSTS[name]}"


def limits(budget: Budget) -> str:
    """`at most 1M multiply-adds and at least …`; empty without a limit."""
    told = []
    for name, (low, high) in budget.limits().items():
        of = " of predicted latency" if name == "latency_ms" else ""
        told += [f"at most {cost(name, high)}{of}"] if high is not None else []
        told += [f"at least {cost(name, low)}{of}"] if low is not None else []
    return " and ".join(told)


def table_of(values: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(str(key), "not installed" if value is None else str(value)) for key, value in values.items()]


def _scaled(value: float) -> tuple[str, str]:
    """The number and its prefix: 1234567 -> ("1.23", "M")."""
    for prefix, base in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * base:
            return _three(value / base), prefix
    return f"{value:.0f}", ""


def _three(value: float) -> str:
    """Three significant digits without an exponent; trailing zeros of a fraction are dropped."""
    text = f"{value:.{max(0, 2 - _exponent(value))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _exponent(value: float) -> int:
    return int(f"{value:.2e}".partition("e")[2]) if value else 0
