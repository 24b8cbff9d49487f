"""Train every network of a small space several times: a ground truth that a laptop can make.

    python benchmarks/scripts/cpu_truth.py benchmarks/scripts/pebble.yaml rows.jsonl --trainings 3
    python benchmarks/scripts/cpu_truth.py benchmarks/scripts/pebble.yaml rows.jsonl --csv truth.csv

Images and settings are those of the preset `fashion` (the embedded sample of Fashion-MNIST), as `greedynas retrain` uses them:
a network is trained on all training images and tested once on the 2,000 test images. Rows that the file already has are
not computed again, and several processes may share the work (`--part 0/2`, `--part 1/2`, each with a file of its own).
`--csv` writes the table that `greedynas study searchers` and `--truth` read.
"""

import argparse
import itertools
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

import greedynas
from greedynas.runtime.cpu.allocator import keep_freed_memory
from greedynas.runtime.rng import torch_stream
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import make_recipe
from greedynas.stages.testing import predict_logits

Key = tuple[str, int]  # a path as digits, and the number of the training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("space", type=Path)
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows; new rows go to the first one")
    parser.add_argument("--trainings", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--part", default="0/1", help="which share of the networks this process trains")
    parser.add_argument("--every", type=int, default=1, help="train only every n-th network")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    space = greedynas.load_space(options.space)
    done = {(row["path"], row["training"]): row for file in options.rows for row in read(file)}
    if options.csv is not None:
        write_table(space, done, options.csv)
        return
    torch.set_num_threads(1)
    keep_freed_memory()
    config = greedynas.load_config("fashion", {"space": space, "retrain.epochs": options.epochs})
    data = greedynas.open_data(config.data, space=space)
    part, parts = map(int, options.part.split("/"))
    paths = list(itertools.product(*map(range, space.num_ops)))[:: options.every][part::parts]
    for training, path in itertools.product(range(options.trainings), paths):
        key = ("".join(map(str, path)), training)
        if key not in done:
            row = trained(space, path, training, config, data)
            with options.rows[0].open("a") as file:
                file.write(json.dumps({"path": key[0], "training": training, **row}) + "\n")


def read(file: Path) -> list[dict]:
    """Return the rows of a file; a row that a crash has cut off is left out."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def trained(space: greedynas.Space, path: tuple[int, ...], training: int, config, data) -> dict:
    """Train a network from scratch and return its accuracy and loss on the test images."""
    seed = 1000 * (1 + training) + int(np.ravel_multi_index(path, space.num_ops))
    network = greedynas.build_network(path, space, generator=torch_stream(seed, "init"))
    network = network.to(memory_format=torch.channels_last)
    start = time.perf_counter()
    network, _ = retrain(network, data.train_and_val(), make_recipe(config.retrain), seed=seed, precision="fp32")
    seconds = time.perf_counter() - start
    logits, labels = predict_logits(network, data.test())
    loss = float(torch.nn.functional.cross_entropy(logits.float(), labels))
    accuracy = 100 * float((logits.argmax(1) == labels).double().mean())
    return {"test_top1": accuracy, "test_loss": loss, "seconds": seconds}


def write_table(space: greedynas.Space, done: dict[Key, dict], file: Path) -> None:
    """Write a line for each network: its path, its accuracies, its multiply-adds and its parameters."""
    rows = defaultdict(list)
    for (path, _), row in sorted(done.items()):
        rows[path].append(row["test_top1"])
    costs = space.costs([tuple(map(int, path)) for path in rows])
    lines = [
        f"{path},{' '.join(f'{value:.2f}' for value in values)},{macs},{params}"
        for (path, values), macs, params in zip(rows.items(), costs.macs, costs.params, strict=True)
    ]
    file.write_text("\n".join(["path,test_acc_seeds,macs,params", *lines]) + "\n")


if __name__ == "__main__":
    main()
