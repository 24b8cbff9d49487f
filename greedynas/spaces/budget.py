"""Budgets: limits on multiply-adds, parameters, latency and memory, also read as text (`330M`, `5M`, `80ms`, `256K`)."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from greedynas.runtime import text
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.costs import DECIMALS

_NUMBER = r"(?P<number>\d{1,18}(?:[_,]\d{3}){0,5}(?:\.\d{1,18})?(?:[eE]\+?\d{1,2})?)\s*"
_COUNT = re.compile(_NUMBER + r"(?P<unit>[KMGB]?)", re.IGNORECASE)
_BYTES = re.compile(_NUMBER + r"(?P<unit>[KMG]?)(?:i?B)?", re.IGNORECASE)
_LATENCY = re.compile(_NUMBER + r"(?P<unit>us|µs|ms|s|)", re.IGNORECASE)
_MULTIPLE = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_MILLISECONDS = {"us": 1e-3, "µs": 1e-3, "": 1.0, "ms": 1.0, "s": 1e3}


class Budget(BaseModel):
    """Upper and lower limits (both inclusive) on the costs of a path; None is no limit.

    Attributes:
        max_macs: The most multiply-adds.
        max_params: The most parameters.
        max_latency_ms: The longest latency in milliseconds, by a latency table.
        min_macs: The fewest multiply-adds.
        min_params: The fewest parameters.
        min_latency_ms: The shortest latency in milliseconds.
        max_ram: The most bytes of activations at a time in int8 (see `spaces.memory`).
        max_flash: The most bytes of parameters in int8.

    Example:
        >>> import greedynas, numpy
        >>> space, budget = greedynas.load_space("mobilenet"), greedynas.Budget(max_macs=330_000_000)
        >>> paths = space.sample(1000, numpy.random.default_rng(0), budget)
        >>> bool((space.costs(paths).macs <= 330_000_000).all())
        True
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    max_macs: PositiveInt | None = None
    max_params: PositiveInt | None = None
    max_latency_ms: PositiveFloat | None = None
    min_macs: PositiveInt | None = None
    min_params: PositiveInt | None = None
    min_latency_ms: PositiveFloat | None = None
    max_ram: PositiveInt | None = None
    max_flash: PositiveInt | None = None

    @field_validator("max_latency_ms", "min_latency_ms")
    @classmethod
    def _whole_picoseconds(cls, limit: float | None) -> float | None:
        """Round a limit in the same way as latencies: 0.0011 s are exactly 1.1 ms, without a rounding error."""
        return None if limit is None else max(round(limit, DECIMALS), 10.0**-DECIMALS)

    @model_validator(mode="after")
    def _not_contradictory(self) -> Self:
        for cost, (low, high) in self.limits().items():
            if low is not None and high is not None and low > high:
                raise GreedyNASError(f"contradictory limits on {cost}: at least {low:,} and at most {high:,}")
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Return the limits that are set, for `repr`."""
        return ((name, value) for name, value in super().__repr_args__() if value is not None)

    def limits(self) -> dict[str, tuple[float | None, float | None]]:
        """Return (lowest, highest) by cost, for the costs that have a limit."""
        limits = {
            "macs": (self.min_macs, self.max_macs),
            "params": (self.min_params, self.max_params),
            "latency_ms": (self.min_latency_ms, self.max_latency_ms),
            "ram": (None, self.max_ram),
            "flash": (None, self.max_flash),
        }
        return {cost: limit for cost, limit in limits.items() if limit != (None, None)}


def make_budget(limits: dict[str, float]) -> Budget:
    """Return a budget with these limits; refuse limits that contradict each other, in one line."""
    try:
        return Budget.model_validate(limits)
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error", error)
        raise GreedyNASError(str(cause)) from None


Limits = Mapping[str, tuple[list[str] | None, str | None]]  # (at most, one or several; at least) by cost, as written


def parse_limits(limits: Limits) -> list[Budget]:
    """Return the budgets of a command line: one, or one for each value of the limit that is given several times."""
    parse: dict[str, Callable[[str], float]] = {
        "macs": parse_count,
        "params": parse_count,
        "latency_ms": parse_latency,
        "ram": parse_bytes,
        "flash": parse_bytes,
    }
    several = [cost for cost, (high, _) in limits.items() if high is not None and len(high) > 1]
    if len(several) > 1:
        raise GreedyNASError("only one kind of limit can be given several times, to get one network for each value")
    base = {f"min_{cost}": parse[cost](low) for cost, (_, low) in limits.items() if low is not None}
    base |= {
        f"max_{cost}": parse[cost](high[0]) for cost, (high, _) in limits.items() if high is not None and len(high) == 1
    }
    family = [{f"max_{cost}": parse[cost](value)} for cost in several for value in limits[cost][0] or ()] or [{}]
    return [make_budget(base | member) for member in family]


def one_budget(limits: Limits, what: str) -> Budget:
    """Return the budget of a command line that takes only one; `what` has it."""
    budgets = parse_limits(limits)
    if len(budgets) > 1:
        raise GreedyNASError(f"{what} has a single budget: give each limit only once")
    return budgets[0]


def without_latency(budgets: Sequence[Budget]) -> list[Budget]:
    """Return the budgets with only the limits that need no latency table."""
    return [budget.model_copy(update={"max_latency_ms": None, "min_latency_ms": None}) for budget in budgets]


def parse_count(text: str) -> int:
    """Return the number that a text such as "330M" stands for.

    Args:
        text: A number, with K, M, G or B if it is in thousands, millions or billions: "1.2G", "5e6", "320,000,000".

    Returns:
        The number.

    Raises:
        GreedyNASError: If the text is not such a number, or not a positive one.

    Example:
        >>> import greedynas
        >>> greedynas.parse_count("330M")
        330000000
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise GreedyNASError(
            f"cannot read {text!r} as a number of multiply-adds or parameters; write for example 330M or 1.2G"
        )
    return round(_positive(text, _number(match) * _MULTIPLE[match["unit"].upper()]))


