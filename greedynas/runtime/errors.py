"""The exception for wrong input: its message is one line that says what is wrong and what to do."""

from difflib import get_close_matches
from typing import TYPE_CHECKING

from pydantic import ValidationError

if TYPE_CHECKING:
    pass


class GreedyNASError(ValueError):
    """An error about the input. The command line prints its message as one line and exits with code 2.

    Example:
        >>> import greedynas
        >>> greedynas.load_space("mobilnet")
        Traceback (most recent call last):
            ...
        greedynas.runtime.errors.GreedyNASError: unknown space 'mobilnet'...
    """


def unknown(kind: str, value: str, allowed: list[str]) -> GreedyNASError:
    """Return the error for an unknown name, with the nearest valid name and all valid names."""
    near = get_close_matches(value, allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return GreedyNASError(f"unknown {kind} {value!r}{hint}; known: {', '.join(allowed)}")


def first_problem(error: ValidationError, section: str = "") -> str:
    """Return the first problem of a pydantic error as one line: place (in a section), message and given value."""
    problem = error.errors(include_url=False)[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, GreedyNASError):
        return str(cause)
    where = ".".join(str(part) for part in ((section, *problem["loc"]) if section else problem["loc"]))
    given = "" if problem["type"] in ("missing", "extra_forbidden") else f", got {problem['input']!r:.80}"
    return f"{where + ': ' if where else ''}{problem['msg']}{given}"
