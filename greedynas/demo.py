"""`greedynas demo`: what works so far, on this machine. It says itself what it does not do yet."""

import time

import numpy as np
import torch
from rich.console import Console

from greedynas.budget import Budget
from greedynas.describe import show_path, show_space
from greedynas.paths import parse_path
from greedynas.space import load_space
from greedynas.supernet import Supernet

LIMIT = 1_500_000
PATHS = 100_000


def run_demo(console: Console) -> None:
    space = load_space("fashion")
    show_space(space, console)

    rng = np.random.default_rng(0)
    start = time.perf_counter()
    paths = space.sample(PATHS, rng, Budget(max_macs=LIMIT))
    costs = space.costs(paths)
    took = time.perf_counter() - start
    console.print(
        f"\n{PATHS:,} networks under {LIMIT:,} MACs drawn and priced in {took:.2f} s; the dearest has {costs.macs.max():,}."
    )

    net = Supernet(space).eval()
    path = parse_path(paths[0], space)
    show_path(path, space, console)
    network = net.subnet(path).eval()
    images = torch.randn(64, space.image_channels, space.image_size, space.image_size)
    with torch.no_grad():
        difference = (network(images) - net(images, path)).abs().max().item()
    console.print(
        f"Taken out of the supernet as a network of its own; largest difference of their outputs: {difference:.1e}."
    )
    console.print("[bold]Nothing was trained:[/] training, search and export are not in this version yet.")
