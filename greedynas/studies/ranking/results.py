"""Results of `study ranking`: Table 3, Figure 4, the BatchNorm modes."""

import statistics
from functools import partial
from typing import Any

from greedynas.reporting.cells import Table
from greedynas.studies.ranking.paper import PAPER
from greedynas.studies.study import Done, Panel, Study

COEFFICIENTS = {"spearman": "Spearman ρ", "tau_a": "Kendall τ-a", "tau_b": "Kendall τ-b"}


def ranking_study(done: list[Done], settings: dict[str, Any]) -> Study:
    """Return the study: the last checkpoint of each kind in every mode first, then earlier checkpoints."""
    rows = [_row(part) for part in done]
    steps = {kind: max(row["step"] for row in rows if row["kind"] == kind) for kind in {row["kind"] for row in rows}}
    last = [row for row in rows if row["step"] == steps[row["kind"]]]
    own = [row for row in last if row["bn"] == settings["bn"]]
    along = sorted((row for row in rows if row["bn"] == settings["bn"]), key=lambda row: (row["kind"], row["step"]))
    trained = own[-1]
    tau = trained["at_filter"]["loss"]["tau_a"]
    return Study(
        name="ranking",
        title=f"{trained['filter_images']:,} images rank paths like {trained['val_images']:,} with Kendall τ {_three_digits(tau)}",
        lead=f"{settings['paths']:,} random paths of the {trained['kind']} supernet, ranked by their loss on the filter "
        "images and by their accuracy on the whole validation set, which contains them. The correlation shows how well filtering "
        "agrees with the supernet, not whether the supernet is right, which is the question of study macro.",
        settings=settings,
        results={"supernets": rows, "paper": PAPER},
        tables=[_table3(own, settings), _modes(last), _curve_table(own), *_along_table(along)],
        draw=partial(_draw, own, along),
        parts=done,
    )


def _draw(own: list[dict[str, Any]], along: list[dict[str, Any]]) -> list[Panel]:
    from greedynas.studies.ranking.charts import ranking_panels

    return ranking_panels(own, along)


def _row(part: Done) -> dict[str, Any]:
    result = part.result
    curve = [
        {"images": point["images"], "loss": _means(point["loss"]), "accuracy": _means(point["accuracy"])}
        for point in result["curve"]
    ]
    return {
        "kind": part.settings["kind"],
        "step": part.settings["step"],
        "bn": part.settings["bn"],
        "val_images": result["val_images"],
        "filter_images": result["filter_images"],
        "mean_accuracy": result["mean_accuracy"],
        "deviation": result["deviation"],
        "draws": next(len(p["loss"]) for p in result["curve"] if p["images"] == result["filter_images"]),
        "at_filter": next(point for point in curve if point["images"] == result["filter_images"]),
        "curve": curve,
    }


def _means(draws: list[dict[str, float | None]]) -> dict[str, float | None]:
    """Return means over the draws of filter images, without draws in which all paths are equal."""
    found: dict[str, float | None] = {}
    for key in draws[0]:
        values = [value for draw in draws if (value := draw[key]) is not None]
        found[key] = statistics.fmean(values) if values else None
    return found


def _table3(own: list[dict[str, Any]], settings: dict[str, Any]) -> Table:
    rows = []
    for row in own:
        at, paper = row["at_filter"], PAPER.get(row["kind"], {})
        cells = [_pair(at["loss"][key], at["accuracy"][key]) for key in COEFFICIENTS]
        printed = [
            _pair(paper.get(key), paper.get(f"accuracy_{key}")) if paper else "–" for key in ("spearman", "tau_a")
        ]
        rows.append([row["kind"], *cells, *printed])
    columns = ["supernet", *COEFFICIENTS.values(), "the paper: ρ", "the paper: τ"]
    note = (
        f"Ranked by the loss (by the accuracy) on {own[0]['filter_images']:,} filter images, mean of {own[0]['draws']} draws, "
        f"and by the accuracy on {own[0]['val_images']:,}. BatchNorm: {settings['bn']}. The paper: 1,000 images and 50,000."
    )
    return Table(columns, rows, title="Table 3: filter images and the whole validation set", note=note)


def _modes(last: list[dict[str, Any]]) -> Table:
    rows = [
        [
            f"{row['kind']}, {row['bn']}",
            *(_pair(row["at_filter"]["loss"][key], row["at_filter"]["accuracy"][key]) for key in COEFFICIENTS),
            f"{row['mean_accuracy']:.1%} ± {row['deviation']:.1%}",
        ]
        for row in last
    ]
    columns = ["supernet, BatchNorm", *COEFFICIENTS.values(), "accuracy of paths"]
    return Table(
        columns,
        rows,
        title="Comparison of BatchNorm statistics",
        note="Each mode is compared with itself: if accuracies differ more, few images distinguish paths more easily, which does not "
        "make a mode right. Accuracy: mean and standard deviation over the paths.",
    )


def _curve_table(own: list[dict[str, Any]]) -> Table:
    counts = [point["images"] for point in own[0]["curve"]]
    rows = [
        [f"{count:,}", *(_pair(point["loss"]["tau_a"], point["accuracy"]["tau_a"]) for row in own for point in row["curve"] if point["images"] == count)]
        for count in counts
    ]  # fmt: skip
    return Table(
        ["images", *(row["kind"] for row in own)], rows, title="Figure 4, left: Kendall τ-a by the number of images"
    )


def _along_table(along: list[dict[str, Any]]) -> list[Table]:
    trained = [row for row in along if row["step"]]
    rows = [
        [row["kind"], f"{row['step']:,}", *(_three_digits(row["at_filter"]["loss"][key]) for key in COEFFICIENTS),
         f"{row['mean_accuracy']:.1%}"]
        for row in trained
    ]  # fmt: skip
    note = "For the checkpoints that the run has kept; train.keep_checkpoints keeps more of them."
    columns = ["supernet", "step", *COEFFICIENTS.values(), "accuracy of paths"]
    return [Table(columns, rows, title="Figure 4, right: during training", note=note)]


def _pair(loss: float | None, accuracy: float | None) -> str:
    return _three_digits(loss) + (f" ({_three_digits(accuracy)})" if accuracy is not None else "")


def _three_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
