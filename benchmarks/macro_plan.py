"""The plan of the sixteenth round for `macro_tuning.py`: `python benchmarks/macro_plan.py > carry/plan.json`.

Uniform and fair with what greedy has: blocks that start as identities (`train.zero_residuals`), a larger rate, no split. Net1 of
`study ablation` showed that this may suit them better than what was frozen for them (`record_rankings.txt`). What is ranked is half
accuracy and half additive model (`macro_additive.py`).
"""

import json
from typing import Any


def job(name: str, seed: int, moments: int, epochs: int, **train: Any) -> dict[str, Any]:
    settings = {"stopping": False, "snapshots": 1, "max_epochs": epochs, **train}
    changes = {"data.check_duplicates": False, "data.workers": 0, **{f"train.{key}": settings[key] for key in settings}}
    return {"name": name, "seed": seed, "set": changes, "paths": 600, "moments": moments}


def rival(
    sampler: str, seed: int, batch: int, lr: float, *, rise: float = 0.0, zero: bool = True, split: bool = False
) -> dict[str, Any]:
    epochs = {"uniform": 117, "fair": 39}[sampler]  # what the record's cost pays for
    words = [f"{sampler[0]}{epochs}-b{batch}-lr{lr:g}-const-wdall", "zero" * zero, "split" * split]
    words.append(f"rise{rise:g}" if rise else "")
    settings = {"batch_size": batch, "lr": lr, "lr_warmup": rise, "decay_all": True, "zero_residuals": zero}
    settings |= {"sampler": sampler, "split_after_identity": split}
    return job("-".join(filter(None, words)), seed, 8, epochs, **settings)


PLAN = [  # the most telling first: the time may not be enough for all
    one
    for seed in (1, 2)
    for one in (
        rival("uniform", seed, 256, 0.2),  # Net1
        rival("fair", seed, 256, 0.07),  # three gradients add up
        rival("uniform", seed, 256, 0.2, split=True),
        rival("fair", seed, 512, 0.05, rise=0.1),
        rival("uniform", seed, 256, 0.2, rise=0.1, zero=False),  # is it the rate or the start?
        rival("uniform", seed, 512, 0.3, rise=0.1),
    )
]

if __name__ == "__main__":
    print(json.dumps(PLAN, indent=1))
