"""The worth of a search: its network compared with random ones of the same budget that were trained the same way."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

import numpy as np

from greedynas.reporting.facts import Facts, Model
from greedynas.rundir.schemas import Tested
from greedynas.runtime.text import percent, points

CHANCE = 1.96  # standard errors: 95%


def worth(facts: Facts) -> str | None:
    """Return a sentence that compares the chosen network with random ones, or None if the run has no such networks."""
    chosen, others = facts.chosen, [model.test for model in random_rivals(facts) if model.test is not None]
    if chosen is None or chosen.test is None or chosen.test.withheld or not others:
        return None
    own, accuracies = chosen.test.top1, [test.top1 for test in others]
    random = mean(accuracies)
    error = difference_error(chosen.test, others)
    return (
        f"The found network has {percent(own)} on the test set; {_describe_rivals(accuracies)}: "
        f"{_judgement(round(own, 3) - round(random, 3), error, len(others))} ({_doubt(chosen.test.images, error, len(others))})."
    )


def random_rivals(facts: Facts) -> list[Model]:
    """Return the tested random networks within the budget of the chosen network's search, trained in the same way."""
    chosen, search = facts.chosen, facts.search_of(facts.chosen)
    if chosen is None or search is None:
        return []
    drawn = [model for model in facts.models if model.arch.within == search.name and model.test is not None]
    return [model for model in drawn if trained_alike(model, chosen)]


def trained_alike(one: Model, other: Model) -> bool:
    """Return whether two networks were trained by the same recipe, equally long, from the same kind of weights."""
    if one.asked is not None and other.asked is not None:
        return _settings(one) == _settings(other)
    same = ("recipe", "epochs", "inherit", "teacher")
    return all(getattr(one.arch, key) == getattr(other.arch, key) for key in same)


def _settings(model: Model) -> dict[str, object]:
    asked = {} if model.asked is None else model.asked.model_dump()
    asked["recipe"] = {key: value for key, value in asked["recipe"].items() if key != "log_every"}
    return asked


def difference_error(own: Tested, others: Sequence[Tested]) -> float:
    """Return the standard error of the accuracy of one network minus the mean accuracy of others.

    The networks saw the same images. If it is known which of them each network classified correctly, the error follows
    from the differences image by image; otherwise it is that of independent samples, which is cautious. The spread
    between several others is added, because another draw of them would have another mean.
    """
    spread = stdev(test.top1 for test in others) if len(others) > 1 else 0.0
    right, theirs = own.correct_images, [test.correct_images for test in others]
    known = [bits for bits in theirs if bits is not None and right is not None and len(bits) == len(right)]
    if right is not None and len(known) == len(others):
        differences = right.astype(float) - np.mean(known, axis=0)
        variance = float(differences.var()) / len(differences)
    else:
        variance = _binomial(own) + sum(_binomial(test) for test in others) / len(others) ** 2
    return math.sqrt(variance + spread**2 / len(others))


def _binomial(test: Tested) -> float:
    return test.top1 * (1 - test.top1) / test.images


def _describe_rivals(accuracies: Sequence[float]) -> str:
    if len(accuracies) == 1:
        return f"a random network within the same budget, trained the same way, has {percent(accuracies[0])}"
    low, high = percent(min(accuracies)), percent(max(accuracies))
    return (
        f"{len(accuracies)} random networks within the same budget, trained the same way, have "
        f"{percent(mean(accuracies))} on average ({low} to {high})"
    )


def _judgement(difference: float, error: float, rivals: int) -> str:
    """Return the conclusion about the search from the difference, as the page shows it."""
    they, are = ("the random network", "is") if rivals == 1 else ("the random networks", "are")
    size, chance = points(abs(difference)), abs(difference) <= CHANCE * error
    if difference > 0 and not chance:
        return f"the search was worth {size}"
    if difference > 0:
        return (
            f"the found network is {size} ahead, a difference that chance can give, so this run does not show that the "
            "search was worth anything"
        )
    if difference == 0:
        return "the search was worth nothing in this run"
    ahead = f"{size} ahead, a difference that chance can give" if chance else f"better by {size}"
    return f"the search was worth nothing in this run, and {they} {are} {ahead}"


def _doubt(images: int, error: float, rivals: int) -> str:
    why = (
        f"with {images:,} test images"
        if rivals == 1
        else f"with {images:,} test images and the spread between networks"
    )
    return (
        f"one training each; {why} the standard error of the difference is about {100 * error:.1f} points, and trainings "
        "with other seeds would differ too"
    )
