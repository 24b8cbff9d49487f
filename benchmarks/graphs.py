"""Small images on a GPU: training steps and rankings of `macro` by replayed CUDA graphs against the plain loop.

    python benchmarks/graphs.py --data FOLDER --out benchmarks/graphs.json      (CIFAR-10 as class folders)

Equality first (float32, then bf16 losses), then time: a new random path every step, augmentation and optimizer included.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from greedynas import graphs
from greedynas.config import load_config
from greedynas.data import DataSettings, open_data
from greedynas.evaluation import evaluate_paths
from greedynas.graphs import GraphedTraining
from greedynas.sampling import fair_paths
from greedynas.streams import stream, torch_stream
from greedynas.supernet import Supernet
from greedynas.training import make_optimizer, train_step

DEVICE = torch.device("cuda")
BATCH = 256


def fresh(config: Any) -> tuple[Supernet, torch.optim.Optimizer]:
    net = Supernet(config.space, generator=torch_stream(0, "init")).to(DEVICE, memory_format=torch.channels_last)
    return net.train(), make_optimizer(net, config.train)


def compare_steps(config: Any, data: Any, precision: str, fair: bool = False) -> dict[str, float]:
    """The same twenty steps both ways."""
    nets, losses = [], []
    for graphed in (False, True):
        net, optimizer = fresh(config)
        paths = config.space.sample(20, stream(1, "paths")).tolist()
        recorded, told = None, []
        for step, (images, labels) in enumerate(data.train.train_batches(0, BATCH)):
            if step == 20:
                break
            chosen = fair_paths(config.space, stream(step, "fair")) if fair else [tuple(paths[step])]
            if graphed:
                recorded = recorded or GraphedTraining(net, optimizer, images, labels, config.train, None, precision)
                loss = recorded(images, labels, chosen, 0.05)
            else:
                loss = train_step(net, optimizer, images, labels, chosen, 0.05, config.train, None, precision)
            told.append(loss.item())
        nets.append(net)
        losses.append(told)
    weights = max(
        ((a - b).abs().max() / (a.abs().max() + 1e-6)).item()
        for a, b in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True)
    )
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return {"largest_relative_difference_of_weights": weights, "of_losses": difference, "last_loss": losses[0][-1]}


def time_steps(config: Any, data: Any, graphed: bool, steps: int) -> dict[str, float]:
    net, optimizer = fresh(config)
    paths = [tuple(path) for path in config.space.sample(steps + 20, stream(2, "paths")).tolist()]
    torch.cuda.reset_peak_memory_stats()
    start, recorded, times, startup, step = time.perf_counter(), None, [], 0.0, 0
    while step < steps + 20:
        for images, labels in data.train.train_batches(step, BATCH):
            if graphed and recorded is None:
                recorded = GraphedTraining(net, optimizer, images, labels, config.train, None, "bf16")
                torch.cuda.synchronize()
                startup = time.perf_counter() - start
            if recorded is not None:
                recorded(images, labels, [paths[step]], 0.01)
            else:
                train_step(net, optimizer, images, labels, [paths[step]], 0.01, config.train, None, "bf16")
            step += 1
            if step % 20 == 0:
                torch.cuda.synchronize()
                times.append(time.perf_counter())
            if step >= steps + 20:
                break
    each = [(b - a) / 20 for a, b in itertools.pairwise(times)]
    median = statistics.median(each)
    return {
        "ms_a_step": 1e3 * median,
        "images_per_second": BATCH / median,
        "startup_s": startup,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def rank(net: Supernet, data: Any, paths: Any, graphed: bool) -> tuple[Any, float]:
    graphs.SMALL = 64 if graphed else 0
    images, labels = data.val.eval_batch()
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = evaluate_paths(net, paths, images, labels, "batch", bn_images=1000, precision="bf16")
    return result, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    config = load_config("cifar10")
    settings = DataSettings(**{**config.data.model_dump(), "source": arguments.data})
    data = open_data(settings, image_size=32, image_channels=3, seed=0, device=DEVICE)
    record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}

    def part(name: str, work: Any) -> Any:
        try:
            start = time.perf_counter()
            record[name] = work()
            print(f"{name} ({time.perf_counter() - start:.1f} s): {record[name]}", flush=True)
        except Exception as error:  # the other parts are still worth having
            record[name] = repr(error)
            print(f"{name} FAILED: {error!r}", flush=True)
            import traceback

            traceback.print_exc()

    torch.backends.cudnn.allow_tf32 = False
    part("same steps, fp32", lambda: compare_steps(config, data, "fp32"))
    part("same steps, bf16, fair", lambda: compare_steps(config, data, "bf16", fair=True))
    part("same steps, bf16", lambda: compare_steps(config, data, "bf16"))
    part("eager", lambda: time_steps(config, data, False, arguments.steps))
    part("graphs", lambda: time_steps(config, data, True, arguments.steps))

    net, optimizer = fresh(config)
    recorded = None
    paths = [tuple(path) for path in config.space.sample(1000, stream(3, "paths")).tolist()]
    step = 0
    for epoch in range(3):
        for images, labels in data.train.train_batches(epoch, BATCH):
            recorded = recorded or GraphedTraining(net, optimizer, images, labels, config.train, None, "bf16")
            recorded(images, labels, [paths[step]], 0.1 * (1 - step / 530))
            step += 1
    everything = np.indices((3,) * 8).reshape(8, -1).T

    def ranking() -> dict[str, float]:
        few = everything[:9]
        rank(net, data, few, True)  # records
        graphed, graph_seconds = rank(net, data, everything, True)
        plain, plain_seconds = rank(net, data, everything, False)
        return {
            "graphs_s": graph_seconds,
            "eager_s": plain_seconds,
            "tau": float(stats.kendalltau(graphed.losses, plain.losses).statistic),
            "largest_loss_difference": float(np.abs(graphed.losses - plain.losses).max()),
            "mean_accuracy": float(plain.accuracies.mean()),
        }

    part("ranking 6,561 paths on 5,000 images", ranking)
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
