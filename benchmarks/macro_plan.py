"""The plan of the next round for `macro_tuning.py`: `python benchmarks/macro_plan.py > carry/plan.json`.

Greedy at the higher rate at which blocks that start as identities rank well, with another seed; its rivals at larger batches, which suit fair.
"""

import json
from typing import Any


def job(name: str, seed: int, epochs: int, *, paths: int, moments: int = 8, **train: Any) -> dict[str, Any]:
    settings = {"stopping": False, "snapshots": 1, "max_epochs": epochs, **train}
    changes = {"data.check_duplicates": False, "data.workers": 0, **{f"train.{key}": settings[key] for key in settings}}
    return {"name": name, "seed": seed, "set": changes, "paths": paths, "moments": moments}


def greedy(seed: int, lr: float, epochs: int = 60, **more: Any) -> dict[str, Any]:
    told = "".join(f"-{key}{value:g}" for key, value in more.items())
    return job(f"g{epochs}-b256-lr{lr:g}-const-p50-e.5-k6-zero-wdall{told}", seed, epochs, paths=1500, lr=lr, **more)


def rival(sampler: str, seed: int, batch: int, lr: float, epochs: int, decay_all: bool = False) -> dict[str, Any]:
    name = f"{sampler[0]}{epochs}-b{batch}-lr{lr:g}-const{'-wdall' if decay_all else ''}"
    settings = {"sampler": sampler, "batch_size": batch, "lr": lr, "decay_all": decay_all}
    return job(name, seed, epochs, paths=600, **settings)


PLAN = [
    rival("fair", 1, 512, 0.1, 40),
    greedy(2, 0.3),
    rival("fair", 2, 512, 0.1, 24),
    rival("fair", 1, 1024, 0.2, 40),
    rival("fair", 1, 512, 0.1, 24, decay_all=True),
    rival("fair", 1, 512, 0.05, 24),
    rival("uniform", 1, 512, 0.1, 60),
    rival("uniform", 1, 512, 0.2, 60),
    rival("uniform", 1, 1024, 0.2, 60),
    rival("uniform", 1, 512, 0.3, 60, decay_all=True),
]

print(json.dumps(PLAN, indent=1))
