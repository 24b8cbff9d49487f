r"""Measure whether greedy training helps the good paths, against uniform training at the same cost, paired by seed.

    python benchmarks/scripts/greedy_vs_uniform.py --seeds 10 --first-seed 100 --jobs 2 --out demo.json
    OMP_NUM_THREADS=1 python benchmarks/scripts/greedy_vs_uniform.py --seeds 28 --first-seed 500 --jobs 2 \
        --set train.max_epochs=40 --set train.stopping=false --set train.warmup=0.1 --set train.epsilon=1.0 \
        --set data.augment=pad_crop --out larger.json

For each seed, both supernets start from the same weights and use the same split of the embedded Fashion-MNIST sample.
Of the same 300 random paths, the best 20 by validation accuracy on each supernet are scored on the test images, which
neither training nor filtering nor the choice of the 20 uses. Uniform training gets at least greedy's corrected cost
(whole epochs, rounded up), with its learning rate decaying over that number of epochs.
"""

import argparse
import json
import math
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from greedynas.data.datasets import open_data
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.schedule import Schedule, corrected_images
from greedynas.greedy.training import train_supernet
from greedynas.jobs.resolving import load_config
from greedynas.models.supernet import Supernet
from greedynas.runtime.rng import stream, torch_stream
from greedynas.settings.loading import parse_assignments
from greedynas.stages.run import choose_precisions
from greedynas.studies.correlations import mean_interval

PATHS, BEST = 300, 20
SCORED_TOGETHER = 250  # images that share BatchNorm statistics when paths are scored


def train_and_score(
    seed: int, changes: dict[str, Any], corrected: float | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Train and score a supernet; with `corrected`, for as many epochs as that cost allows."""
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    config = load_config("fashion", {**changes, "seed": seed})
    data = open_data(
        config.data,
        image_size=config.space.image_size,
        image_channels=config.space.image_channels,
        seed=seed,
        device=torch.device(device),
    )
    settings = config.train
    if corrected is not None:
        one = settings.model_copy(update={"max_epochs": 1})
        an_epoch = corrected_images(*Schedule(one, len(data.train)).predicted_images(1, config.space))
        settings = settings.model_copy(update={"max_epochs": math.ceil(corrected / an_epoch)})
    net = Supernet(config.space, generator=torch_stream(seed, "init")).to(device, memory_format=torch.channels_last)
    start = time.perf_counter()
    training, precision = choose_precisions(config, torch.device(device))
    state = train_supernet(net, data, settings, seed=seed, precision=training, eval_precision=precision)
    seconds = time.perf_counter() - start
    paths = config.space.sample(PATHS, stream(seed, "scored paths"))
    val, test = (
        evaluate_paths(
            net, paths, *images.eval_batch(), settings.bn, bn_images=SCORED_TOGETHER, precision=precision
        ).accuracies
        for images in (data.val, data.test())
    )
    best = np.argsort(-val, kind="stable")[:BEST]
    return {
        "seed": seed,
        "epochs": state.epoch,
        "pi": state.novelty,
        "optimization_images": state.optimization_images,
        "evaluation_images": state.evaluation_images,
        "corrected_images": state.corrected_images,
        "seconds": seconds,
        "val_of_best": float(val[best].mean()),
        "test_of_best": float(test[best].mean()),
        "test_of_all": float(test.mean()),
        "val_test_spearman": float(stats.spearmanr(val, test).statistic),
    }


def pair(seed: int, changes: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    greedy = train_and_score(seed, {**changes, "train.sampler": "greedy"}, device=device)
    uniform = train_and_score(seed, {**changes, "train.sampler": "uniform"}, greedy["corrected_images"], device)
    return {"greedy": greedy, "uniform": uniform}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pairs = finished(arguments.out, arguments.set)
    seeds = set(range(arguments.first_seed, arguments.first_seed + arguments.seeds))
    changes = parse_assignments(arguments.set)
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as jobs:
        running = [jobs.submit(pair, seed, changes) for seed in sorted(seeds - {seed_of(one) for one in pairs})]
        for done in as_completed(running):  # saved at once, so that the same command continues an interrupted run
            result = done.result()
            shown = {
                name: f"{run['test_of_best']:.4f} ({run['corrected_images']:,.0f})" for name, run in result.items()
            }
            print(f"seed {seed_of(result)}: greedy {shown['greedy']}, uniform {shown['uniform']}", flush=True)
            pairs = sorted([*pairs, result], key=seed_of)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(record(arguments.set, pairs), indent=1) + "\n")
    difference = record(arguments.set, pairs)["difference"]
    line = f"greedy - uniform, test accuracy of the best {BEST} of {PATHS}: {difference['mean']:+.4f}"
    if difference["low"] is not None:
        line += f", 95% interval [{difference['low']:+.4f}, {difference['high']:+.4f}]"
    print(f"{line}, {difference['seeds']} seeds")


def finished(out: Path | None, settings: list[str]) -> list[dict[str, Any]]:
    if out is None or not out.exists():
        return []
    there = json.loads(out.read_text())
    if there["settings"] != settings:
        raise SystemExit(f"{out} has other settings: {there['settings']}")
    return there["pairs"]  # type: ignore[no-any-return]


def seed_of(result: dict[str, Any]) -> int:
    return int(result["greedy"]["seed"])


def record(settings: list[str], pairs: list[dict[str, Any]]) -> dict[str, Any]:
    differences = [result["greedy"]["test_of_best"] - result["uniform"]["test_of_best"] for result in pairs]
    found = mean_interval(differences)
    return {
        "settings": settings,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "torch": torch.__version__,
        "difference": {"mean": found["mean"], "low": found["low"], "high": found["high"], "seeds": found["n"]},
        "pairs": pairs,
    }


if __name__ == "__main__":
    main()
