"""The plan of the next round for `macro_tuning.py`: `python benchmarks/macro_plan.py > carry/plan.json`.

Paths that are the same network with the same weights (`canonical`), with and without weights split behind identities
(`train.split_after_identity`); and longer trainings with the split.
"""

import json
from typing import Any


def greedy(
    seed: int, lr: float, epochs: int = 60, *, canonical: bool, split: bool, paths: int = 1500
) -> dict[str, Any]:
    """Residual branches start at zero at the higher rate only, which is where that helped."""
    zero = lr > 0.1
    words = [f"g{epochs}-b256-lr{lr:g}-const-p50-e.5-k6", "zero" * zero, "wdall", "split" * split, "canon" * canonical]
    settings = {"stopping": False, "snapshots": 1, "max_epochs": epochs, "split_after_identity": split, "lr": lr}
    changes = {"data.check_duplicates": False, "data.workers": 0, "train.zero_residuals": zero}
    changes |= {f"train.{key}": value for key, value in settings.items()}
    job = {"name": "-".join(filter(None, words)), "seed": seed, "set": changes, "paths": paths, "moments": epochs // 10}
    return {**job, "canonical": canonical}


PLAN = [
    greedy(1, 0.2, canonical=True, split=True),
    greedy(1, 0.1, canonical=True, split=True),
    greedy(1, 0.2, canonical=True, split=False),
    greedy(2, 0.2, canonical=True, split=True),
    greedy(2, 0.1, canonical=True, split=True),
    greedy(1, 0.1, 120, canonical=False, split=True),
    greedy(2, 0.2, canonical=True, split=False),
    greedy(2, 0.1, 120, canonical=True, split=True),
    greedy(100, 0.1, canonical=True, split=True),
]

if __name__ == "__main__":
    print(json.dumps(PLAN, indent=1))
