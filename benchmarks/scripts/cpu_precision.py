"""Compare training in fp32 and in bf16 on a CPU: rankings of 500 paths, and accuracy after training one network.

For every seed a supernet of the demo is trained in either precision. Both rank the same 500 random paths on the validation
images, in fp32. The ranking of another seed in the same precision says what is noise. Then one fixed path is trained as a
network in either precision.

    python benchmarks/scripts/cpu_precision.py OUT.jsonl --seeds 5

Rows that the file already has are not computed again.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np
import scipy.stats
import torch

import greedynas
from greedynas.runtime.rng import stream, torch_stream
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import make_recipe

PATHS = 500


def supernet_row(config, data, precision: str, seed: int) -> dict:
    """Train a supernet and return the losses and accuracies of the paths on all validation images."""
    net = greedynas.Supernet(config.space, generator=torch_stream(seed, "init")).to(memory_format=torch.channels_last)
    start = time.perf_counter()
    greedynas.train_supernet(net, data, config.train, seed=seed, precision=precision, eval_precision="bf16")
    seconds = time.perf_counter() - start
    paths = [tuple(path) for path in config.space.sample(PATHS, stream(0, "cpu precision")).tolist()]
    images, labels = data.val.eval_batch(np.arange(len(data.val)))
    found = greedynas.evaluate_paths(net, paths, images, labels)
    return {"seconds": seconds, "losses": found.losses.tolist(), "accuracies": found.accuracies.tolist()}


def network_row(config, data, precision: str, seed: int) -> dict:
    """Train one network as `retrain` does, and return its accuracy on the test images."""
    path = [int(place) for place in stream(0, "cpu network").integers(0, 3, 7)]
    network = greedynas.build_network(path, config.space, generator=torch_stream(seed, "init"))
    network = network.to(memory_format=torch.channels_last)
    start = time.perf_counter()
    trained, _ = retrain(network, data.train_and_val(), make_recipe(config.retrain), seed=seed, precision=precision)
    seconds = time.perf_counter() - start
    test = data.test()
    images, labels = test.eval_batch(np.arange(len(test)))
    with torch.no_grad():
        accuracy = float((trained(images).argmax(1) == labels).double().mean())
    return {"seconds": seconds, "path": path, "test": accuracy}


def summary(rows: list[dict]) -> None:
    """Print Kendall's tau between precisions and between seeds, and the accuracies, with their spread."""
    nets = {(row["precision"], row["seed"]): row for row in rows if row["what"] == "supernet"}
    seeds = sorted({seed for _, seed in nets})

    def tau(a, b) -> float:
        return scipy.stats.kendalltau(nets[a]["accuracies"], nets[b]["accuracies"]).statistic

    across = [tau(("fp32", seed), ("bf16", seed)) for seed in seeds]
    pairs = list(itertools.combinations(seeds, 2))
    within = {kind: [tau((kind, a), (kind, b)) for a, b in pairs] for kind in ("fp32", "bf16")}
    print(
        f"tau, fp32 and bf16 of the same seed: {np.mean(across):.3f} ± {np.std(across, ddof=1):.3f} (n {len(across)})"
    )
    for kind, values in within.items():
        print(f"tau, two seeds in {kind}: {np.mean(values):.3f} ± {np.std(values, ddof=1):.3f} (n {len(values)} pairs)")
    for what, key in (("supernet", "accuracies"), ("network", "test")):
        for kind in ("fp32", "bf16"):
            chosen = [row for row in rows if row["what"] == what and row["precision"] == kind]
            values = [100 * float(np.mean(row[key])) for row in chosen]
            times = [row["seconds"] for row in chosen]
            print(
                f"{what} in {kind}: accuracy {np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}, "
                f"{np.median(times):.1f} s (n {len(values)})"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = greedynas.load_config("fashion")
    data = greedynas.open_data(config.data, space=config.space)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["what"], row["precision"], row["seed"]) for row in rows}
    for seed, (what, measure), precision in itertools.product(
        range(options.seeds), (("supernet", supernet_row), ("network", network_row)), ("fp32", "bf16")
    ):
        if (what, precision, seed) not in done:
            row = {"what": what, "precision": precision, "seed": seed, **measure(config, data, precision, seed)}
            rows.append(row)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    summary(rows)


if __name__ == "__main__":
    main()
