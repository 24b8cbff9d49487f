"""Settings for `macro` on CIFAR-10: trials of each method on tuning seeds, ranked against NAS-Bench-Macro.

    python benchmarks/macro_tuning.py PLAN.json --data cifar10/ --truth nas-bench-macro_cifar10.json --jobs 8 --out DIR

The plan is a list of {"name": ..., "seed": ..., "set": {"train.sampler": ..., "train.max_epochs": ..., ...},
"bn": [modes], "paths": 1500, "images": 5000, "moments": 4, "filter": 100, "init": "torch", "canonical": true,
"cooldown": [[500, 0.1], ...]}; all from "bn" on may be left out. Every trial is a part of `greedynas study macro` with settings of its own: one supernet, so
many random paths (the same for all; without it all 6,561) on so many validation images (or all) in each BatchNorm mode, at so
many moments of its training (and, if its weights are averaged, once with the last ones). With "filter" the paths are also
ranked as filtering ranks them, by the loss on so few images that share their statistics, in each mode for three draws of images.
What no setting offers: "init", other weights to start from; "canonical", one set of weights for all paths that are the same
network; "cooldown", so many steps more from the last weights with uniformly sampled paths, at a learning rate that falls from this
to 0. (The older lines with "init": "zero" are what `train.zero_residuals`
does now.) A trial adds a line to trials.jsonl: rank correlation with the ground truth, the network it finds, its cost. The
accuracies are kept beside, and those along the trainings together in accuracies.npz, which `macro_groups.py` and `macro_pairs.py` read.
"""

import argparse
import json
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import chain, count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from greedynas.greedy import evaluation, filtering
from greedynas.greedy.filtering import sample_paths
from greedynas.greedy.steps import TrainingStep, make_optimizer
from greedynas.jobs.resolving import load_config
from greedynas.models import supernet
from greedynas.models.blocks import initialise
from greedynas.models.engine import prepare
from greedynas.rundir.checkpoints import load_weights, read_checkpoint
from greedynas.runtime.devices import choose_device
from greedynas.runtime.rng import stream
from greedynas.settings.schema import Config
from greedynas.spaces.paths import OpPath, canonical, parse_path
from greedynas.spaces.space import Space
from greedynas.stages.run import choose_precisions
from greedynas.studies.correlations import best_of, rank_correlations
from greedynas.studies.macro.run import ranked_paths, train_and_rank, what_is_ranked
from greedynas.studies.supernets import Trained, checkpoints_of, load_trained, rank_paths
from greedynas.studies.truth import read_truth

DRAWS = 3


