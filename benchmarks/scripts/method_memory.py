"""Measure the memory and the time of an update of every method, on the paper's space of 21 layers with 7 ops.

    python benchmarks/scripts/method_memory.py --size 64 --batch 4 --out method_memory.json | tee method_memory.txt

Memory is the largest sum of the tensors that autograd saves for backward passes, mean over six updates (see
`greedynas/studies/step_cost.py`). The images are random: their content does not matter.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from greedynas.jobs.resolving import load_config
from greedynas.studies.step_cost import measure_method

METHODS = ("uniform", "fair", "greedy", "mdenas", "proxyless-reinforce", "single-path", "proxyless", "fbnet", "darts")


def paint(folder: Path, size: int) -> None:
    """Write 32 random images of two classes."""
    rng = np.random.default_rng(0)
    for i in range(64):
        file = folder / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        paint(Path(name), arguments.size)
        for method in METHODS:
            changes = {
                "train.sampler": method,
                "image_size": arguments.size,
                "data.source": name,
                "data.val_images": 16,
                "data.test_images": 16,
                "data.workers": 0,
                "train.batch_size": arguments.batch,
                "train.filter_images": 8,
                "train.warmup": 0,
                "precision": "fp32",
                "eval_precision": "fp32",
                "device": "cpu",
            }
            config = load_config("imagenet", changes)
            found[method] = measure_method(Path(name), {"config": config.model_dump(mode="json")}, Console(quiet=True))
            single = found["uniform"]
            print(
                f"{method:20} {found[method]['step_memory'] / 1e6:8.1f} MB {found[method]['step_memory'] / single['step_memory']:6.2f} ×"
                f" {found[method]['step_seconds']:8.3f} s {found[method]['step_seconds'] / single['step_seconds']:6.2f} ×"
                f"  weights {found[method]['weights'] / 1e6:6.1f} MB",
                flush=True,
            )
    print(f"batch {arguments.batch}, {arguments.size} px, mobilenet; torch {torch.__version__}, one thread")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
