"""Measure how long checkpoints delay a training, relative to the interval between two of them.

    python benchmarks/scripts/checkpoints.py [--device cuda] [--steps 300] [--out FOLDER]

The demo (preset fashion) and the space `macro` at 32 px (preset cifar10, on Fashion-MNIST's images in colour, so that
nothing has to be downloaded) train for a while with the same settings, with a checkpoint every `--every` steps. Prints
the pause of each checkpoint (the time that the training loop waits for the copy of the state and for the end of the
previous write), the time of the concurrent write, and the pause as a share of the default interval. A concurrent write
takes processor time from training on a CPU, so steps during writes are compared with the others as well.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from greedynas import Supernet
from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.greedy.training import train_supernet
from greedynas.jobs.resolving import load_config
from greedynas.rundir.checkpointing import Checkpointing
from greedynas.runtime.rng import torch_stream
from greedynas.stages.run import Run, choose_precisions

WORK = {
    "demo": ("fashion", {}, 1),
    "macro": ("cifar10", {"batch_size": 32, "filter_images": 50, "bn_images": 50, "m": 4, "k": 2, "pool_size": 20}, 3),
}


class Stopwatch:
    """Times the checkpoints of a training, and its steps between them."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.writes: list[float] = []
        self.beside: list[float] = []  # steps during which a checkpoint was written
        self.alone: list[float] = []
        self.last = time.perf_counter()

    def watch(self) -> None:
        now, write, due = Checkpointing.now, Checkpointing._write, Checkpointing.if_due

        def timed(times: list[float], function: Any) -> Any:
            def call(*arguments: Any) -> Any:
                start = time.perf_counter()
                try:
                    return function(*arguments)
                finally:
                    times.append(time.perf_counter() - start)

            return call

        def stepped(checkpoint: Checkpointing, *path: Any) -> None:
            writing = checkpoint._writing is not None
            (self.beside if writing else self.alone).append(time.perf_counter() - self.last)
            due(checkpoint, *path)
            self.last = time.perf_counter()

        Checkpointing.now = timed(self.pauses, now)  # type: ignore[method-assign]
        Checkpointing._write = timed(self.writes, write)  # type: ignore[method-assign]
        Checkpointing.if_due = stepped  # type: ignore[method-assign]


def measure(name: str, device: torch.device, steps: int, every: int) -> dict[str, Any]:
    preset, changes, channels = WORK[name]
    config = load_config(preset, {**changes, "checkpoint_steps": every, "data.source": "fashion", "stopping": False})
    interval = load_config(preset).train.checkpoint_minutes * 60
    space = config.space.adapt(num_classes=10, image_channels=channels)
    wanted = {"image_size": space.image_size, "image_channels": channels, "seed": 0, "device": device}
    data = open_data(DataSettings(source="fashion", val_images=1000), **wanted)
    rest = len(data.train) + len(data.val) - steps * config.train.batch_size
    if rest > 1000:  # one epoch with that number of steps
        data = open_data(DataSettings(source="fashion", val_images=rest), **wanted)
    epochs = -(-steps // (len(data.train) // config.train.batch_size))
    train = config.train.model_copy(update={"max_epochs": epochs, "warmup": 0.25})
    net = Supernet(space, generator=torch_stream(0, "init")).to(device, memory_format=torch.channels_last)
    precision, eval_precision = choose_precisions(config, device)
    watch = Stopwatch()
    watch.watch()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Run.start(Path(folder), config) as run:
        state = train_supernet(net, data, train, precision=precision, eval_precision=eval_precision, run=run)
        size = run.checkpoints()[0].stat().st_size
    seconds = time.perf_counter() - start
    pause = statistics.median(watch.pauses)
    write = statistics.median(watch.writes)
    slower = statistics.mean(watch.beside) / statistics.mean(watch.alone) - 1 if watch.beside else 0.0
    return {
        "work": name,
        "space": space.name,
        "batch_size": train.batch_size,
        "steps": state.step,
        "seconds": seconds,
        "checkpoints": len(watch.pauses),
        "megabytes": size / 1e6,
        "pause_ms": 1000 * pause,
        "largest_pause_ms": 1000 * max(watch.pauses),
        "write_ms": 1000 * write,
        "interval_s": interval,
        "share": pause / interval,
        "worst_share": (max(watch.pauses) + max(slower, 0) * max(watch.writes)) / interval,
        "steps_beside_a_write_slower": slower,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    where = f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    lines = [f"checkpoints beside the training: {where}"]
    lines.append(f"{'work':8} {'MB':>6} {'n':>4} {'pause ms (largest)':>20} {'write ms':>9} {'interval s':>10} {'share':>9} {'worst':>9}")  # fmt: skip
    rows = [measure(name, device, options.steps, options.every) for name in WORK]
    for row in rows:
        pause = f"{row['pause_ms']:.1f} ({row['largest_pause_ms']:.1f})"
        lines.append(
            f"{row['work']:8} {row['megabytes']:6.1f} {row['checkpoints']:4} {pause:>20} {row['write_ms']:9.1f} "
            f"{row['interval_s']:10.0f} {row['share']:9.4%} {row['worst_share']:9.4%}"
        )
    lines.append("share: the median pause over the interval; worst: the largest one and what the write takes of the steps beside it")  # fmt: skip
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.out is not None:
        name = "checkpoints" if device.type == "cpu" else f"checkpoints_{device.type}"
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}.txt").write_text(text)
        (options.out / f"{name}.json").write_text(json.dumps({"machine": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
