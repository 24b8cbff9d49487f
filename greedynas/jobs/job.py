"""The whole job on one run directory: train, search, retrain, export, report. Repeating a call resumes the job."""

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
from greedynas.models.bases.weights import cached_weights
from greedynas.reporting import check_packages
from greedynas.rundir.callbacks import make_callbacks
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import write_json
from greedynas.runtime.parallel import ranks
from greedynas.runtime.rng import stream
from greedynas.runtime.text import logger
from greedynas.settings.schema import Config
from greedynas.spaces.budget import Budget, Limits, parse_limits, without_latency
from greedynas.spaces.latency import load_latency_table, refuse_sizes
from greedynas.spaces.space import Space
from greedynas.stages.adapt import refuse_wrong_weights
from greedynas.stages.export import export_stage
from greedynas.stages.export_report import report_export
from greedynas.stages.network_choice import RANDOM
from greedynas.stages.retrain import find_teacher, print_caveats, report_retraining, retrain_stage
from greedynas.stages.run import read_data, read_run_config
from greedynas.stages.search import make_requests, search_stage
from greedynas.stages.search_summary import report_searches
from greedynas.stages.train import report_training, train_stage


@dataclass(frozen=True)
class Baseline:
    """A pretrained timm network to compare the found one with."""

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
    """Run every stage that is not finished yet, and return the found networks and the report.

    `with_random` also trains a random network within each budget, in the same way as the found one, to measure what the
    search gained.
    """
    device = choose_device(config.device)
    if (folder / "config.yaml").is_file():
        ranks.on_first(lambda: read_run_config(folder).name)  # what cannot go on is refused before anything is measured
    if data is None:
        with console.status("reading the images"):
            data = read_data(config, device, folder)
    space = config.space.adapt(num_classes=len(data.class_names))
    budgets = parse_limits(limits)
    refuse_early(space, budgets, latency_table, baseline)
    ranks.on_first(lambda: refuse_wrong_weights(config, data, folder))
    adapted = None if config.pretrained is None else config.pretrained[0]
    if config.retrain.teacher is not None and config.retrain.teacher != adapted:
        find_teacher(folder, config.retrain.teacher)
    ranks.on_first(lambda: show_plan(config, folder, data, device, budgets, console, with_random))
    report_training(train_stage(config, folder, console, data, show_plan=False), console)
    if any("latency_ms" in budget.limits() for budget in budgets) and latency_table is None:
        latency_table = Path(ranks.on_first(lambda: str(table_of_this_machine(space, folder, console))))
    requests = make_requests(folder, limits, None, (), True, None, [], None, config.search)
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
    if report["report"] is not None and ranks.is_first():
        for callback in make_callbacks(config.callbacks):
            callback.report(folder, Path(report["report"]))
    written = {"report": report["report"], "worth": report["worth"]}
    return {"run": str(folder), "models": models, "random": rivals, **written}


def write_report(folder: Path, console: Console) -> dict[str, Any]:
    """Write the report, or print how to install a package that is missing for it instead of failing after all work."""
    try:
        check_packages()
    except GreedyNASError as error:
        message = f"No report was written: {error} && greedynas report {folder}"
        console.print(message, highlight=False, markup=False, soft_wrap=True)  # unbroken, so that it can be copied
        return {"report": None, "worth": None}
    from greedynas.reporting.report import report_stage

    return report_stage(folder, console)


def train_random(
    config: Config, folder: Path, searches: list[str], data: Data, console: Console
) -> list[dict[str, Any]]:
    """Train a random network within the budget of each search, named after the search if there are several."""
    settings = config.retrain.model_copy(update={"top": 1})  # there are no found networks to choose from
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
    """Print the plan of a job that is not finished yet."""
    if not (folder / "report.html").exists():
        priced = without_latency(budgets)
        pace = known_pace(config, data, device, priced[0])
        rivals = len(priced) if with_random else 0
        found = estimate(config, data, device, priced[0], len(priced), pace, rivals)
        console.print(job_table(config, found))
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "plan.json", found.to_json())  # for the live page, which compares it with what happens


def refuse_early(space: Space, budgets: list[Budget], latency_table: Path | None, baseline: Baseline | None) -> None:
    """Refuse at once what would fail after hours: a budget that no network keeps, or a baseline without weights."""
    if any("latency_ms" in budget.limits() for budget in budgets):
        refuse_sizes(space)
    table = None if latency_table is None else load_latency_table(latency_table)
    for budget in budgets if table is not None else without_latency(budgets):
        make_task(space, budget, (), None if table is None else table.cost_table(space)).sample(1, stream(0, "check"))
    if baseline is not None and baseline.weights == "cache":
        cached_weights(baseline.name)


def table_of_this_machine(space: Space, folder: Path, console: Console) -> Path:
    """Return the run's latency table of this machine, which is measured if it does not exist yet."""
    file = folder / "latency.json"
    if not file.exists():
        from greedynas.deploy.latency_measurement import measure_latency, show_progress

        logger.info("measuring latencies on this machine")
        with show_progress(console) as progress:
            measure_latency(space, "onnxruntime", progress=progress).save(file)
    return file


def report_job(result: dict[str, Any], console: Console) -> None:
    """Print which networks were found, and how to use them."""
    folder, alone = result["run"], result["worth"] is None  # without a comparison to a random network
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
        console.print(line, highlight=False, markup=False, soft_wrap=True)  # unbroken, so that it can be copied