def short_count(value: float) -> str:
    """Return a number in the short form that `parse_count` reads: 330000000 -> `330M`. It has six digits at most."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def parse_latency(text: str) -> float:
    """Return the milliseconds that a text such as "80ms" stands for.

    Args:
        text: A number with its unit: "0.08s", "900us"; a bare number is in milliseconds.

    Returns:
        The milliseconds.

    Raises:
        GreedyNASError: If the text is not such a time.

    Example:
        >>> import greedynas
        >>> greedynas.parse_latency("80ms")
        80.0
    """
    match = _LATENCY.fullmatch(text.strip())
    if match is None:
        raise GreedyNASError(f"cannot read {text!r} as a latency; write for example 80ms")
    return _positive(text, _number(match) * _MILLISECONDS[match["unit"].lower()])


def parse_bytes(text: str) -> int:
    """Return the bytes of memory that a text such as "256K" stands for; K, M and G are powers of 1024."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise GreedyNASError(f"cannot read {text!r} as an amount of memory; write for example 256K or 1M")
    return round(_positive(text, _number(match) * 1024 ** " KMG".index(match["unit"].upper() or " ")))


def short_bytes(value: float) -> str:
    """Return bytes in the short form that `parse_bytes` reads: 262144 -> `256K`."""
    for unit, size in (("G", 1024**3), ("M", 1024**2), ("K", 1024)):
        if value >= size and value * 1000 % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:.0f}"


def short_limit(cost: str, value: float) -> str:
    """Return a limit on a cost in the short form of the command line."""
    return short_bytes(value) if cost in ("ram", "flash") else short_count(value)


def _number(match: re.Match[str]) -> float:
    return float(match["number"].replace("_", "").replace(",", ""))


def _positive(text: str, value: float) -> float:
    if not 0 < value < 2**62 or not math.isfinite(value):
        raise GreedyNASError(f"a budget must be positive and below 2^62, got {text!r}")
    return value


def limits(budget: Budget) -> str:
    """Return the limits of a budget as text: `at most 1M multiply-adds and at least …`; empty without a limit."""
    parts = []
    for name, (low, high) in budget.limits().items():
        of = " of predicted latency" if name == "latency_ms" else ""
        parts += [f"at most {text.cost(name, high)}{of}"] if high is not None else []
        parts += [f"at least {text.cost(name, low)}{of}"] if low is not None else []
    return " and ".join(parts)
