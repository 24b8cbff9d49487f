"""The plan of the next round for `macro_tuning.py`: `python benchmarks/macro_plan.py > carry/plan.json`.

Several supernets in one training (`train.supernets`), for every method at what was best for it with one supernet, all at the corrected
cost of some 170 epochs of plain training. Moments are at the same places of every supernet, its end among them: what fewer supernets or
other snapshots would have given can be computed from them. (The last row of a trial's accuracies is the mean over the ends of all its
supernets, as a search sees it.)
"""

import json
from typing import Any


def job(name: str, seed: int, paths: int, supernets: int, epochs: int, **train: Any) -> dict[str, Any]:
    settings = {"stopping": False, "snapshots": 1, "supernets": supernets, "max_epochs": supernets * epochs, **train}
    moments = supernets * next(count for count in (4, 3, 2, 1) if epochs % count == 0)
    changes = {"data.check_duplicates": False, "data.workers": 0, **{f"train.{key}": settings[key] for key in settings}}
    return {"name": name, "seed": seed, "set": changes, "paths": paths, "moments": moments}


def greedy(seed: int, supernets: int, epochs: int, split: bool) -> dict[str, Any]:
    name = f"g{supernets}x{epochs}-b256-lr0.2-const-p50-e.5-k6-zero-wdall{'-split' if split else ''}"
    return job(name, seed, 1500, supernets, epochs, split_after_identity=split)


def rival(
    sampler: str, seed: int, supernets: int, epochs: int, batch: int, lr: float, *, decay_all: bool, split: bool
) -> dict[str, Any]:
    words = [f"{sampler[0]}{supernets}x{epochs}-b{batch}-lr{lr:g}-const", "wdall" * decay_all, "split" * split]
    settings = {"sampler": sampler, "batch_size": batch, "lr": lr, "decay_all": decay_all, "zero_residuals": False}
    return job("-".join(filter(None, words)), seed, 600, supernets, epochs, split_after_identity=split, **settings)


PLAN = [
    greedy(1, 4, 36, split=True),
    rival("uniform", 1, 8, 21, 256, 0.05, decay_all=False, split=False),
    rival("fair", 1, 4, 14, 256, 0.1, decay_all=False, split=False),
    greedy(2, 4, 36, split=True),
    rival("uniform", 1, 3, 56, 512, 0.3, decay_all=True, split=True),
    rival("fair", 1, 2, 28, 512, 0.1, decay_all=False, split=False),
    greedy(1, 4, 36, split=False),
]

if __name__ == "__main__":
    print(json.dumps(PLAN, indent=1))
