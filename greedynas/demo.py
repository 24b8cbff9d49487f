"""`greedynas demo`: the whole job on the embedded Fashion-MNIST sample, on a CPU, in a couple of minutes."""

from pathlib import Path
from typing import Any

from rich.console import Console

from greedynas.config import load_config
from greedynas.job import report_job, run_job

FLOPS = "500K"  # tight enough that it matters which network: most of the larger ones are equally good here


def run_demo(folder: Path, console: Console, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """What `greedynas run fashion --flops 500K` does; called again, it goes on where it stopped."""
    limits = {"macs": ([FLOPS], None), "params": (None, None), "latency_ms": (None, None)}
    result = run_job(load_config("fashion", changes), folder, limits, console)
    report_job(result, console)
    return result
