"""Measure searches around a pretrained network: found networks beside random and evenly shrunk ones, fine-tuned alike.

    python benchmarks/scripts/pretrained_study.py plantdoc192 --weights package --seeds 600 601 602 603 604 --out runs/

Each seed and budget is a job of its own, as `greedynas run auto --flops N` does it; budgets that are joined by commas share a
job, as `--flops N --flops M` does it. For every budget, random feasible networks and one that is shrunk evenly are fine-tuned
from the same supernet with the same recipe. There is an evenly shrunk network for every image size; the one that the supernet
ranks first is trained. A run that was interrupted goes on, and results in the file are not computed again. `--scratch` runs each
job a second time from scratch, in the same time.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from scipy import stats

from greedynas.greedy.validation import SupernetAccuracies
from greedynas.jobs.job import run_job
from greedynas.jobs.resolving import settings_of
from greedynas.runtime.rng import stream
from greedynas.settings.schema import Config
from greedynas.spaces.budget import Budget, parse_limits
from greedynas.spaces.ops import parse_op
from greedynas.spaces.paths import compact
from greedynas.spaces.space import Space
from greedynas.stages.retrain import retrain_stage
from greedynas.stages.run import Run, read_run_config
from greedynas.stages.trained_supernet import load_supernet

SHARES = (1.0, 0.6667, 0.5, 0.3333)
KERNELS = (5, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", default="package")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--flops", nargs="+", default=["20M,40M,80M"])
    parser.add_argument("--sampler", default="greedy")
    parser.add_argument("--hours", type=float)
    parser.add_argument("--random", type=int, default=1, help="random feasible networks for each job")
    parser.add_argument("--scratch", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the jobs, as KEY=VALUE")
    options = parser.parse_args()
    console = Console(width=120)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(row["sampler"], row["job"], row["seed"]) for row in rows}
    for seed in options.seeds:
        for flops in options.flops:
            if (options.sampler, flops, seed) in done:
                continue
            folder = options.out / f"{options.sampler}-{flops.replace(',', '-')}-{seed}"
            new = one_run(options, folder, flops, seed, console)
            with results.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in new))
            rows += new
    summary([row for row in rows if row["sampler"] == options.sampler], console)


def summary(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the mean accuracy of each kind of network, and by how much the found networks are better, with intervals."""
    kinds = ("found", "random", "shrunk", "base", "scratch")
    for flops in [*dict.fromkeys(row["flops"] for row in rows), "all"]:
        chosen = [row for row in rows if flops in (row["flops"], "all")]
        accuracies = {kind: np.array([accuracy_of(row, kind) for row in chosen]) for kind in kinds}
        for kind, values in accuracies.items():
            if np.isnan(values).all():
                continue
            line = f"{flops} {kind}: {100 * np.nanmean(values):.1f}% (n {np.count_nonzero(~np.isnan(values))})"
            gains = 100 * (accuracies["found"] - values)
            gains = gains[~np.isnan(gains)]
            if kind != "found" and len(gains) > 1:
                spread = stats.t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / len(gains) ** 0.5
                line += f"; found is {gains.mean():+.1f} points better, 95% interval {gains.mean() - spread:+.1f} to "
                line += f"{gains.mean() + spread:+.1f}"
            console.print(line, highlight=False)


def accuracy_of(row: dict[str, Any], kind: str) -> float:
    """Return the mean test accuracy of the networks of a kind in a row, or NaN."""
    values = [facts["test_top1"] for name, facts in row["networks"].items() if name.partition("-")[0] == kind]
    return float(np.mean(values)) if values else float("nan")


