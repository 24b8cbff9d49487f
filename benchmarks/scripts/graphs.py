"""Compare replayed CUDA graphs with plain PyTorch for small images: training, filtering and ranking of `macro`.

    python benchmarks/scripts/graphs.py --data FOLDER --out graphs.json               (CIFAR-10 as class folders)
    python benchmarks/scripts/graphs.py --data FOLDER --together 1,2,4,8 [--mps]      (several trainings on one GPU)

Plain means engine off, bf16, channels_last, and a new random path every step; both include augmentation and optimizer.
Rankings are of a supernet that was trained for three epochs. Memory is measured in a process of its own, which trains
one epoch with the greedy sampler (`--memory`).
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.gpu import engine
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.samplers.fair import fair_paths
from greedynas.greedy.steps import TrainingStep, supernet_optimizer
from greedynas.greedy.training import train_supernet
from greedynas.jobs.resolving import load_config
from greedynas.models.engine import warm_up
from greedynas.models.supernet import Supernet
from greedynas.runtime.rng import stream, torch_stream

DEVICE = torch.device("cuda")
BATCH = 256
MODES = {"plain": "off", "graphs": "auto"}


def fresh(config: Any, seed: int = 0) -> Supernet:
    net = Supernet(config.space, generator=torch_stream(seed, "init"))
    return net.to(DEVICE, memory_format=torch.channels_last).train()


def steps(config: Any, data: Any, net: Supernet, count: int, lr: float, seed: int = 0) -> Any:
    """Yield the losses, on the device, of training steps on random paths (or fair groups of them)."""
    step = TrainingStep(net, supernet_optimizer(net, config.train), config.train, None, "bf16")
    batches = (batch for epoch in itertools.count() for batch in data.train.train_batches(epoch, BATCH))
    paths = [tuple(path) for path in config.space.sample(count, stream(seed, "paths")).tolist()]
    for i, (images, labels) in zip(range(count), batches, strict=False):
        fair = config.train.sampler == "fair"
        yield step(images, labels, fair_paths(config.space, stream(seed, "fair", i)) if fair else [paths[i]], lr)


def time_steps(config: Any, data: Any, count: int) -> dict[str, float]:
    times = []
    for i, _ in enumerate(steps(config, data, fresh(config), count + 60, 0.01)):
        if i >= 40 and i % 20 == 0:
            torch.cuda.synchronize()
            times.append(time.perf_counter())
    median = statistics.median(b - a for a, b in itertools.pairwise(times)) / 20
    return {"ms_a_step": 1e3 * median, "images_per_second": BATCH / median}


def learn(config: Any, data: Any, count: int, seed: int, sampler: str) -> float:
    """Return the mean loss of the last fifty steps of a training."""
    config = config.model_copy(update={"train": config.train.model_copy(update={"sampler": sampler})})
    losses = torch.stack(list(steps(config, data, fresh(config, seed), count, 0.05, seed)))
    return float(losses[-50:].mean())


def synchronisations(config: Any, data: Any) -> str:
    """Check that a step does not wait for the GPU."""
    running = steps(config, data, fresh(config), 60, 0.01)
    for _ in range(20):
        next(running)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            next(running)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none in 20 steps"


def filtering(config: Any, data: Any, net: Supernet, images: int) -> float:
    """Return the milliseconds for ten new paths on new images."""
    times = []
    for i in range(12):
        paths = config.space.sample(10, stream(i, "filter"))
        chosen = data.val.balanced(images, stream(i, "images"))
        torch.cuda.synchronize()
        start = time.perf_counter()
        evaluate_paths(net, list(paths), *data.val.eval_batch(chosen), "batch", bn_images=1000, precision="bf16")
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[2:])


def rank(net: Supernet, images: Any, labels: Any) -> tuple[Any, float]:
    everything = np.indices((3,) * 8).reshape(8, -1).T
    options: dict[str, Any] = {"bn_images": 1000, "precision": "bf16"}
    evaluate_paths(net, list(everything[:: len(everything) // 20]), images[:1000], labels[:1000], **options)  # warm
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = evaluate_paths(net, list(everything), images, labels, "batch", **options)
    return result, time.perf_counter() - start


def ranking(config: Any, data: Any) -> dict[str, float]:
    net = fresh(config)
    for _ in steps(config, data, net, 3 * data.train.steps_per_epoch(BATCH), 0.05):
        pass
    images, labels = data.val.eval_batch()
    images, labels = images[:5000], labels[:5000]
    found: dict[str, Any] = {"images": len(images)}
    results = {}
    for name, mode in MODES.items():
        with engine.using(mode):  # type: ignore[arg-type]
            results[name], found[f"{name}_s"] = rank(net, images, labels)
            found[f"{name}_filter_ms"] = {n: filtering(config, data, net, n) for n in (250, 1000)}
    a, b = results["graphs"], results["plain"]
    found["ratio"] = found["plain_s"] / found["graphs_s"]
    found["tau"] = float(stats.kendalltau(a.losses, b.losses).statistic)
    found["tau_of_accuracies"] = float(stats.kendalltau(a.accuracies, b.accuracies).statistic)
    found["largest_loss_difference"] = float(np.abs(a.losses - b.losses).max())
    found["mean_loss"], found["mean_accuracy"] = float(b.losses.mean()), float(b.accuracies.mean())
    return found


def memory(config: Any, data: Any) -> dict[str, float]:
    """Measure the memory of an epoch of greedy training, including filtering."""
    settings = config.train.model_copy(update={"max_epochs": 1, "warmup": 50})
    start = time.perf_counter()
    state = train_supernet(fresh(config), data, settings, precision="bf16", eval_precision="bf16")
    gib = {"peak_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
    found = {name: value / 2**30 for name, value in gib.items()}
    return found | {"steps": state.step, "paths_in_pool": len(state.pool), "seconds": time.perf_counter() - start}


def worker(config: Any, data: Any, folder: Path) -> None:
    """Run one of several trainings: get ready, then train for five seconds once the file `go` exists."""
    running = steps(config, data, fresh(config), 10**6, 0.01)
    for _ in range(30):
        next(running)
    torch.cuda.synchronize()
    (folder / f"ready{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < 5:
        for _ in range(20):
            next(running)
        torch.cuda.synchronize()
        done += 20
    print(BATCH * done / (time.perf_counter() - start))


def together(source: str, counts: list[int], mps: bool) -> dict[int, float]:
    """Return the images per second of several processes together, by their number."""
    pipes = tempfile.mkdtemp()
    environment = os.environ | ({"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": pipes} if mps else {})
    if mps:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env=environment)
    found = {}
    try:
        for count in counts:
            folder = Path(tempfile.mkdtemp())
            command = [sys.executable, __file__, "--data", source, "--worker", str(folder)]
            children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(count)]  # fmt: skip
            while len(list(folder.iterdir())) < count and all(child.poll() is None for child in children):
                time.sleep(0.05)
            (folder / "go").touch()
            found[count] = sum(float(child.communicate()[0].split()[-1]) for child in children)
            print(f"{count} processes{' with MPS' if mps else ''}: {found[count]:,.0f} images/s", flush=True)
    finally:
        if mps:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment)
    return found


def record_all(config: Any, data: Any, arguments: Any) -> dict[str, Any]:
    record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}

    def part(name: str, work: Any) -> None:
        start = time.perf_counter()
        try:
            record[name] = work()
        except Exception as error:  # continue with the other parts
            record[name] = repr(error)[:400]
        print(f"{name} ({time.perf_counter() - start:.1f} s): {record[name]}", flush=True)

    part("compiling_s", lambda: _clocked(lambda: warm_up(config.space, BATCH)))
    command = [sys.executable, __file__, "--data", arguments.data, "--memory"]
    part("memory", lambda: json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
    part("synchronisations", lambda: synchronisations(config, data))
    for name, mode in reversed(MODES.items()):
        with engine.using(mode):  # type: ignore[arg-type]
            part(f"step, {name}", lambda: time_steps(config, data, arguments.steps))
    part("ranking 6,561 paths", lambda: ranking(config, data))
    for sampler, count in (("uniform", 300), ("fair", 150)):
        for name, mode in MODES.items():
            with engine.using(mode):  # type: ignore[arg-type]
                work = lambda s=sampler, c=count: [learn(config, data, c, seed, s) for seed in range(2)]  # noqa: E731
                part(f"loss after {count} steps, {sampler}, {name}", work)
    return record


def _clocked(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--together")
    parser.add_argument("--mps", action="store_true")
    arguments = parser.parse_args()
    if arguments.together:
        together(arguments.data, [int(count) for count in arguments.together.split(",")], arguments.mps)
        return
    config = load_config("cifar10")
    settings = DataSettings(**{**config.data.model_dump(), "source": arguments.data})
    data = open_data(settings, image_size=32, image_channels=3, seed=0, device=DEVICE)
    if arguments.worker:
        worker(config, data, arguments.worker)
    elif arguments.memory:
        print(json.dumps(memory(config, data)))
    else:
        record = record_all(config, data, arguments)
        if arguments.out:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
