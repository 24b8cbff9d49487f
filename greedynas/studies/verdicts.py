"""Comparisons of methods over several seeds, with verdicts that the spread supports."""

from collections.abc import Mapping, Sequence
from typing import Any

from greedynas.studies.correlations import mean_interval
from greedynas.studies.macro.results import summarised

NO_DIFFERENCE = "no difference that this spread can show"
Row = dict[str, Any]  # one network that was found: a contestant and a seed


def summaries(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return, for each contestant, the mean and 95% interval over seeds of every number that all its rows have.

    The unit is the supernet's seed. With a single seed, the interval of top-1 is that of retraining alone (`of`).
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["contestant"] for row in rows):
        own = [row for row in rows if row["contestant"] == name]
        found[name] = summarised(own)
        found[name]["top1"]["of"] = "seeds"
        if len(own) == 1 and len(own[0]["retrainings"]) > 1:
            found[name]["top1"] = {**mean_interval(own[0]["retrainings"]), "of": "retrainings"}
    return found


def differences(rows: Sequence[Row], pairs: Sequence[tuple[str, str]], key: str = "top1") -> list[dict[str, Any]]:
    """Return the difference of each pair, first minus second, paired by seed, with its verdict."""
    values = {(row["contestant"], row["seed"]): row[key] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    found = []
    for ours, theirs in pairs:
        paired = [values[ours, s] - values[theirs, s] for s in seeds if (ours, s) in values and (theirs, s) in values]
        if paired:
            found.append({"ours": ours, "theirs": theirs, **judged(paired, len(pairs))})
    return found


def judged(values: list[float], comparisons: int) -> dict[str, Any]:
    """Return the mean of paired differences, its 95% interval, and a verdict that the interval supports.

    If several comparisons are made at once, one in twenty would show a difference by chance. A difference counts
    without reservation only if the interval that is corrected for all of them (Bonferroni) also excludes zero.
    """
    one = mean_interval(values)
    low, high = one["low"], one["high"]
    if low is None or high is None:
        verdict = "a single pair: no verdict is possible"
    elif low == high:
        verdict = "always the same" if low == 0 else "every pair differs by the same amount: no spread to judge by"
    elif low <= 0 <= high:
        verdict = NO_DIFFERENCE
    else:
        verdict = "better" if low > 0 else "worse"
        wide = mean_interval(values, 1 - 0.05 / comparisons)
        if wide["low"] is None or wide["high"] is None or wide["low"] <= 0 <= wide["high"]:
            verdict += f" at 95%, but not with all {comparisons} comparisons counted"
    return {**one, "verdict": verdict}


def difference_text(found: Mapping[str, Any], digits: int = 2) -> str:
    """Format a difference with its interval, such as `+0.31 [+0.05, +0.57]`."""
    if found["low"] is None:
        return f"{found['mean']:+.{digits}f}"
    return f"{found['mean']:+.{digits}f} [{found['low']:+.{digits}f}, {found['high']:+.{digits}f}]"


def sentence(found: Mapping[str, Any]) -> str:
    """Describe a difference, as in `greedy against uniform-E: +0.31 [+0.05, +0.57] points, better`."""
    return f"{found['ours']} against {found['theirs']}: {difference_text(found)} points, {found['verdict']}"
