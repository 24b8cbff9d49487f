"""An additive model of paths: one number for each op of each layer.

What a supernet says of a single path is uncertain, because its weights were last updated for others; what it says of an op, over all
paths that have it, is much less so. Where networks are nearly additive, a score that is part accuracy and part additive model ranks
better than the accuracy alone (docs/studies.md). Not in the paper.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def additive_model(paths: ArrayLike, values: NDArray[Any]) -> Floats:
    """What the best sum of one number for each op of each layer says of the paths it was fitted to, by least squares."""
    columns = [column == op for column in np.asarray(paths).T for op in np.unique(column)[1:]]
    design = np.column_stack([np.ones(len(values)), *columns])
    return design @ np.linalg.lstsq(design, np.asarray(values, float), rcond=None)[0]


def blended(paths: ArrayLike, accuracies: NDArray[Any], share: float) -> Floats:
    """Scores: this share of the additive model, fitted to these paths, and the rest of their accuracies themselves."""
    accuracies = np.asarray(accuracies, float)
    if share == 0 or np.ptp(accuracies) == 0:  # a fit to equal numbers would make ranks of rounding errors
        return accuracies
    return (1 - share) * accuracies + share * additive_model(paths, accuracies)
