"""The record of `greedynas bench`, with one row for each measure of each variant."""

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from greedynas.bench.floor import copy_bandwidth
from greedynas.bench.measures import Measurement
from greedynas.bench.variants import Variant
from greedynas.data.loader import cores
from greedynas.jobs.estimates import machine_name


@dataclass
class Row:
    """One measure of one variant: a measurement, or the reason why there is none."""

    measure: str
    variant: Variant
    found: Measurement | None = None
    skipped: str = ""
    error: str = ""


def machine_facts(device: torch.device) -> dict[str, Any]:
    from greedynas.rundir.run_directory import versions

    return {
        "name": machine_name(device),
        "device": device.type,
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "copy_bytes_per_second": copy_bandwidth(device),
        "versions": versions(),
    }


def row_facts(row: Row, plain: Measurement | None, eager: Measurement | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "measure": row.measure,
        "variant": row.variant.name,
        "skipped": row.skipped or None,
        "error": row.error or None,
    }
    if row.found is None:
        return facts
    found = row.found
    floor = float(np.median(list(found.floors.values())))
    return facts | {
        "ms": 1e3 * found.median,
        "images": found.images,
        "images_per_second": found.images / found.median,
        "paths": found.paths,
        "times_ms": {str(key): 1e3 * value for key, value in found.seconds.items()},
        "ratio_to_fp32": ratio(plain, found),
        "ratio_to_bf16_nhwc": ratio(eager, found),
        "floor_ms": 1e3 * floor,
        "times_floor": found.median / floor,
        "peak_bytes": found.peak,
        "startup_s": found.startup,
        "new_path_p95_ms": 1e3 * float(np.percentile(found.stalls, 95)) if found.stalls else None,
        "new_paths": len(found.stalls),
        "note": found.note or None,
        "rounds_ms": [1e3 * value for value in found.rounds] or None,
    }


def ratio(base: Measurement | None, found: Measurement) -> float | None:
    """Return the images per second over those of `base`, on the paths that both have run."""
    if base is None:
        return None
    common = base.seconds.keys() & found.seconds.keys()
    return sum(base.seconds[key] for key in common) / sum(found.seconds[key] for key in common)
