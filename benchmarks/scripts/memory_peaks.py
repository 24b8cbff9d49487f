"""Compare the peak memory and the flash that the cost tables state with an executor, on 40 random paths of five spaces.

    python -m benchmarks.scripts.memory_peaks --out FOLDER/memory-peaks

The executor (`tests/helpers/reference_executor.py`) runs the network op by op and counts the bytes of the tensors that
are in memory. Both numbers must agree to the byte.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from greedynas import build_network, load_space
from greedynas.spaces.memory import memory_tables
from tests.helpers.reference_executor import measured_peak, stored_bytes

SPACES = {"micro": 48, "mobilenet-se": 33, "shufflenet": 32, "pocket": 32, "macro": 32}
PATHS = 40


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = []
    for name, size in SPACES.items():
        space = load_space(name).adapt(image_size=size)
        tables = memory_tables(space)
        for path in space.sample(PATHS, np.random.default_rng(0)):
            network = build_network(path, space).eval()
            _, peak = measured_peak(network, torch.randn(1, space.image_channels, size, size))
            found = {cost: int(table(path[None])[0]) for cost, table in tables.items()}
            measured = {"ram": peak, "flash": stored_bytes(network)}
            rows.append({"space": name, "path": path.tolist(), "stated": found, "measured": measured})
    equal = sum(row["stated"] == row["measured"] for row in rows)
    (out / "peaks.json").write_text(json.dumps({"equal": equal, "of": len(rows), "paths": rows}) + "\n")
    print(f"{equal} of {len(rows)} paths agree to the byte")


if __name__ == "__main__":
    main()
