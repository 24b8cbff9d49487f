"""Which network of a search is chosen: the cheapest of those that the validation images cannot tell from the best.

The accuracy of a path is a share of a limited number of images, and the highest of a thousand such shares is partly luck.
The rule is the one-standard-error rule of Breiman et al. (Classification and Regression Trees, 1984): of all paths on the
Pareto front that lie within one standard error of the best, take the simplest, here the cheapest. The error is that of
Wilson's score interval (Journal of the American Statistical Association, 1927), which, unlike sqrt(p (1 - p) / n), is not
zero where every image is right.
"""

import math
from dataclasses import dataclass

from greedynas.greedy.searchers.task import Found, Searched


@dataclass(frozen=True)
class Choice:
    """The chosen path of a search, and what it was chosen from."""

    chosen: Found
    best: Found  # the highest worth; of several the cheapest
    tied: int  # evaluated paths of exactly that worth
    within: int  # paths on the front that count as equal to the best, the best among them
    margin: float  # by how much the worth of these may be lower
    images: float
    tolerance: float  # in standard errors


def choose(searched: Searched, images: float, tolerance: float = 1.0) -> Choice:
    """Choose the cheapest path on the front whose worth lies within `tolerance` standard errors of the best.

    `images` is the number of validation images behind every accuracy, the effective one where they are weighted. Cheapest
    means by the first objective, of equal ones by the next. With a tolerance of 0 it is `searched.best`.
    """
    best = searched.best
    worth = dict(zip((entry.path for entry in searched.found), searched.worth.tolist(), strict=True))
    highest = worth[best.path]
    margin = wilson_margin(highest, images, tolerance)
    within = [entry for entry in searched.front() if worth[entry.path] >= highest - margin]  # cheapest first
    tied = sum(value == highest for value in worth.values())
    return Choice(within[0], best, tied, len(within), margin, images, tolerance)


def wilson_margin(share: float, images: float, errors: float) -> float:
    """Return how far the lower end of Wilson's score interval lies below a share of so many images.

    `errors` is the half-width of the interval in standard errors. A score of an additive model may lie outside of 0 to 1; it
    counts as the nearest share.
    """
    share = min(max(share, 0.0), 1.0)
    spread = errors * math.sqrt(share * (1 - share) / images + (errors / (2 * images)) ** 2)
    lower = (share + errors**2 / (2 * images) - spread) / (1 + errors**2 / images)
    return max(0.0, share - lower)
