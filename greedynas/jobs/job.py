"""The whole job on one run directory: train, search, retrain, export, report. The same call again goes on where it stopped."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from greedynas.data.datasets import Data
from greedynas.greedy.searchers.task import make_task
from greedynas.jobs.estimates import estimate, job_table
from greedynas.jobs.machine_speed import known_pace
from greedynas.models.pretrained import cached_weights
from greedynas.reporting import check_packages
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.runtime.rng import stream
from greedynas.runtime.text import logger
from greedynas.settings.schema import Config
from greedynas.spaces.budget import Budget, Limits, parse_limits, without_latency
from greedynas.spaces.latency import load_latency_table
from greedynas.spaces.space import Space
from greedynas.stages.export import export_stage, report_export
from greedynas.stages.network_choice import RANDOM
from greedynas.stages.retrain import find_teacher, print_caveats, report_retraining, retrain_stage
from greedynas.stages.run import read_data
from greedynas.stages.search import make_requests, search_stage
from greedynas.stages.search_summary import report_searches
from greedynas.stages.train import report_training, train_stage


@dataclass(frozen=True)
class Baseline:
    """A pretrained timm network to stand beside the found one."""

    name: str
    weights: str = "cache"  # or a file


def run_job(
    config: Config,
    folder: Path,
    limits: Limits,
    console: Console,
    *,
    latency_table: Path | None = None,
    baseline: Baseline | None = None,
    with_random: bool = False,
    data: Data | None = None,
) -> dict[str, Any]:
    """Run every stage that is not finished yet; return what was found.

    `with_random` also trains a random network within each budget as the found one is trained, to see what the search was
    worth.
    """
    device = choose_device(config.device)
    data = data or read_data(config, device, folder)
    space = config.space.adapt(num_classes=len(data.class_names))
    budgets = parse_limits(limits)
    refuse_early(space, budgets, latency_table, baseline)
    if config.retrain.teacher is not None:
        find_teacher(folder, config.retrain.teacher)
    ranks.on_first(lambda: show_plan(config, folder, data, device, budgets, console, with_random))
    report_training(train_stage(config, folder, console, data, show_plan=False), console)
    if any("latency_ms" in budget.limits() for budget in budgets) and latency_table is None:
        latency_table = Path(ranks.on_first(lambda: str(table_of_this_machine(space, folder, console))))
    requests = make_requests(folder, limits, "evolution", (), True, None, [], None, config.search)
    report_searches(search_stage(folder, requests, latency_table, console, data), folder, False, console)
    models = []
    for request in requests:
        models.append(retrain_stage(folder, console, settings=config.retrain, model=request.name, data=data))
        report_retraining(models[-1], console)
    rivals = train_random(config, folder, [request.name for request in requests], data, console) if with_random else []
    if baseline is not None:
        alone = config.retrain.model_copy(update={"inherit": False, "top": 1, "teacher": None})
        arch = f"timm:{baseline.name}"
        beside = retrain_stage(folder, console, settings=alone, arch=arch, pretrained=baseline.weights, data=data)
        report_retraining(beside, console)
    for request in requests:
        export = partial(export_stage, folder, console, model=request.name, data=data)
        report_export(ranks.on_first(export), folder, console)
    report = ranks.on_first(lambda: write_report(folder, console))
    told = {"report": report["report"], "worth": report["worth"]}
    return {"run": str(folder), "models": models, "random": rivals, **told}


def write_report(folder: Path, console: Console) -> dict[str, Any]:
    """Write the report. Where a package for it is missing, say in one line how to get it: everything else is done."""
    try:
        check_packages()
    except GreedyNASError as error:
        told = f"No report was written: {error} && greedynas report {folder}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)  # the command is copied whole
        return {"report": None, "worth": None}
    from greedynas.reporting.report import report_stage

    return report_stage(folder, console)


def train_random(
    config: Config, folder: Path, searches: list[str], data: Data, console: Console
) -> list[dict[str, Any]]:
    """Train one random network within the budget of each search; a run with several searches names them apart."""
    settings = config.retrain.model_copy(update={"top": 1})  # nothing was found that could be chosen from
    rivals = []
    for search in searches:
        name = RANDOM if len(searches) == 1 else f"{RANDOM}-{search}"
        rivals.append(
            retrain_stage(folder, console, settings=settings, model=search, arch=RANDOM, name=name, data=data)
        )
        report_retraining(rivals[-1], console)
    return rivals


def show_plan(
    config: Config,
    folder: Path,
    data: Data,
    device: torch.device,
    budgets: list[Budget],
    console: Console,
    with_random: bool = False,
) -> None:
    """What a job that has not been finished will take."""
    if not (folder / "report.html").exists():
        priced = without_latency(budgets)
        pace = known_pace(config, data, device, priced[0])
        rivals = len(priced) if with_random else 0
        console.print(job_table(config, estimate(config, data, device, priced[0], len(priced), pace, rivals)))


def refuse_early(space: Space, budgets: list[Budget], latency_table: Path | None, baseline: Baseline | None) -> None:
    """What would fail after hours of training fails before: a budget that no network keeps, a baseline without weights."""
    table = None if latency_table is None else load_latency_table(latency_table)
    for budget in budgets if table is not None else without_latency(budgets):
        make_task(space, budget, (), None if table is None else table.cost_table(space)).sample(1, stream(0, "check"))
    if baseline is not None and baseline.weights == "cache":
        cached_weights(baseline.name)


def table_of_this_machine(space: Space, folder: Path, console: Console) -> Path:
    """A latency limit without a table means this machine: measured once, kept in the run."""
    file = folder / "latency.json"
    if not file.exists():
        from greedynas.deploy.latency_measurement import measure_latency, show_progress

        logger.info("measuring latencies on this machine")
        with show_progress(console) as progress:
            measure_latency(space, "onnxruntime", progress=progress).save(file)
    return file


def report_job(result: dict[str, Any], console: Console) -> None:
    """What was found, and how to use it."""
    folder, alone = result["run"], result["worth"] is None  # then nothing says what the search was worth
    for model in result["models"]:
        withheld = model.get("test_withheld", False)
        found = "a network" if withheld else f"{model['test_top1']:.2%} top-1 on the test set"
        console.print(
            Text("Found:", "bold"),
            f"{found} with {model['macs']:,} multiply-adds and {model['params']:,} parameters",
            highlight=False,
        )
        print_caveats(model, console)
    for rival in result["random"]:
        if not rival.get("test_withheld", False):
            console.print(
                f"Random: {rival['test_top1']:.2%} top-1 with {rival['macs']:,} multiply-adds and {rival['params']:,} "
                "parameters: a network drawn within the same budget and trained the same way",
                highlight=False,
            )
    if result["worth"] is not None:
        console.print(result["worth"], highlight=False, markup=False)
    lines = (
        *([] if result["report"] is None else [f"Look at   {result['report']}"]),
        f"Classify  greedynas predict {folder} IMAGE…",
        f"Deploy    {folder}/model.onnx, or {folder}/model.safetensors in PyTorch:",
        f'          network, card = greedynas.load_network("{folder}")',
        *([f"Compare   greedynas retrain {folder} --arch random && greedynas report {folder}"] if alone else []),
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)  # commands are copied whole
