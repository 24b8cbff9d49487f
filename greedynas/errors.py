"""The one exception that means "the input is wrong": a single line that says what is wrong and what to do."""

from difflib import get_close_matches


class GreedyNASError(ValueError):
    """Wrong input. The command line prints the message as one line and exits with code 2."""


def unknown(kind: str, value: str, allowed: list[str]) -> GreedyNASError:
    """An unknown name, with the nearest valid one and the whole list."""
    near = get_close_matches(value, allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return GreedyNASError(f"unknown {kind} {value!r}{hint}; known: {', '.join(allowed)}")
