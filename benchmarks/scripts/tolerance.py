"""Measure what the one-standard-error rule costs and saves, by choosing again from recorded searches.

    python benchmarks/scripts/tolerance.py > tolerance.txt

Each search of the records of `study methods` and `study ablation` (space macro, at most 50M multiply-adds, 5,000
validation images; two searches share a supernet, so they are not quite independent) is looked up in the ground truth of
NAS-Bench-Macro. The true accuracy is that of the chosen network after training from scratch; the difference is relative
to a tolerance of 0, ± its standard error.
"""

import json
from pathlib import Path

import numpy as np
from records import ABLATION, METHODS

from greedynas.greedy.searchers.choice import choose
from greedynas.greedy.searchers.task import Found, Searched, make_task
from greedynas.settings.schema import Config
from greedynas.spaces.budget import Budget
from greedynas.studies.contests import index_of
from greedynas.studies.truth import find_truth, read_truth

TOLERANCES = (0.0, 0.5, 1.0, 2.0)


def recorded_searches(record: Path) -> list[tuple[Searched, int]]:
    """Return every search of a record with its number of validation images."""
    found = []
    for file in sorted(record.glob("parts/*.npz")):
        part, arrays = json.loads(file.with_suffix(".json").read_text()), np.load(file)
        config = Config.model_validate(part["settings"]["config"])
        budget = Budget.model_validate(part["settings"]["budget"])
        task = make_task(config.space, budget, additive=config.search.additive)
        for name in (key.removesuffix("_accuracy") for key in arrays.files if key.endswith("_accuracy")):
            rows = zip(arrays[f"{name}_paths"].tolist(), arrays[f"{name}_accuracy"].tolist(), strict=True)
            entries = [Found(tuple(path), accuracy, 0) for path, accuracy in rows]
            found.append((Searched(task, entries), part["result"]["val_images"]))
    return found


def main() -> None:
    truth = read_truth(find_truth(None))
    print(f"{'record':16s} searches  tolerance   true accuracy   difference      multiply-adds   within   changed")
    for record, folder in (("methods", METHODS), ("ablation", ABLATION)):
        searches = recorded_searches(folder)
        chosen = {t: [choose(searched, images, t) for searched, images in searches] for t in TOLERANCES}
        places = {t: [index_of(one.chosen.path, truth) for one in chosen[t]] for t in TOLERANCES}
        for t in TOLERANCES:
            lost = truth.accuracies[places[t]] - truth.accuracies[places[0.0]]
            error = lost.std(ddof=1) / np.sqrt(len(lost))
            changed = sum(one.chosen != one.best for one in chosen[t])
            within = np.mean([one.within for one in chosen[t]])
            accuracy, macs = truth.accuracies[places[t]].mean(), truth.macs[places[t]].mean() / 1e6
            print(
                f"{record:16s} {len(searches):8d} {t:10.1f} {accuracy:15.2f} {lost.mean():8.3f} ± {error:.3f} "
                f"{macs:15.2f}M {within:8.2f} {changed:9d}"
            )


if __name__ == "__main__":
    main()
