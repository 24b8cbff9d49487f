"""`greedynas study theory`: Theorem 1 of the paper, and its Figure 2.

Of m sampled paths, those drawn at random are good with probability q, and all those from the pool are good. The theorem
gives the probability that at least k are good.
"""

from pathlib import Path
from typing import Any

from rich.console import Console

from greedynas.reporting.cells import Table
from greedynas.runtime.errors import GreedyNASError
from greedynas.studies.study import Panel, Study, publish

SHARES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8)  # q of the curves; the paper does not state the values of its figure
PAPER = {
    "m": 10,
    "k": 5,
    "q": 0.6,
    "epsilon": 0.5,
    "without_pool": 0.8338,
    "with_pool": 0.9936,
}  # section 3.2 and 4.1.1


def at_least(k: int, m: int, q: float, epsilon: float = 0.0) -> float:
    """Return the probability of at least k good paths among m if a share ε comes from the pool (Theorem 1)."""
    from scipy.stats import binom

    return float(binom.sf(k - 1, m, epsilon + (1 - epsilon) * q))


def study_theory(folder: Path, console: Console, m: int, k: int, q: float, epsilon: float) -> dict[str, Any]:
    """Compute the curves for m paths, with and without the pool; the title has the numbers for k and q."""
    if not 1 <= k <= m:
        raise GreedyNASError(f"--k {k} is not possible with --m {m} paths; k must be between 1 and m")
    for name, value in (("q", q), ("epsilon", epsilon)):
        if not 0 <= value <= 1:
            raise GreedyNASError(f"--{name} must be a probability between 0 and 1, got {value:g}")
    shares = sorted({*SHARES, q})
    curves = {
        key: [{"q": share, "probabilities": [at_least(i, m, share, eps) for i in range(1, m + 1)]} for share in shares]
        for key, eps in (("without_pool", 0.0), ("with_pool", epsilon))
    }
    without, with_pool = at_least(k, m, q), at_least(k, m, q, epsilon)
    study = Study(
        name="theory",
        title=f"At least {k} good paths among {m}: {without:.2%}, with the pool {with_pool:.2%}",
        lead=f"Theorem 1, for {q:.0%} good paths among all paths, where each of {m} sampled paths comes from the pool with probability "
        f"{epsilon:g}. The paper's example, 5 of 10 with q = 0.6 and ε = 0.5: 83.38% and 99.36%.",
        settings={"m": m, "k": k, "q": q, "epsilon": epsilon},
        results={"without_pool": without, "with_pool": with_pool, "curves": curves, "paper": PAPER},
        tables=[_table(m, epsilon, shares)],
        draw=lambda: _panels(m, k, q, epsilon, shares),
    )
    return publish(folder, study, console)


def _table(m: int, epsilon: float, shares: list[float]) -> Table:
    columns = ["k", "k/m", *(f"q={q:g}{pool}" for q in shares for pool in ("", " pool"))]
    rows = []
    for k in range(1, m + 1):
        cells = [f"{at_least(k, m, q, eps):.2%}" for q in shares for eps in (0.0, epsilon)]
        rows.append([str(k), f"{k / m:.2f}", *cells])
    note = f"pool: each path comes from the pool with probability ε = {epsilon:g}, so that q becomes ε + (1 − ε) q"
    return Table(
        columns,
        rows,
        note=note,
        title=f"Probability of at least k good paths among m = {m}, if a share q of all paths is good",
    )


def _panels(m: int, k: int, q: float, epsilon: float, shares: list[float]) -> list[Panel]:
    from greedynas.reporting.charts import GREEN, GREY, ORANGE, PALETTE, Chart, figure, line

    def curves(eps: float) -> list[Any]:
        ks = range(1, m + 1)
        return [
            line(
                [i / m for i in ks],
                [at_least(i, m, share, eps) for i in ks],
                f"q = {share:g}",
                PALETTE[i % len(PALETTE)],
                mode="lines+markers",
                hovertemplate=f"q = {share:g}<br>k/m = %{{x:.2f}}<br>%{{y:.2%}}<extra></extra>",
            )
            for i, share in enumerate(shares)
        ]

    def chart(traces: list[Any], label: str, caption: str) -> Chart:
        drawn = figure(*traces, height=380)
        drawn.update_xaxes(title_text="r = k/m", range=[0, 1.03])
        drawn.update_yaxes(title_text="probability", tickformat=".0%", range=[0, 1.05])
        return Chart(drawn, label, caption)

    def points(values: dict[str, float], at: float, name: str) -> list[Any]:
        return [
            line([at], [value], f"{name}, {what}", colour, mode="markers+text", marker={"size": 12, "color": colour},
                 text=[f"{value:.2%}"], textposition="middle right")
            for (what, value), colour in zip(values.items(), (ORANGE, GREEN), strict=True)
        ]  # fmt: skip

    paper = {"q = 0.6": PAPER["without_pool"], "with the pool": PAPER["with_pool"]}
    known = [
        line([i / 10 for i in range(1, 11)], [at_least(i, 10, 0.6, eps) for i in range(1, 11)], name, GREY, line=dash)
        for eps, name, dash in ((0.0, "q = 0.6", {}), (0.5, "q = 0.6, ε = 0.5", {"dash": "dot"}))
    ]
    ours = {f"q = {q:g}": at_least(k, m, q), "with the pool": at_least(k, m, q, epsilon)}
    return [
        Panel(
            "Figure 2: at least k good paths of m",
            {
                "The paper": chart(
                    [*known, *points(paper, 0.5, "the paper")],
                    "Curves for q = 0.6 and m = 10, and the two numbers of the paper: 83.38% and 99.36%.",
                    "The two numbers are from the text of the paper, for m = 10 and k = 5; the curves through them are ours.",
                ),
                "Ours, without the pool": chart(
                    [*curves(0.0), *points(ours, k / m, f"k = {k}")],
                    f"Probability of at least k good paths among {m}, one curve for each share of good paths.",
                    "The probability that all kept paths are good grows with the share of good paths and falls with k.",
                ),
            },
        ),
        Panel(
            f"With the pool, ε = {epsilon:g}",
            {"Ours": chart(curves(epsilon), "The same with the pool: every curve is higher.", "")},
        ),
    ]
