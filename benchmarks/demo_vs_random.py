"""Was the network of the demo, as it was under 500K multiply-adds, worth the search? Random ones, retrained the same way.

    python benchmarks/demo_vs_random.py --run greedynas-demo --random 16 --jobs 2 --out benchmarks/demo_vs_random.json

RUN is a finished `greedynas run fashion --flops 500K --set search.population=50 --set search.generations=20`. The random
networks are uniform over all distinct ones that keep that budget; each is trained with the demo's recipe and looked at on the
same test images. The found network is trained with the same seeds as the first few of them, because one training is a draw too.
"""

import argparse
import json
import os
import platform
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from greedynas.models.network import build_network
from greedynas.runtime.rng import stream, torch_stream
from greedynas.spaces.budget import Budget, parse_count
from greedynas.spaces.paths import OpPath, canonical, compact
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import make_recipe
from greedynas.stages.run import read_data, read_run_config
from greedynas.stages.testing import predict_logits, top_accuracy

FLOPS = "500K"  # the demo's budget when this was recorded; demo_worth.py has the record of today's


def train(run: str, path: OpPath, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = read_run_config(Path(run))
    data = read_data(config, torch.device("cpu"))
    recipe = make_recipe(config.retrain)
    network = build_network(
        path, config.space, dropout=recipe.dropout, generator=torch_stream(seed, "retrain init")
    ).to(memory_format=torch.channels_last)
    network, state = retrain(network, data.train_and_val(), recipe, seed=seed)
    return {
        "path": compact(path, config.space),
        "seed": seed,
        "macs": int(config.space.costs([path]).macs[0]),
        "test_top1": top_accuracy(*predict_logits(network, data.test())),
        "seconds": state.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--random", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=4, help="trainings of the found network")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = read_run_config(arguments.run)
    arch = json.loads((arguments.run / "arch.json").read_text())
    found = tuple(arch["canonical_path"])
    drawn = config.space.sample(1000, stream(0, "random networks"), Budget(max_macs=parse_count(FLOPS)))
    distinct = dict.fromkeys(canonical(path, config.space) for path in drawn.tolist())
    paths = [path for path in distinct if path != found][: arguments.random]
    work = [(found, seed) for seed in range(arguments.seeds)] + [(path, seed) for seed, path in enumerate(paths)]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as jobs:
        results = list(jobs.map(train, [str(arguments.run)] * len(work), *zip(*work, strict=True)))
    ours, others = results[: arguments.seeds], results[arguments.seeds :]
    for result in results:
        print(result)
    rest = sorted(result["test_top1"] for result in others)
    mean = statistics.mean(result["test_top1"] for result in ours)
    median = statistics.median(rest)
    print(f"the demo itself: {arch['test_top1']:.4f}; retrained with {len(ours)} seeds: mean {mean:.4f}")
    print(f"{len(rest)} random networks: median {median:.4f}, from {rest[0]:.4f} to {rest[-1]:.4f}")
    print(f"better than the found network's mean: {sum(value > mean for value in rest)} of {len(rest)}")
    if arguments.out is not None:
        record = {
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "torch": torch.__version__,
            "budget": FLOPS,
            "demo_test_top1": arch["test_top1"],
            "found": ours,
            "random": others,
            "found_mean": mean,
            "random_median": median,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
