"""The plan of the next round for `macro_tuning.py`: `python benchmarks/macro_plan.py > carry/plan.json`.

Weights split behind identities (`train.split_after_identity`), for every method: greedy less greedy, because the paths that skip
both layers of the first stage stand too low; uniform and fair at what was best for them without the split.
"""

import json
from typing import Any


def job(name: str, seed: int, epochs: int, moments: int, **train: Any) -> dict[str, Any]:
    settings = {"stopping": False, "snapshots": 1, "max_epochs": epochs, "split_after_identity": True, **train}
    changes = {"data.check_duplicates": False, "data.workers": 0, **{f"train.{key}": settings[key] for key in settings}}
    return {"name": name, "seed": seed, "set": changes, "paths": 600, "moments": moments}


def greedy(seed: int, lr: float, k: int, zero: bool) -> dict[str, Any]:
    name = f"g60-b256-lr{lr:g}-const-p50-e.5-k{k}{'-zero' if zero else ''}-wdall-split"
    return job(name, seed, 60, 5, lr=lr, k=k, zero_residuals=zero)


def rival(sampler: str, seed: int, batch: int, lr: float, epochs: int, decay_all: bool = False) -> dict[str, Any]:
    name = f"{sampler[0]}{epochs}-b{batch}-lr{lr:g}-const{'-wdall' if decay_all else ''}-split"
    return job(name, seed, epochs, 8, sampler=sampler, batch_size=batch, lr=lr, decay_all=decay_all)


PLAN = [
    greedy(1, 0.1, 8, zero=False),
    greedy(1, 0.2, 8, zero=True),
    rival("uniform", 1, 256, 0.1, 40, decay_all=True),
    rival("fair", 1, 256, 0.1, 16),
    greedy(2, 0.1, 8, zero=False),
    greedy(2, 0.2, 8, zero=True),
    greedy(2, 0.1, 6, zero=False),
    rival("uniform", 1, 256, 0.05, 40),
    rival("uniform", 1, 512, 0.3, 70, decay_all=True),
    rival("fair", 1, 512, 0.1, 24),
    greedy(1, 0.1, 7, zero=False),
    rival("fair", 2, 256, 0.1, 16),
]

if __name__ == "__main__":
    print(json.dumps(PLAN, indent=1))
