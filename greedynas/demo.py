"""`greedynas demo`: the job on the embedded Fashion-MNIST sample, as far as this version goes. It says where that ends."""

from pathlib import Path
from typing import Any

from rich.console import Console

from greedynas.config import load_config
from greedynas.searches import make_requests, report_searches, search_stage
from greedynas.stages import report_training, train_stage

FLOPS = "1M"


def run_demo(folder: Path, console: Console, changes: dict[str, Any] | None = None) -> None:
    """Train a supernet, then search it under a budget; called again, it goes on where it stopped."""
    config = load_config("fashion", changes)
    report_training(train_stage(config, folder, console), folder, config.space, console)
    limits = {"macs": ([FLOPS], None), "params": (None, None), "latency_ms": (None, None)}
    requests = make_requests(folder, limits, "evolution", (), True, None, [], None)
    report_searches(search_stage(folder, requests, None, console), folder, False, console)
    console.print("[bold]This version ends here:[/] retraining, export and the report are not in it yet.")
