"""Measure how well untrained networks rank all 3,969 networks of NAS-Bench-Macro, by NWOT (Mellor et al., 2021).

    python benchmarks/scripts/nwot_macro.py nas-bench-macro_cifar10.json --out nwot.json | tee nwot.txt

Reads the parts that `greedynas study macro` computed for its record (`parts/nwot-SEED`): the score of each network with
fresh weights on one batch of 32 training images of CIFAR-10. A seed draws both the images and the weights. Prints means
over seeds ± half the 95% interval (Student's t).
"""

import argparse
import json
from itertools import combinations
from pathlib import Path

import numpy as np
from records import MACRO

from greedynas import load_space
from greedynas.studies.correlations import best_of, mean_interval, rank_correlations
from greedynas.studies.truth import read_truth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("truth", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    truth = read_truth(arguments.truth, load_space("macro"))
    layers = truth.trivial_rankings()["non-ID ops"]
    rows, by_path = [], []
    for file in sorted(MACRO.glob("parts/nwot-*.json")):
        saved, arrays = json.loads(file.read_text()), np.load(file.with_suffix(".npz"))
        scores = np.empty(len(truth.paths))
        scores[np.ravel_multi_index(arrays["networks"].T.astype(int), truth.space.num_ops)] = arrays["scores"]
        scores = scores[truth.network]  # a path has the score of its network
        by_path.append(scores)
        distinct, true = truth.distinct, truth.accuracies
        best, best_paths = best_of(true[distinct], round(0.1 * len(distinct))), best_of(true, round(0.1 * len(true)))
        same = [distinct[layers[distinct] == count] for count in (5, 6, 7)]  # networks with the same number of layers
        rows.append(
            {
                "seed": saved["settings"]["config"]["seed"],
                "images": saved["result"]["images"],
                "networks": len(arrays["scores"]),
                "tau_b, networks": rank_correlations(scores[distinct], true[distinct])["tau_b"],
                "tau_b, all paths": rank_correlations(scores, true)["tau_b"],
                "tau_b, top 10% of networks": rank_correlations(scores[distinct][best], true[distinct][best])["tau_b"],
                "tau_b, top 10% of paths": rank_correlations(scores[best_paths], true[best_paths])["tau_b"],
                "tau_b, networks of 5, 6 or 7 layers (mean)": float(
                    np.mean([rank_correlations(scores[some], true[some])["tau_b"] for some in same])
                ),
                "seconds": saved["seconds"],
                "machine": saved["machine"],
            }
        )
    keys = [key for key in rows[0] if key.startswith("tau_b")]
    summary = {key: mean_interval([row[key] for row in rows]) for key in keys}
    between = [
        rank_correlations(one[truth.distinct], two[truth.distinct])["tau_b"] for one, two in combinations(by_path, 2)
    ]
    for row in rows:
        print(
            f"seed {row['seed']}: {row['networks']:,} networks on {row['images']} images in {row['seconds']:.0f} s ({row['machine']})"
        )
        for key in keys:
            print(f"  {key}: {row[key]:.3f}")
    print(f"\nMean over {len(rows)} seeds ± half the 95% interval")
    for key, found in summary.items():
        print(f"  {key}: {found['mean']:.3f} ± {(found['high'] - found['low']) / 2:.3f}")
    print(f"  two seeds with each other, networks: {', '.join(f'{tau:.3f}' for tau in between)}")
    if arguments.out is not None:
        record = {"seeds": rows, "summary": summary, "between_seeds": between}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
