"""Measure how well a supernet around a pretrained network ranks paths: its accuracies against those of fine-tuned networks.

    python benchmarks/scripts/pretrained_ranking.py runs/photos --paths 30 --out ranking.jsonl

Random paths within the limits of the supernet's training are ranked by their accuracy on the validation images, and every
n-th of them is fine-tuned as the run fine-tunes its found network. A ranking that was interrupted goes on. A row also has the
accuracy and the loss with each way of taking BatchNorm statistics.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy import stats

from greedynas.greedy.validation import SupernetAccuracies
from greedynas.models.batchnorm import BN_MODES
from greedynas.runtime.rng import stream
from greedynas.spaces.paths import compact
from greedynas.stages.retrain import retrain_stage
from greedynas.stages.run import Run, read_run_config
from greedynas.stages.trained_supernet import load_supernet

RESAMPLED = 2000  # bootstrap samples of an interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--paths", type=int, default=30)
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    console = Console(width=120)
    config = read_run_config(options.run)
    with Run.open(options.run) as run:
        net, _, data, precision = load_supernet(run, config)
    candidates = net.space.sample(options.candidates, stream(config.seed, "ranked paths"), config.train.limits)
    distinct = [tuple(path) for path in np.unique(candidates, axis=0).tolist()]
    modes = {}
    for bn in BN_MODES.names():
        settings = config.search.model_copy(update={"bn": bn})
        modes[bn] = SupernetAccuracies(net, data, settings, config.seed, precision).evaluate(distinct)
    seen = modes[config.search.bn]
    order = np.lexsort((seen.losses, -seen.accuracies))
    places = np.linspace(0, len(order) - 1, options.paths).round().astype(int)
    rows = []
    for rank in spread(options.paths):
        place = int(order[places[rank]])
        path = distinct[place]
        found = retrain_stage(
            options.run,
            console,
            settings=config.retrain.model_copy(update={"top": 1}),
            arch=compact(path, net.space),
            name=f"ranked-{rank}",
            data=data,
        )
        row = {
            "seed": config.seed,
            "rank": rank,
            "path": list(path),
            "supernet_accuracy": seen.accuracies[place],
            "supernet_loss": seen.losses[place],
            "by_bn": {bn: [float(one.accuracies[place]), float(one.losses[place])] for bn, one in modes.items()},
            "macs": int(found["macs"]),
            "image_size": found["image_size"],
            "test_top1": found["test_top1"],
            "test_loss": found["test_loss"],
            "test_images": found["test_images"],
        }
        rows.append(row)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    console.print(agreement(rows))


def spread(count: int) -> list[int]:
    """Return 0 to count - 1 in an order whose beginnings are spread evenly, so that an interrupted ranking says something."""
    width = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda rank: int(f"{rank:0{width}b}"[::-1], 2))


def agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return Kendall's τ-b between supernet and fine-tuned accuracies, with a bootstrap interval over paths."""
    scores = np.array([row["supernet_accuracy"] for row in rows])
    truth = np.array([row["test_top1"] for row in rows])
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(rows), len(rows)) for _ in range(RESAMPLED)]
    taus = [stats.kendalltau(scores[draw], truth[draw]).statistic for draw in draws]
    low, high = np.nanpercentile(taus, [2.5, 97.5])
    return {"tau_b": stats.kendalltau(scores, truth).statistic, "low": low, "high": high, "paths": len(rows)}


if __name__ == "__main__":
    main()
