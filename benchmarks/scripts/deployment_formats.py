"""Compare all export formats and precisions with PyTorch, and time them on one thread, side by side.

    python -m benchmarks.scripts.deployment_formats --images FOLDER --run runs/demo --out FOLDER/deployment

Three networks at 224 px (GreedyNAS-A, a random path of ShuffleNet units, a random path with squeeze-and-excitation) are
trained for STEPS steps on the other images, whose folders are the classes: fresh weights amplify rounding errors a
hundredfold, so that even ONNX Runtime and PyTorch would differ by 3e-4. Their agreement with PyTorch is measured on 100
images, and `same_top1` is the share of images with PyTorch's class. The trained
network of `--run` is exported by `greedynas export`, whose accuracies are those on its test images. Formats whose
packages are missing are left out and named. Latencies are only worth keeping from a machine that does nothing else.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from greedynas import export, load_space
from greedynas.data.transforms import normalisation
from greedynas.deploy.formats.format import Conversion, make_format
from greedynas.deploy.prediction import make_input, read_square
from greedynas.deploy.timing import take_turns
from greedynas.models.model_file import Card, make_network
from greedynas.runtime.devices import cpu_name
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import torch_stream
from greedynas.spaces.zoo import resolve
from greedynas.stages.export_files import Timing

FORMATS = ("onnx", "openvino", "litert", "executorch", "ncnn", "pt2", "coreml")
NETWORKS = ("greedynas-a", "shufflenet", "mobilenet-se")
IMAGES, CALIBRATION, ROUNDS, SIZE, CLASSES = 100, 64, 20, 224, 10
TRAINING, STEPS, BATCH = 400, 60, 16


def make_case(name: str, files: Sequence[Path]) -> tuple[torch.nn.Module, Card, torch.Tensor, torch.Tensor]:
    """Return a network with statistics of real images, its card, and images for checks and for calibration."""
    if name in ("shufflenet", "mobilenet-se"):
        space = load_space(name)
        path = tuple(space.sample(1, np.random.default_rng(0))[0].tolist())
    else:
        space, path = resolve(name, None)
    space, path = space.adapt(num_classes=CLASSES, image_size=SIZE).settle(path)
    mean, std = normalisation(3)
    facts = {"image_size": SIZE, "image_channels": 3, "crop_fraction": 0.875, "mean": mean, "std": std}
    card = Card(name=name, space=space, path=path, class_names=tuple(f"class {i}" for i in range(CLASSES)), **facts)
    network = make_network(card, torch_stream(0, "init"))
    inputs = torch.cat([make_input([read_square(file, card)], card) for file in files]).contiguous()
    images, calibration = inputs[:IMAGES], inputs[IMAGES:]
    folders = sorted({file.parent.name for file in files})
    labels = torch.tensor([folders.index(file.parent.name) % CLASSES for file in files])[IMAGES:]
    train_briefly(network.train(), calibration, labels)
    return network.eval(), card, images, calibration[:CALIBRATION]


def train_briefly(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Train a network for STEPS steps with SGD."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch_stream(0, "batches")
    for _ in range(STEPS):
        rows = torch.randperm(len(images), generator=generator)[:BATCH]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
        optimizer.step()
        schedule.step()


def measure(name: str, files: Sequence[Path], formats: Sequence[str], folder: Path) -> dict:
    """Convert a network to all formats, compare each file with PyTorch, and time all of them in turns."""
    network, card, images, calibration = make_case(name, files)
    with torch.no_grad():
        expected = torch.cat([network(part) for part in images.split(10)]).softmax(1)
    source = Conversion(network, card, lambda: iter(calibration.split(16)))
    rows, runners, missing = [], {}, {}
    for format_name in formats:
        try:
            format = make_format(format_name, converting=True)
        except GreedyNASError as error:
            missing[format_name] = str(error)
            continue
        for precision in format.precisions:
            file, start = folder / format.file_name(precision), time.perf_counter()
            row = {"network": name, "format": format_name, "precision": precision, "runtime": format.runtime()}
            rows.append(row)
            try:
                format.convert(source, precision, file)
            except Exception as error:  # a network that a converter does not support is a result
                row["failed"] = " ".join(str(error).split())[:300]
                continue
            parts = [
                part for one in (file, *format.parts(file)) for part in ([one] if one.is_file() else one.rglob("*"))
            ]
            row |= {
                "seconds": time.perf_counter() - start,
                "bytes": sum(part.stat().st_size for part in parts if part.is_file()),
            }
            classify = format.open(file, 1)
            if classify is None:
                row["run"] = False
                continue
            found = torch.cat([classify(part) for part in images.split(10)]).softmax(1)
            row["max_difference"] = float((found - expected).abs().max())
            row["same_top1"] = float((found.argmax(1) == expected.argmax(1)).float().mean())
            runners[len(rows) - 1] = format.runner(file, images[:1].contiguous(), 1)
            print(
                f"{name} {format_name} {precision}: {row['max_difference']:.2g}, same class {row['same_top1']:.0%}",
                flush=True,
            )
    for number, rounds in zip(runners, take_turns(list(runners.values()), ROUNDS), strict=True):
        rows[number]["latency_ms"] = vars(Timing.of(rounds))
    return {
        "rows": rows,
        "missing": missing,
        "machine": cpu_name(),
        "images": len(images),
        "calibration": len(calibration),
    }


def exported_anew(run: Path, formats: Sequence[str]) -> dict:
    """Return `export.json` of a copy of a run, all of whose files are converted and measured now."""
    with TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(run, Path(folder, "run")))
        for record in copy.glob("models/*/export.json"):
            record.unlink()
        made = export(copy, formats=formats)
        return json.loads((copy / "models" / made.best.name / "export.json").read_text())


def show(results: list[dict]) -> str:
    """Return the table of a record as Markdown."""
    lines = [
        "| network | format | precision | size | largest difference | same class | lowest | median ± IQR |",
        "|" + "---|" * 8,
    ]
    for row in (row for result in results for row in result["rows"]):
        head = f"| {row['network']} | {row['format']} | {row['precision']} |"
        if "failed" in row:
            lines.append(f"{head} | failed: {row['failed']} | | | |")
            continue
        size = f" {row['bytes'] / 1e6:.2f} MB |"
        if "max_difference" not in row:
            lines.append(f"{head}{size} converted, not run | | | |")
            continue
        time_ = row["latency_ms"]
        lines.append(
            f"{head}{size} {row['max_difference']:.1e} | {row['same_top1']:.0%} | {time_['lowest']:.3g} ms | "
            f"{time_['median']:.3g} ± {time_['spread']:.2g} ms |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--images",
        type=Path,
        required=True,
        help="a folder of images, of which 500 are used, in one folder for each class",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="a run directory with a trained network")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    formats = options.formats.split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one:
        files = sorted(file for file in options.images.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
        chosen = [files[i] for i in np.random.default_rng(0).permutation(len(files))[: IMAGES + TRAINING]]
        with TemporaryDirectory() as folder:
            result = measure(options.one, chosen, formats, Path(folder))
        (options.out / f"{options.one}.json").write_text(json.dumps(result, indent=1) + "\n")
        return
    results = []
    for name in options.networks.split(","):  # each in a process of its own, so that no runtime is warm
        subprocess.run(
            [sys.executable, "-m", "benchmarks.scripts.deployment_formats", *sys.argv[1:], "--one", name],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        results.append(json.loads((options.out / f"{name}.json").read_text()))
    if options.run:
        record = exported_anew(options.run, [name for name in formats if name not in results[0]["missing"]])
        (options.out / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "table.md").write_text(show(results) + "\n")
    print(show(results))


if __name__ == "__main__":
    main()
