"""`greedynas demo`: the whole job on the embedded Fashion-MNIST sample, on a CPU, in a couple of minutes."""

from pathlib import Path
from typing import Any

from rich.console import Console

from greedynas.jobs.job import report_job, run_job
from greedynas.jobs.resolving import load_config, watched

# The smallest multiple of 100K multiply-adds that at least a tenth of the pool (5 of its 50 paths) keeps with every
# seed that was tried: 6 to 18 paths do. 885 paths (297 networks) of the space keep it, and the search evaluates 160 of
# them, so pool and search both matter. It was chosen before any network was retrained; see
# benchmarks/records/demo-cpu2-2026-11-18.
FLOPS = "800K"


def run_demo(folder: Path, console: Console, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run `greedynas run fashion --flops 800K`, and also train a random network within the same budget for comparison.

    If the demo was interrupted, another call resumes it.
    """
    limits = {"macs": ([FLOPS], None), "params": (None, None), "latency_ms": (None, None)}
    result = run_job(watched(load_config("fashion", changes), changes), folder, limits, console, with_random=True)
    report_job(result, console)
    return result
