"""Check replayed evaluation of macro on a GPU: the time of a whole ranking, and losses and plain PyTorch's in three
modes.

python benchmarks/scripts/graphs_check.py
"""

import time

import numpy as np
import torch
from graphs import fresh
from scipy import stats

from greedynas.gpu import engine
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.jobs.resolving import load_config

config = load_config("cifar10")
net = fresh(config)
torch.manual_seed(0)
images = torch.randn(5000, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
labels = torch.randint(0, 10, (5000,), device="cuda")
everything = list(np.indices((3,) * 8).reshape(8, -1).T)


def rank(paths, n, bn="batch", prec="bf16"):
    torch.cuda.synchronize()
    t = time.perf_counter()
    r = evaluate_paths(
        net, paths, images[:n], labels[:n], bn, bn_images=1000, precision=prec, calibration=images[-256:]
    )
    torch.cuda.synchronize()
    return r, time.perf_counter() - t


for n in (1000, 1000, 5000, 5000):
    r, t = rank(everything, n)
    print("graphs", n, round(t, 3), "reserved", round(torch.cuda.max_memory_reserved() / 2**30, 2), flush=True)
for bn in ("batch", "recalibrate", "running"):
    sub = everything[1000 : 1000 + 243] + everything[::97]
    a, _ = rank(sub, 1000, bn)
    a, t = rank(sub, 1000, bn)
    with engine.using("off"):
        b, _ = rank(sub, 1000, bn)
        c, _ = rank(sub, 1000, bn, "fp32")
    print(
        bn,
        "largest loss difference",
        abs(a.losses - b.losses).max(),
        "to fp32",
        abs(a.losses - c.losses).max(),
        "plain to fp32",
        abs(b.losses - c.losses).max(),
        "tau",
        stats.kendalltau(a.losses, c.losses).statistic,
        stats.kendalltau(b.losses, c.losses).statistic,
        "acc",
        abs(a.accuracies - b.accuracies).max(),
        round(t, 3),
        flush=True,
    )
