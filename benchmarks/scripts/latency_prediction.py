"""Compare latency tables, as sums over blocks, with whole networks, on one thread and one image at a time.

    python benchmarks/scripts/latency_prediction.py macro fashion mobilenet:64 --out latency.json
    python benchmarks/scripts/latency_prediction.py macro fashion --backend openvino --out openvino.json

For each space, a table is measured (`greedynas.measure_latency`, which fits its constant on 8 networks of its own).
Then 20 other random paths are exported as whole networks by the export format of the same runtime (not composed of
the timed blocks) and timed in turns. As for the blocks, the latency of a network is the lowest of its medians, one per round. `space:64` is a space
at 64 px.
"""

import argparse
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from scipy import stats

from greedynas import build_network, load_space, measure_latency
from greedynas.data.transforms import normalisation
from greedynas.deploy.formats.format import Conversion, make_format
from greedynas.deploy.onnx_files import export_onnx, onnx_runner
from greedynas.deploy.timing import Runner, quietest, take_turns
from greedynas.models.model_file import Card
from greedynas.runtime.rng import stream
from greedynas.spaces.paths import OpPath, canonical, compact
from greedynas.spaces.space import Space

PATHS = 20


def random_paths(space: Space, n: int, seed: int) -> list[OpPath]:
    """Return n distinct networks."""
    paths: dict[OpPath, None] = {}
    for path in space.sample(100 * n, stream(seed, "latency prediction")).tolist():
        paths[canonical(path, space)] = None
    return list(paths)[:n]


def whole_network(space: Space, path: OpPath, backend: str, folder: Path) -> Runner:
    """Return a function that times a network in the runtime of a backend."""
    network = build_network(path, space).eval()
    image = torch.randn(1, space.image_channels, space.image_size, space.image_size)
    if backend == "onnxruntime":
        return onnx_runner(export_onnx(network, image), image, threads=1)
    mean, std = normalisation(space.image_channels)
    names = tuple(f"class {i}" for i in range(space.num_classes))
    facts = {"image_size": space.image_size, "image_channels": space.image_channels, "crop_fraction": 1.0}
    card = Card(name="network", space=space, path=path, class_names=names, mean=mean, std=std, **facts)
    format = make_format(backend, converting=True)
    file = folder / f"{compact(path, space)}{format.suffix}"
    format.convert(Conversion(network, card, lambda: iter(())), "fp32", file)
    return format.runner(file, image, 1)


def predict_and_measure(space: Space, paths: list[OpPath], repeats: int, seed: int, backend: str) -> dict[str, Any]:
    load = [os.getloadavg()[0]]
    start = time.perf_counter()
    table = measure_latency(space, backend, threads=1, repeats=repeats)
    seconds = time.perf_counter() - start
    with TemporaryDirectory() as folder:
        runners = [whole_network(space, path, backend, Path(folder)) for path in paths]
    medians = take_turns(runners, repeats)
    load.append(os.getloadavg()[0])
    predicted, measured = table.cost_table(space)(np.array(paths)), quietest(medians)
    errors = np.abs(predicted - measured) / measured
    typical = np.median(medians, axis=1)
    return {
        "space": space.name,
        "image_size": space.image_size,
        "device": table.device,
        "backend": table.backend,
        "threads": table.threads,
        "repeats": repeats,
        "seed": seed,
        "load_average": load,
        "table_seconds": seconds,
        "constant_ms": table.constant_ms,
        "spearman": float(stats.spearmanr(predicted, measured).statistic),
        "median_error": float(np.median(errors)),
        "worst_error": float(errors.max()),
        "median_error_without_constant": float(np.median(np.abs(predicted - table.constant_ms - measured) / measured)),
        "median_error_against_typical_rounds": float(np.median(np.abs(predicted - typical) / typical)),
        "paths": [
            {
                "path": compact(path, space),
                "predicted_ms": float(guess),
                "measured_ms": float(truth),
                "typical_ms": float(usual),
                "rounds_ms": [round(float(ms), 4) for ms in rounds],
            }
            for path, guess, truth, usual, rounds in zip(paths, predicted, measured, typical, medians, strict=True)
        ],
        "table": table.model_dump(mode="json"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spaces", nargs="+", metavar="SPACE[:SIZE]")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for text in arguments.spaces:
        name, _, size = text.partition(":")
        space = load_space(name).adapt(image_size=int(size) if size else None)
        paths = random_paths(space, PATHS, arguments.seed)
        record = predict_and_measure(space, paths, arguments.repeats, arguments.seed, arguments.backend)
        records.append(record)
        print(f"{text}: {record['device']}, {record['backend']}, one thread; load {record['load_average']}")
        for row in record["paths"]:
            print(f"  {row['path']}  predicted {row['predicted_ms']:.4f} ms, measured {row['measured_ms']:.4f} ms")
        print(
            f"  Spearman {record['spearman']:.3f}, median error {record['median_error']:.1%}, worst {record['worst_error']:.1%} "
            f"({len(paths)} paths; constant {record['constant_ms']:.4f} ms; table in {record['table_seconds']:.0f} s)"
        )
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
