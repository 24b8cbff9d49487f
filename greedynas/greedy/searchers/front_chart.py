"""A small chart of a search for notebooks, with every evaluated path and the front."""

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from greedynas.runtime.text import count

WIDTH, HEIGHT, MARGIN = 420, 260, 46  # pixels
DOT, FRONT = "#9aa4ae", "#c0392b"


def draw_front(
    costs: NDArray[np.float64], accuracies: NDArray[np.float64], front: Sequence[int], axes: tuple[str, str], title: str
) -> str:
    """Draw accuracies over costs as SVG, with a line through the front.

    Args:
        costs: The cost of each path; paths without a finite cost are left out.
        accuracies: The accuracy of each path.
        front: The indices of the paths on the front, cheapest first.
        axes: The names of both axes.
        title: The heading of the chart.

    Returns:
        The SVG.
    """
    known = np.isfinite(costs)
    x, y = _scaled(costs, known, WIDTH), HEIGHT - _scaled(accuracies, known, HEIGHT)
    points = [(x[i], y[i]) for i in range(len(costs)) if known[i]]
    line = [(x[i], y[i]) for i in front if known[i]]
    parts = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{DOT}"/>' for a, b in points]
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{FRONT}"/>' for a, b in line]
    joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in line)
    parts.append(f'<polyline points="{joined}" fill="none" stroke="{FRONT}"/>')
    if known.any():
        low, high = costs[known].min(), costs[known].max()
        parts.append(_text(MARGIN, HEIGHT - 8, f"{axes[0]}: {count(low)} to {count(high)}"))
        best = accuracies[known]
        parts.append(_text(MARGIN, 32, f"{axes[1]}: {best.min():.3f} to {best.max():.3f}"))
    parts.append(_text(8, 14, title))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(parts)}</svg>'


def _scaled(values: NDArray[np.float64], known: NDArray[np.bool_], length: int) -> NDArray[np.float64]:
    """Return values scaled linearly to pixels between the margins."""
    if not known.any():
        return np.zeros(len(values))
    low, high = values[known].min(), values[known].max()
    return MARGIN + (values - low) / max(high - low, 1e-300) * (length - 2 * MARGIN)


def _text(x: int, y: int, text: str) -> str:
    return (
        f'<text x="{x}" y="{y}" font-family="system-ui, sans-serif" font-size="11" fill="#667079">{escape(text)}</text>'
    )
