"""Settings for `macro` on CIFAR-10: trials of each method on tuning seeds, ranked against NAS-Bench-Macro.

    python benchmarks/macro_tuning.py PLAN.json --data cifar10/ --truth nas-bench-macro_cifar10.json --jobs 8 --out DIR

The plan is a list of {"name": ..., "seed": ..., "set": {"train.sampler": ..., "train.max_epochs": ..., ...},
"bn": [modes], "paths": 1500, "images": 5000, "engine": "off", "init": "torch", "snapshots": 10}; all from "bn" on may be left
out. Every trial trains one supernet, evaluates that many random paths (the same for all; without it all 6,561) on so many
validation images (or all) in each BatchNorm mode, every so many epochs where there are to be snapshots, and adds a line to
trials.jsonl: rank correlation with the ground truth, the network it finds, its cost. The accuracies are kept beside.
"""

import argparse
import itertools
import json
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn

from greedynas.config import Config, load_config
from greedynas.evaluation import evaluate_paths
from greedynas.gpu import engine
from greedynas.runs import Run, read_checkpoint
from greedynas.schedule import Schedule
from greedynas.state import TrainState
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
    if job.get("init") == "torch":
        as_torch_starts(net, torch_stream(seed, "torch init"))
    engine.use(job.get("engine", "auto"))
    truth = json.loads(Path(truth_file).read_text())
    chosen = stream(0, "tuning paths").permutation(len(ALL))[: job.get("paths", len(ALL))]
    paths = [ALL[i] for i in np.sort(chosen)]
    true = np.array([truth["".join(map(str, path))]["mean_acc"] for path in paths])
    kept: dict[str, Any] = {}

    def ranked(name: str, mode: str) -> dict[str, Any]:
        start = time.perf_counter()
        calibration = calibration_images(data, 512, stream(seed, "ranking"))
        options: dict[str, Any] = {"bn_images": 500, "calibration": calibration, "precision": precision}
        images, labels = (part[: job.get("images")] for part in data.val.eval_batch())
        found = evaluate_paths(net, paths, images, labels, mode, **options)  # type: ignore[arg-type]
        kept[name], kept[name + "_loss"] = found.accuracies.astype(np.float32), found.losses.astype(np.float32)
        return {**compared(found.accuracies, found.losses, true), "seconds": time.perf_counter() - start}

    with tempfile.TemporaryDirectory() as folder:
        run = Run.start(Path(folder), with_snapshots(config, len(data.train), job.get("snapshots", 0)))
        with run:
            start = time.perf_counter()
            state = train_supernet(
                net, data, run.config().train, seed=seed, precision=precision, eval_precision=precision, run=run
            )
            trained = time.perf_counter() - start
        result = {**job, **told(state), "train_seconds": trained}
        result["bn"] = {mode: ranked(mode, mode) for mode in job.get("bn", ["batch"])}
        result["snapshots"] = []
        for file in reversed(run.checkpoints()[1:]):  # the newest one is the end
            tensors, saved = read_checkpoint(file)
            net.load_state_dict({name[4:]: tensor for name, tensor in tensors.items() if name.startswith("net.")})
            then = TrainState.from_json(saved)
            result["snapshots"].append({**told(then), **ranked(f"step{then.step}", "batch")})
    np.savez_compressed(Path(out) / f"{job['name']}_{seed}.npz", **kept)
    return result


@torch.no_grad()
def as_torch_starts(net: Supernet, generator: torch.Generator) -> None:
    """PyTorch's own start of convolutions and linear layers, as the networks of the ground truth had it."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = module.weight[0].numel() ** -0.5
            for weight in module.parameters():
                weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))


def with_snapshots(config: Config, train_images: int, epochs: int) -> Config:
    """A checkpoint every so many epochs, and all of them kept; 0: at the end alone."""
    train: dict[str, Any] = {"checkpoint_minutes": 1e6}
    if epochs:
        every = epochs * Schedule(config.train, train_images).steps_per_epoch
        train |= {"checkpoint_steps": every, "keep_checkpoints": 10_000}
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def told(state: TrainState) -> dict[str, Any]:
    return {
        "step": state.step,
        "epochs": state.epoch,
        "optimization_images": state.optimization_images,
        "evaluation_images": state.evaluation_images,
        "corrected_images": state.corrected_images,
        "pi": state.novelty,
    }


def compared(accuracies: np.ndarray, losses: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    order = np.argsort(-accuracies, kind="stable")
    top = np.argsort(-true, kind="stable")[: len(true) // 10]
    return {
        "tau_b": stats.kendalltau(accuracies, true).statistic,
        "tau_b_loss": stats.kendalltau(-losses, true).statistic,
        "tau_b_top10": stats.kendalltau(accuracies[top], true[top]).statistic,
        "found_true": true[order[0]],
        "found_rank": int((true > true[order[0]]).sum()) + 1,
        "top5_true": true[order[:5]].mean(),
        "mean_accuracy": accuracies.mean(),
        "best_accuracy": accuracies.max(),
    }


def tell(name: str, seed: int, mode: str, found: dict[str, Any], corrected: float) -> None:
    print(
        f"{name:28s} {seed:3d} {mode:11s} tau {found['tau_b']:.3f} by loss {found['tau_b_loss']:.3f} "
        f"top {found['tau_b_top10']:.3f} found {found['found_true']:.2f} (rank {found['found_rank']}) "
        f"mean {found['mean_accuracy']:.3f} best {found['best_accuracy']:.3f}; {corrected / 1e6:.2f}M",
        flush=True,
    )


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
            for r in result["snapshots"]:
                tell(f"  after {r['step']} steps", result["seed"], "batch", r, r["corrected_images"])
            for mode, r in result["bn"].items():
                tell(result["name"], result["seed"], mode, r, result["corrected_images"])
            print(f"{time.perf_counter() - start:4.0f} s, training {result['train_seconds']:.0f} s", flush=True)
    except TimeoutError:
        print("out of time", flush=True)
    for process in list((jobs._processes or {}).values()):  # not waited for: what runs now would not be finished
        process.kill()


if __name__ == "__main__":
    main()
