"""The plan of the fifteenth round for `macro_tuning.py`: `python benchmarks/macro_plan.py > carry/plan.json`.

Uniform and fair at rates that rise slowly (`train.lr_warmup`) or are smaller, because at the rates that were frozen first some of
their supernets died in the first steps. What is ranked is half accuracy and half additive model (`macro_additive.py`). The first one
only shows that `train.supernets` works on a GPU.
"""

import json
from typing import Any


def job(name: str, seed: int, moments: int, epochs: int, **train: Any) -> dict[str, Any]:
    settings = {"stopping": False, "snapshots": 1, "max_epochs": epochs, **train}
    changes = {"data.check_duplicates": False, "data.workers": 0, **{f"train.{key}": settings[key] for key in settings}}
    return {"name": name, "seed": seed, "set": changes, "paths": 600, "moments": moments}


def rival(
    sampler: str, seed: int, epochs: int, batch: int, lr: float, rise: float, *, decay_all: bool, split: bool
) -> dict[str, Any]:
    words = [f"{sampler[0]}{epochs}-b{batch}-lr{lr:g}-const", "wdall" * decay_all, "split" * split]
    words.append(f"rise{rise:g}" if rise else "")
    settings = {"batch_size": batch, "lr": lr, "lr_warmup": rise, "decay_all": decay_all, "zero_residuals": False}
    settings |= {"sampler": sampler, "split_after_identity": split}
    return job("-".join(filter(None, words)), seed, 8, epochs, **settings)


PLAN = [
    job("check-supernets", 1, 4, 4, supernets=2),
    rival("uniform", 1, 117, 512, 0.3, 0.1, decay_all=True, split=True),
    rival("fair", 2, 39, 512, 0.1, 0.1, decay_all=False, split=False),
    rival("uniform", 2, 117, 512, 0.1, 0.1, decay_all=True, split=True),
    rival("fair", 1, 39, 512, 0.05, 0.1, decay_all=True, split=True),
    rival("fair", 1, 39, 512, 0.1, 0.1, decay_all=False, split=False),
    rival("uniform", 2, 117, 512, 0.3, 0.1, decay_all=True, split=True),
    rival("fair", 2, 39, 512, 0.05, 0.1, decay_all=True, split=True),
    rival("uniform", 1, 117, 512, 0.1, 0.1, decay_all=True, split=True),
]

if __name__ == "__main__":
    print(json.dumps(PLAN, indent=1))
