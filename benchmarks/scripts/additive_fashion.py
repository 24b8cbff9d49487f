"""Measure whether a score that is partly an additive model (`search.additive`) ranks better in the demo's space, too.

    python benchmarks/scripts/additive_fashion.py --networks 60 --supernets 3 --jobs 2 --out additive.json | tee additive.txt

Random distinct networks of the space `fashion` are trained once each with the demo's recipe. Supernets with the demo's
settings rank all 2,187 paths; the score is fitted to these. Prints tau-b of the scores with the accuracies of the
trained networks on test images, by share of the additive model.
"""

import argparse
import json
import os
import platform
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from greedynas.experimental.additive import blended
from greedynas.jobs.resolving import load_config
from greedynas.models.network import build_network
from greedynas.runtime.rng import stream, torch_stream
from greedynas.spaces.paths import OpPath, canonical, compact
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import make_recipe
from greedynas.stages.run import Run, read_data, read_run_config
from greedynas.stages.testing import predict_logits, top_accuracy
from greedynas.studies.correlations import rank_correlations
from greedynas.studies.supernets import rank_paths, train_in

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def ranked(seed: int) -> list[float]:
    """Return the accuracies of all paths on a supernet of the demo with another seed."""
    torch.set_num_threads(1)
    config = load_config("fashion", {"seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        trained, _ = train_in(Path(folder) / "run", config, Console(quiet=True))
        paths = list(np.ndindex(*config.space.num_ops))
        return [float(value) for value in rank_paths(trained, paths, config.search.bn)[0].accuracies]


def train(run: str, path: OpPath, seed: int) -> float:
    """Train a network from scratch with the demo's recipe and return its accuracy on the test images."""
    torch.set_num_threads(1)
    config = read_run_config(Path(run))
    data = read_data(config, torch.device("cpu"))
    recipe = make_recipe(config.retrain)
    network = build_network(
        path, config.space, dropout=recipe.dropout, generator=torch_stream(seed, "retrain init")
    ).to(memory_format=torch.channels_last)
    network, _ = retrain(network, data.train_and_val(), recipe, seed=seed)
    return top_accuracy(*predict_logits(network, data.test()))


def compared(accuracies: list[float], networks: list[OpPath], top1: list[float], num_ops: list[int]) -> list[Any]:
    """Return tau-b by share."""
    every, measured = list(np.ndindex(*num_ops)), np.array(accuracies)
    chosen = [int(np.ravel_multi_index(path, num_ops)) for path in networks]
    return [rank_correlations(blended(every, measured, share)[chosen], np.array(top1))["tau_b"] for share in SHARES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=60)
    parser.add_argument("--supernets", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = load_config("fashion")
    drawn = config.space.sample(1000, stream(0, "networks of this benchmark"))
    distinct = list(dict.fromkeys(canonical(path, config.space) for path in drawn.tolist()))
    networks = distinct[: arguments.networks]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as jobs,
    ):
        run = Path(folder) / "run"
        Run.start(run, config).close()
        supernets = list(jobs.map(ranked, range(arguments.supernets)))
        top1 = list(jobs.map(train, [str(run)] * len(networks), networks, range(len(networks))))
    taus = [compared(accuracies, networks, top1, list(config.space.num_ops)) for accuracies in supernets]
    print("tau-b by share " + "".join(f"{share:8.2f}" for share in SHARES))
    for seed, row in enumerate(taus):
        print(f"supernet {seed}     " + "".join(f"{value:8.3f}" for value in row))
    print("mean           " + "".join(f"{value:8.3f}" for value in np.mean(taus, axis=0)))
    print(f"{len(networks)} networks, test accuracy {min(top1):.4f} to {max(top1):.4f}")
    if arguments.out is not None:
        record = {
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "torch": torch.__version__,
            "shares": SHARES,
            "tau_b": taus,
            "networks": {compact(path, config.space): value for path, value in zip(networks, top1, strict=True)},
            "supernets": supernets,
        }
        arguments.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
