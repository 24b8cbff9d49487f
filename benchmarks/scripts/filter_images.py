"""Measure how many validation images a filtering needs to rank paths (`train.filter_images`).

    python benchmarks/scripts/filter_images.py --seeds 5 --out filter_images.json | tee filter_images.txt

Supernets of the space `fashion` are trained with uniform sampling on the embedded sample: on 7,000 images in batches of
64, and on 400 images in batches of 8, as `auto` would. Each is evaluated at the end of the warm-up, when filtering
begins, and at the end of training. Random paths are ranked by their loss on a few class-balanced validation images, as
in a filtering, and by their loss on 1,000 of them. Prints mean and standard deviation over the seeds of the mean over
draws of:

tau-b   Kendall's τ-b of both rankings
kept    the share of the 5 of 10 paths kept by the few images that 1,000 images would keep, too (0.5: chance)
cost    of filtering relative to training, m/k · images / batch / 3.33
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from greedynas.greedy.schedule import PAPER_RATIO
from greedynas.jobs.resolving import load_config
from greedynas.runtime.rng import stream
from greedynas.settings.schema import Config
from greedynas.stages.train import train_stage
from greedynas.studies.correlations import rank_correlations
from greedynas.studies.ranking.run import random_paths
from greedynas.studies.supernets import Trained, load_trained, rank_paths, shared_data

COUNTS = (4, 8, 16, 32, 64, 100, 200, 400)
TRUTH = 1000  # number of validation images of the reference ranking
PATHS = 60
DRAWS = 12  # for each number of images; fewer for the larger ones
GROUPS = 200  # simulated filterings of ten paths in each draw
M, K = 10, 5
SETS = {
    "7,000 images, batch 64": {"data.val_images": 1000, "batch_size": 64, "max_epochs": 8, "lr": 0.1},
    "400 images, batch 8": {"data.val_images": 7600, "batch_size": 8, "max_epochs": 60, "lr": 0.0125},
}


def settings(changes: dict[str, Any], seed: int) -> Config:
    common = {"sampler": "uniform", "data.augment": "pad_crop", "checkpoint_minutes": 1000.0, "keep_checkpoints": 100}
    return load_config("fashion", {**common, **changes, "seed": seed})


def supernets(config: Config, folder: Path) -> dict[str, Trained]:
    """Train a supernet; return it as of the end of its warm-up and of its training."""
    data = shared_data(config, torch.device("cpu"))
    steps = config.train.max_epochs * max(1, len(data.train) // config.train.batch_size)
    early = max(1, round(0.25 * steps))
    config = config.model_copy(update={"train": config.train.model_copy(update={"checkpoint_steps": early})})
    train_stage(config, folder, Console(quiet=True), data)
    files = {int(file.name.split("-")[1]): file for file in (folder / "supernet").glob("step-*.safetensors")}
    return {
        when: load_trained(folder, config, data, files[step])
        for when, step in (("end of warm-up", early), ("end", max(files)))
    }


def kept_as_by_all(few: NDArray[np.float64], truth: NDArray[np.float64], rng: np.random.Generator) -> float:
    """Return the share of the five best of ten random paths on few images that are also the five best on all."""
    groups = np.array([rng.choice(len(truth), M, replace=False) for _ in range(GROUPS)])
    by_few, by_all = (np.argsort(values[groups], axis=1, kind="stable")[:, :K] for values in (few, truth))
    return float(np.mean([len(np.intersect1d(one, other)) / K for one, other in zip(by_few, by_all, strict=True)]))


def agreement(trained: Trained, seed: int) -> dict[int, dict[str, list[float]]]:
    """Return τ-b and the kept share for every draw of every number of images."""
    val = trained.data.val
    everything = val.balanced(min(TRUTH, len(val)), stream(seed, "truth of this benchmark"))
    paths = random_paths(trained.config.space, PATHS, seed)
    truth, _ = rank_paths(trained, paths, "batch", everything, bn_images=500)
    found: dict[int, dict[str, list[float]]] = {}
    for count in COUNTS:
        taus, kept = [], []
        for draw in range(max(3, min(DRAWS, 1200 // count))):
            chosen = val.balanced(count, stream(seed, "draws of this benchmark", count, draw))
            few, _ = rank_paths(trained, paths, "batch", chosen, bn_images=count)
            taus.append(rank_correlations(-few.losses, -truth.losses)["tau_b"] or 0.0)
            rng = stream(seed, "groups of this benchmark", count, draw)
            kept.append(kept_as_by_all(few.losses, truth.losses, rng))
        found[count] = {"tau_b": taus, "kept": kept}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for name, changes in SETS.items():
        measured: dict[str, list[dict[int, dict[str, list[float]]]]] = {}
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                for when, trained in supernets(settings(changes, seed), Path(folder) / "run").items():
                    trained.precision = "fp32"
                    measured.setdefault(when, []).append(agreement(trained, seed))
        for when, by_seed in measured.items():
            print(f"\n{name}, {when}; {arguments.seeds} supernets, {PATHS} paths each")
            print(f"{'images':>8}{'tau-b':>16}{'kept':>16}{'cost':>8}")
            for count in COUNTS:
                cells = ""
                for key in ("tau_b", "kept"):
                    means = [np.mean(found[count][key]) for found in by_seed]
                    cells += f"{np.mean(means):9.3f} ± {np.std(means, ddof=min(1, len(means) - 1)):.3f}"
                cost = M / K * count / changes["batch_size"] / PAPER_RATIO
                print(f"{count:8d}{cells}{cost:8.2f}", flush=True)
            records.append({"set": name, "when": when, "settings": changes, "by_seed": by_seed})
    if arguments.out is not None:
        about = {"machine": f"{platform.machine()}, {os.cpu_count()} CPUs, one thread", "torch": torch.__version__}
        arguments.out.write_text(json.dumps({**about, "paths": PATHS, "truth": TRUTH, "records": records}) + "\n")


if __name__ == "__main__":
    main()