def trial(job: dict[str, Any], source: str, truth_file: str, out: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    supernet.initialise = STARTS[job.get("init", "ours")]  # type: ignore[attr-defined]
    read_path = canonical_path if job.get("canonical") else parse_path
    filtering.parse_path = evaluation.parse_path = read_path  # type: ignore[attr-defined]
    config = load_config("cifar10", {**job["set"], "data.source": source, "seed": job["seed"]})
    part = {
        "config": config.model_dump(mode="json"),
        "cost_epochs": 1e6,  # no limit: the trial says how many epochs
        "own_epochs": config.train.max_epochs,
        "bn": job.get("bn", ["batch"]),
        "paths": job.get("paths"),
        "images": job.get("images"),
        "moments": job.get("moments", 1),
        "keep": True,  # the folder goes away
    }
    with tempfile.TemporaryDirectory() as folder:
        found = train_and_rank(Path(folder), part, Console(quiet=True))
        if config.train.ema:
            found["last_accuracy"] = last_weights(Path(folder), config, part)
        if "filter" in job:
            found |= filtered(Path(folder), config, part, job["filter"])
        cooled = {f"cooldown{steps}-{lr:g}": (steps, lr) for steps, lr in job.get("cooldown", [])}
        for name, (steps, lr) in cooled.items():
            found[f"{name}_accuracy"] = cooled_down(Path(folder), config, part, steps, lr)
    arrays = {name: found.pop(name) for name in list(found) if isinstance(found[name], np.ndarray)}
    np.savez_compressed(Path(out) / f"{job['name']}_{job['seed']}.npz", **arrays)
    truth = read_truth(Path(truth_file), config.space)
    true = truth.accuracies[ranked_paths(len(truth.accuracies), job.get("paths"))]
    for moment in found["moments"]:
        moment |= compared(arrays[f"step{moment['step']}_accuracy"], true)
    if "filter" in job:
        draws = {mode: [arrays[f"filter{draw}_{mode}_loss"] for draw in range(DRAWS)] for mode in part["bn"]}
        found["filter_tau_b"] = {
            mode: [rank_correlations(-loss, true)["tau_b"] for loss in losses] for mode, losses in draws.items()
        }
    ranked = [*part["bn"], *(["last"] if config.train.ema else []), *cooled]
    found["train"] = config.train.model_dump(mode="json")  # complete: the preset may change
    return {**job, **found, "bn": {mode: compared(arrays[f"{mode}_accuracy"], true) for mode in ranked}}


def last_weights(folder: Path, config: Config, part: dict[str, Any]) -> NDArray[np.float32]:
    """The accuracies of the paths with the last weights, where the averaged ones are what is ranked."""
    trained = load_trained(folder, config)
    load_weights(trained.net, read_checkpoint(checkpoints_of(folder)[-1])[0])
    return accuracies_of(trained, part)


def filtered(folder: Path, config: Config, part: dict[str, Any], count: int) -> dict[str, NDArray[np.float32]]:
    """The losses of the paths on a few images, a few times, in each mode."""
    trained, found = load_trained(folder, config), {}
    paths, _ = what_is_ranked(config, trained.data, part)
    for draw in range(DRAWS):
        images = trained.data.val.balanced(count, stream(config.seed, "filter images of a trial", draw))
        for mode in part["bn"]:
            ranked = rank_paths(trained, paths, mode, images, bn_images=count)[0]
            found[f"filter{draw}_{mode}_loss"] = ranked.losses.astype(np.float32)
    return found


def cooled_down(folder: Path, config: Config, part: dict[str, Any], steps: int, lr: float) -> NDArray[np.float32]:
    """The accuracies of the paths after some more steps, in which all paths are sampled alike."""
    trained = load_trained(folder, config)
    net, train, settings = trained.net.train(), trained.data.train, config.train
    precision = choose_precisions(config, choose_device(config.device))[0]
    step = TrainingStep(net, make_optimizer(net, settings), settings, None, precision)
    if precision == "bf16":
        prepare(net, settings.batch_size)
    rng = stream(config.seed, "cool-down")
    epochs = (train.train_batches(epoch, settings.batch_size) for epoch in count(settings.max_epochs))
    for done, (batch, labels) in enumerate(islice(chain.from_iterable(epochs), steps)):
        step(batch, labels, sample_paths(config.space, 1, rng), lr * (1 - done / steps))
    return accuracies_of(trained, part)


def accuracies_of(trained: Trained, part: dict[str, Any]) -> NDArray[np.float32]:
    paths, images = what_is_ranked(trained.config, trained.data, part)
    return rank_paths(trained, paths, part["bn"][0], images)[0].accuracies.astype(np.float32)


@torch.no_grad()
def as_torch_starts(net: nn.Module, generator: torch.Generator | None = None) -> None:
    """PyTorch's own start of convolutions and linear layers, as the networks of the ground truth had it."""
    initialise(net, generator)
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = module.weight[0].numel() ** -0.5
            for weight in module.parameters():
                weight.uniform_(-bound, bound, generator=generator)


def canonical_path(path: Any, space: Space) -> OpPath:
    return canonical(parse_path(path, space), space)


STARTS = {"ours": initialise, "torch": as_torch_starts}


def compared(accuracies: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    order, top = np.argsort(-accuracies, kind="stable"), best_of(true, len(true) // 10)
    return {
        "tau_b": rank_correlations(accuracies, true)["tau_b"],
        "tau_b_top10": rank_correlations(accuracies[top], true[top])["tau_b"],
        "found_true": float(true[order[0]]),
        "found_rank": int((true > true[order[0]]).sum()) + 1,
        "top5_true": float(true[order[:5]].mean()),
        "mean_accuracy": float(accuracies.mean()),
        "best_accuracy": float(accuracies.max()),
    }


def pack(out: Path) -> None:
    """How many of the validation images each path had right at each moment of each finished training, in one file."""
    packed = {}
    for told in map(json.loads, (out / "trials.jsonl").read_text().splitlines()):
        name = f"{told['name']}_{told['seed']}"
        with np.load(out / f"{name}.npz") as arrays:
            rows = [arrays[f"step{moment['step']}_accuracy"] for moment in told["moments"]]
            rows.append(arrays[f"{next(iter(told['bn']))}_accuracy"])
        packed[name] = np.round(np.array(rows) * told["val_images"]).astype(np.uint16)
    np.savez_compressed(out / "accuracies.npz", **packed)  # type: ignore[arg-type]


def tell(name: str, seed: int, found: dict[str, Any]) -> None:
    tau, top = (float("nan") if found[key] is None else found[key] for key in ("tau_b", "tau_b_top10"))
    print(
        f"{name:32s} {seed:3d} tau {tau:.3f} top {top:.3f} found {found['found_true']:.2f} "
        f"(rank {found['found_rank']}) mean {found['mean_accuracy']:.3f} best {found['best_accuracy']:.3f}",
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
            for moment in result["moments"]:
                tell(f"  after {moment['epoch']:.0f} epochs", result["seed"], moment)
            for mode, found in result["bn"].items():
                tell(f"{result['name']} {mode}", result["seed"], found)
            for mode, taus in result.get("filter_tau_b", {}).items():
                print(f"  on {result['filter']} images, {mode}: {' '.join(f'{tau:.3f}' for tau in taus)}", flush=True)
            told = f"{result['corrected_images'] / 1e6:.2f}M images; at {time.perf_counter() - start:.0f} s"
            print(f"  {result['epochs']} epochs, {told}", flush=True)
    except TimeoutError:
        print("out of time", flush=True)
    if (arguments.out / "trials.jsonl").exists():
        pack(arguments.out)
    for process in list((jobs._processes or {}).values()):  # not waited for: what runs now would not be finished
        process.kill()


if __name__ == "__main__":
    main()
