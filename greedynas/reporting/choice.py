"""The sentence about a search's choice, where "the most accurate network" would not be the whole truth."""

from collections.abc import Sequence

from greedynas.reporting.records import Choice, Chosen
from greedynas.reporting.wording import cost, count, milliseconds, percent, points


def choice_told(chosen: Chosen, objectives: Sequence[str]) -> str | None:
    """Say how a network was chosen among equals; None where it simply has the highest accuracy, or where that is not known."""
    choice = chosen.choice
    if choice is None:
        return None
    what = "accuracy" if choice.best.score is None else "score"
    highest = percent(choice.best.worth)
    if chosen.path == choice.best.path:
        if choice.tied == 1:
            return None
        return f"{choice.tied:,} paths tie at the highest {what}, {highest}; the cheapest of them was chosen."
    errors = "one standard error" if choice.tolerance == 1 else f"{choice.tolerance:g} standard errors"
    tied = f", which {choice.tied:,} paths have" if choice.tied > 1 else ""
    return (
        f"{choice.within:,} paths on the front lie within {errors} ({points(choice.margin)} on {choice.images:,.0f} "
        f"validation images) of the highest {what}, {highest}{tied}. The cheapest of them was chosen"
        f"{_saved(chosen, choice, objectives)}; --set search.tolerance=0 takes the highest {what}."
    )


def _saved(chosen: Chosen, choice: Choice, objectives: Sequence[str]) -> str:
    """Return `, with 11.1M multiply-adds instead of 31.5M`: the first objective in which the two differ."""
    for name in objectives:
        own, other = getattr(chosen, name), choice.best.cost(name)
        if own is not None and other is not None and own < other:
            return (
                f", with {cost(name, own)} instead of {milliseconds(other) if name == 'latency_ms' else count(other)}"
            )
    return ""