def one_run(options: argparse.Namespace, folder: Path, flops: str, seed: int, console: Console) -> list[dict[str, Any]]:
    """Run one job and its rivals, and return a row with the accuracies of all networks for each budget."""
    limits: Any = {"macs": (flops.split(","), None), "params": (None, None), "latency_ms": (None, None)}
    changes = {"data.source": options.data, "seed": seed, "weights": options.weights, "train.sampler": options.sampler}
    changes |= {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in options.set)}
    budgets = parse_limits(limits)
    config, data = settings_of("auto", changes, folder, console, budgets, options.hours)
    start = time.perf_counter()
    models = run_job(config, folder, limits, console, data=data)["models"]
    seconds = time.perf_counter() - start  # too little for a run that was interrupted
    space = read_run_config(folder).space.adapt(num_classes=models[0]["num_classes"])
    base = json.loads((folder / "models" / "base" / "arch.json").read_text())
    settings = config.retrain.model_copy(update={"top": 1})
    rows = []
    for budget, one, found in zip(budgets, flops.split(","), models, strict=True):
        even = best_of(shrunk(space, budget), folder, config)
        networks = {"found": found, "base": base}
        for name, path in {**even, **drawn(space, budget, seed, options.random)}.items():
            networks[name] = retrain_stage(
                folder, console, settings=settings, arch=compact(path, space), name=f"{name}-{one}", data=data
            )
        rows.append({"sampler": options.sampler, "flops": one, "job": flops, "seed": seed, "networks": networks})
    if options.scratch:
        changes = {"data.source": options.data, "seed": seed, "scratch": True}
        beside = folder.with_name(f"{folder.name}-scratch")
        config, data = settings_of("auto", changes, beside, console, budgets, seconds / 3600)
        start = time.perf_counter()
        scratch = run_job(config, beside, limits, console, data=data)["models"]
        for row, network in zip(rows, scratch, strict=True):
            row["networks"]["scratch"] = {**network, "job_seconds": time.perf_counter() - start}
    for row in rows:
        row["networks"]["found"] = {**row["networks"]["found"], "job_seconds": seconds}
        row["networks"] = {name: kept(facts) for name, facts in row["networks"].items()}
    return rows


def kept(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a network that a row has."""
    costs = ("macs", "params", "image_size", "supernet_accuracy", "ops", "job_seconds")
    return {key: facts.get(key) for key in ("test_top1", "test_macro", "test_loss", *costs)}


def best_of(paths: dict[str, tuple[int, ...]], folder: Path, config: Config) -> dict[str, tuple[int, ...]]:
    """Return the path to which the supernet gives the highest accuracy on the validation images."""
    with Run.open(folder) as run:
        net, _, data, precision = load_supernet(run, config)
    names = list(paths)
    seen = SupernetAccuracies(net, data, config.search, config.seed, precision).evaluate(
        [paths[name] for name in names]
    )
    best = names[int(np.argmax(seen.accuracies))]
    return {best: paths[best]}


def drawn(space: Space, budget: Budget, seed: int, number: int) -> dict[str, tuple[int, ...]]:
    """Return random feasible paths."""
    paths = space.sample(number, stream(seed, "random rivals"), budget)
    return {f"random-{i}": tuple(path) for i, path in enumerate(paths.tolist())}


def shrunk(space: Space, budget: Budget) -> dict[str, tuple[int, ...]]:
    """Return, for each image size, the most expensive path within the budget that has one expansion and one kernel everywhere."""
    found = {}
    for place, pixels in enumerate(space.sizes):
        paths = [evenly(space, place, share, kernel) for share in SHARES for kernel in KERNELS]
        costs = space.costs(np.array(paths)).macs
        fits = [i for i in range(len(paths)) if costs[i] <= (budget.max_macs or np.inf)]
        if fits:
            found[f"shrunk-{pixels}"] = paths[max(fits, key=lambda i: int(costs[i]))]
    return found


def evenly(space: Space, place: int, share: float, kernel: int) -> tuple[int, ...]:
    """Return the path in which every block has this share of its channels and at most this kernel."""
    path = [place]
    for layer in space.layers[1:]:
        block = layer.block
        assert block is not None
        assert block.hidden is not None
        wanted = share * block.hidden if block.expands else block.hidden

        def distance(op: str, layer: Any = layer, wanted: float = wanted, own: int = block.kernel) -> tuple[Any, ...]:
            kind = parse_op(op)
            if kind.family == "ID":
                return (True, 0.0, 0)
            return (False, abs(kind.hidden(layer.in_channels) - wanted), abs(kind.kernel - min(kernel, own)))

        path.append(min(range(len(layer.ops)), key=lambda j: distance(layer.ops[j])))
    return tuple(path)


if __name__ == "__main__":
    main()
