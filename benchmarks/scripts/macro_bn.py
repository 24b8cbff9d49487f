"""Compare BatchNorm statistics by how well they rank paths of `macro`, in a search and in filtering.

    python benchmarks/scripts/macro_bn.py > batchnorm.txt

Prints Kendall's tau-b with the ground truth over 1,500 random paths, for the tuning trainings
(`benchmarks/records/tuning.md`) of the ninth and tenth rounds that were ranked in all three modes: in a search, by
accuracy on all 5,000 validation images; in filtering, by loss on 100 images that share their statistics, as the mean of
three draws. Then prints the difference of each mode to `batch` for the same supernet, with 95% intervals (Student's t).
"""

import json
from collections.abc import Sequence

import numpy as np
from records import tuning_data
from scipy.stats import t as student

MODES = ("batch", "recalibrate", "running")


def main() -> None:
    with tuning_data() as folder:
        files = [folder / "macro" / f"{name}.jsonl" for name in ("ninth", "tenth")]
        trials = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    trials = [trial for trial in trials if set(MODES) <= set(trial["bn"])]
    search = {label(trial): [trial["bn"][mode]["tau_b"] for mode in MODES] for trial in trials}
    filtering = {
        label(trial): [float(np.mean(trial["filter_tau_b"][mode])) for mode in MODES]
        for trial in trials
        if "filter_tau_b" in trial
    }
    show("In a search: accuracy on 5,000 images", search)
    show("In filtering: loss on 100 images", filtering)


def label(trial: dict) -> str:
    return f"{trial['name']}, seed {trial['seed']}"


def show(title: str, rows: dict[str, Sequence[float]]) -> None:
    print(f"{title}\n{'':52s}" + "".join(f"{mode:>13s}" for mode in MODES))
    for name, taus in rows.items():
        print(f"{name:52s}" + "".join(f"{tau:13.3f}" for tau in taus))
    table = np.array(list(rows.values()))
    print(f"{'mean':52s}" + "".join(f"{tau:13.3f}" for tau in table.mean(axis=0)))
    for mode, differences in list(zip(MODES, (table - table[:, :1]).T, strict=True))[1:]:
        half = student.ppf(0.975, len(table) - 1) * differences.std(ddof=1) / len(table) ** 0.5
        print(f"{mode} - batch: {differences.mean():+.3f} ± {half:.3f} over {len(table)} supernets")
    print()


if __name__ == "__main__":
    main()
