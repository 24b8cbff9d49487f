"""An additive model of paths: one number for each op of each layer, fitted to the accuracies of evaluated paths."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def additive_model(paths: ArrayLike, values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the values that a least-squares fit, a sum of one number for each layer's op, predicts for these paths."""
    columns = [column == op for column in np.asarray(paths).T for op in np.unique(column)[1:]]
    design = np.column_stack([np.ones(len(values)), *columns])
    return design @ np.linalg.lstsq(design, np.asarray(values, float), rcond=None)[0]
