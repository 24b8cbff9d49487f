"""The choice of a search: the cheapest network that the validation images cannot distinguish from the best.

The accuracy of a path is a share of a limited number of images, and the highest of a thousand such shares is partly luck.
The rule is the one-standard-error rule of Breiman et al. (Classification and Regression Trees, 1984): of all paths on the
Pareto front that lie within one standard error of the best, take the simplest, here the cheapest. The error is that of
Wilson's score interval (Journal of the American Statistical Association, 1927), which, unlike sqrt(p (1 - p) / n), is not
zero if every image is classified correctly.
"""

import math
from dataclasses import dataclass

from greedynas.greedy.searchers.task import Found, Searched


@dataclass(frozen=True)
class Choice:
    """The chosen path of a search, and the candidates among which it was chosen."""

    chosen: Found
    best: Found  # the path with the highest worth; of several the cheapest
    tied: int  # number of evaluated paths with exactly that worth
    within: int  # number of paths on the front that count as equal to the best, including the best
    margin: float  # the largest difference of their worth from the highest one
    images: float
    tolerance: float  # number of standard errors


def choose(searched: Searched, images: float, tolerance: float = 1.0) -> Choice:
    """Choose the cheapest path on the front whose worth lies within `tolerance` standard errors of the best.

    `images` is the number of validation images behind every accuracy, the effective number if they are weighted. Costs
    are compared by the first objective, and if equal by the next. With a tolerance of 0, `searched.best` is chosen.
    """
    best = searched.best
    worth = dict(zip((entry.path for entry in searched.found), searched.worth.tolist(), strict=True))
    highest = worth[best.path]
    margin = wilson_margin(highest, images, tolerance)
    within = [entry for entry in searched.front() if worth[entry.path] >= highest - margin]  # cheapest first
    tied = sum(value == highest for value in worth.values())
    return Choice(within[0], best, tied, len(within), margin, images, tolerance)


def wilson_margin(share: float, images: float, errors: float) -> float:
    """Return the distance from a share of `images` images to the lower end of Wilson's score interval.

    `errors` is the half-width of the interval in standard errors. The score of an additive model may be outside of 0 to
    1 and is clipped to that range.
    """
    share = min(max(share, 0.0), 1.0)
    spread = errors * math.sqrt(share * (1 - share) / images + (errors / (2 * images)) ** 2)
    lower = (share + errors**2 / (2 * images) - spread) / (1 + errors**2 / images)
    return max(0.0, share - lower)
