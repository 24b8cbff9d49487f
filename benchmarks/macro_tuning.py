"""Settings for `macro` on CIFAR-10: trials of each method on tuning seeds, ranked against NAS-Bench-Macro.

    python benchmarks/macro_tuning.py PLAN.json --data cifar10/ --truth nas-bench-macro_cifar10.json --jobs 8 --out DIR

The plan is a list of {"name": ..., "seed": ..., "set": {"train.sampler": ..., "train.max_epochs": ..., ...},
"bn": [modes], "paths": 1500, "engine": "off"}; all from "bn" on may be left out. Every trial trains one supernet, evaluates that many random paths (the same for all; without
it all 6,561) on the 5,000 validation images in each BatchNorm mode, and adds a line to trials.jsonl: rank correlation with the ground truth, the network it finds, its cost. The accuracies are kept beside.
"""

import argparse
import itertools
import json
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from greedynas.config import load_config
from greedynas.evaluation import evaluate_paths
from greedynas.gpu import engine
from greedynas.streams import stream, torch_stream
from greedynas.studies.supernets import shared_data
from greedynas.supernet import Supernet
from greedynas.training import calibration_images, train_supernet

ALL = list(itertools.product(range(3), repeat=8))


def trial(job: dict[str, Any], source: str, truth_file: str, out: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = "bf16" if device == "cuda" else "fp32"
    seed = job["seed"]
    config = load_config("cifar10", {**job["set"], "data.source": source, "seed": seed})
    data = shared_data(config, torch.device(device))
    net = Supernet(config.space, generator=torch_stream(seed, "init")).to(device, memory_format=torch.channels_last)
    engine.use(job.get("engine", "auto"))
    start = time.perf_counter()
    state = train_supernet(net, data, config.train, seed=seed, precision=precision, eval_precision=precision)
    trained = time.perf_counter() - start
    truth = json.loads(Path(truth_file).read_text())
    chosen = stream(0, "tuning paths").permutation(len(ALL))[: job.get("paths", len(ALL))]
    paths = [ALL[i] for i in np.sort(chosen)]
    true = np.array([truth["".join(map(str, path))]["mean_acc"] for path in paths])
    result = {
        **job,
        "epochs": state.epoch,
        "optimization_images": state.optimization_images,
        "evaluation_images": state.evaluation_images,
        "corrected_images": state.corrected_images,
        "pi": state.novelty,
        "train_seconds": trained,
        "bn": {},
    }
    kept = {}
    for mode in job.get("bn", ["batch"]):
        start = time.perf_counter()
        calibration = calibration_images(data, 512, stream(seed, "ranking"))
        found = evaluate_paths(
            net, paths, *data.val.eval_batch(), mode, bn_images=500, calibration=calibration, precision=precision
        )
        kept[mode], kept[mode + "_loss"] = found.accuracies.astype(np.float32), found.losses.astype(np.float32)
        order = np.argsort(-found.accuracies, kind="stable")
        top = np.argsort(-true, kind="stable")[: len(true) // 10]
        result["bn"][mode] = {
            "tau_b": stats.kendalltau(found.accuracies, true).statistic,
            "tau_b_loss": stats.kendalltau(-found.losses, true).statistic,
            "tau_b_top10": stats.kendalltau(found.accuracies[top], true[top]).statistic,
            "found_true": true[order[0]],
            "found_rank": int((true > true[order[0]]).sum()) + 1,
            "top5_true": true[order[:5]].mean(),
            "mean_accuracy": found.accuracies.mean(),
            "best_accuracy": found.accuracies.max(),
            "seconds": time.perf_counter() - start,
        }
    np.savez_compressed(Path(out) / f"{job['name']}_{seed}.npz", **kept)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--truth", required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540, help="stop then; what is finished is kept")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    jobs = ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn"))
    plan = json.loads(arguments.plan.read_text())
    running = {
        jobs.submit(trial, job, arguments.data, arguments.truth, str(arguments.out)): job["name"] for job in plan
    }
    try:
        for done in as_completed(running, timeout=arguments.seconds):
            try:
                result = done.result()
            except Exception:
                print(f"{running[done]} failed: {traceback.format_exc()[-1500:]}", flush=True)
                continue
            with (arguments.out / "trials.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
            for mode, r in result["bn"].items():
                print(
                    f"{time.perf_counter() - start:4.0f} s {result['name']:24s} {result['seed']:3d} {mode:11s} "
                    f"tau {r['tau_b']:.3f} by loss {r['tau_b_loss']:.3f} top {r['tau_b_top10']:.3f} "
                    f"found {r['found_true']:.2f} (rank {r['found_rank']}) mean {r['mean_accuracy']:.3f} "
                    f"best {r['best_accuracy']:.3f}; {result['epochs']} epochs, "
                    f"{result['corrected_images'] / 1e6:.2f}M, {result['train_seconds']:.0f} + {r['seconds']:.0f} s",
                    flush=True,
                )
    except TimeoutError:
        print("out of time", flush=True)
    for process in list((jobs._processes or {}).values()):  # not waited for: what runs now would not be finished
        process.kill()


if __name__ == "__main__":
    main()
