"""The stages of a job, each on one run directory: what the verbs of the command line call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from greedynas.data.datasets import Data
from greedynas.gpu import engine
from greedynas.greedy.ratio import BUSY, plausible
from greedynas.greedy.samplers.sampler import make_sampler
from greedynas.greedy.schedule import PAPER_RATIO, Schedule, corrected_images, supplement_corrected_images
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.training import train_supernet
from greedynas.rundir.callbacks import Callback, make_callbacks
from greedynas.rundir.run_directory import versions
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.memory import telling_what_fits, training_trial
from greedynas.runtime.text import logger
from greedynas.settings.experiments import hooks_of
from greedynas.settings.schema import Config
from greedynas.stages.run import Run, choose_precisions, read_data, supernet_of


def train_stage(
    config: Config,
    folder: Path,
    console: Console,
    data: Data | None = None,
    *,
    show_plan: bool = True,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train a supernet in `folder`, or go on with it, and return the summary that `--json` prints."""
    config = config.model_copy(update={"data": config.data.located()})
    device = choose_device(config.device)
    engine.use(config.engine)
    precision, eval_precision = choose_precisions(config, device)
    # Data first: a source that cannot be read leaves no run directory behind.
    data = data or read_data(config, device, folder)
    make_sampler(config.train.sampler).check(config.space)
    settings, limited = settings_for(config, data)
    with Run.start(folder, config) as run:
        run.check_data(data)
        for note in [*data.notes, *limited]:
            logger.info("%s", note)
            console.print(note, highlight=False, markup=False)
        net = supernet_of(config, len(data.class_names), device)
        logger.info("training on %s in %s, evaluating in %s; %s", device, precision, eval_precision, versions())
        if show_plan:
            console.print(plan_table(config.model_copy(update={"train": settings}), len(data.train)))
        largest = tuple(net.space.cost_tables["macs"].entries.argmax(axis=1).tolist())
        view = data.train.view
        trial = training_trial(lambda images: net(images, largest), view.channels, view.size, device, precision)
        lower = "lower train.bn_images or train.filter_images in another --out"
        with telling_what_fits("train.batch_size", config.train.batch_size, trial, lower):
            state = train_supernet(
                net,
                data,
                settings,
                seed=config.seed,
                precision=precision,
                eval_precision=eval_precision,
                run=run,
                console=console,
                callbacks=[*callbacks, *make_callbacks(config.callbacks)],
                lasting_steps=hooks_of(config.experimental).lasting_steps(Schedule(settings, len(data.train))),
            )
    return summary(state)


def settings_for(config: Config, data: Data) -> tuple[TrainSettings, list[str]]:
    """Return the settings of training for the images that could be read, and notes on what is not as the run has it.

    `auto` counts files, of which some may be broken: the number of filter images that it chose is a largest number. One that
    the user chose is refused where there are fewer.
    """
    wanted, there = config.train.filter_images, len(data.val)
    if not make_sampler(config.train.sampler).filters or wanted <= there:
        return config.train, []
    if config.asked is None or not config.asked.chose("train.filter_images"):
        raise GreedyNASError(
            f"train.filter_images = {wanted} but there are {there} validation images; lower it or raise data.val_images"
        )
    note = f"{there:,} validation images can be read, so every filtering uses these instead of {wanted:,}"
    return config.train.limited_to(there), [note]


def summary(state: TrainState) -> dict[str, Any]:
    return {
        "steps": state.step,
        "epochs": state.epoch,
        "stopped": state.stopped,
        "pool": len(state.pool),
        "pool_best_loss": state.pool.best(1)[0][1] if len(state.pool) else None,
        "pi": state.novelty,
        "optimization_images": state.optimization_images,
        "evaluation_images": state.evaluation_images,
        "corrected_images": state.corrected_images,
        "measured_ratio": state.measured_ratio,
        "seconds": state.seconds,
    }


def report_training(result: dict[str, Any], console: Console) -> None:
    ratio = result["measured_ratio"]
    cost = (
        f"a training step costs {ratio:.1f} forward passes here"
        if plausible(ratio)
        else f"what a training step costs in forward passes here could not be measured, {BUSY}"
    )
    console.print(
        f"Trained for {result['epochs']} epochs ({result['stopped']}): {result['optimization_images']:,} optimization and "
        f"{result['evaluation_images']:,} evaluation images, {result['corrected_images']:,.0f} corrected (r = {PAPER_RATIO}); "
        f"{cost}. Pool: {result['pool']} paths.",
        highlight=False,
    )


def plan(config: Config, train_images: int | None = None) -> dict[str, Any]:
    """What the training will cost in images, before it starts; by the preset's expectation where no data is read yet."""
    images = train_images
    if images is None and config.expect is not None and not config.data.source:
        images = config.expect.train_images
    settings = config.train
    if images is None:
        quick = config.model_copy(update={"data": config.data.model_copy(update={"check_duplicates": False})})
        data = read_data(quick, torch.device("cpu"))
        images, settings = len(data.train), settings_for(config, data)[0]
    schedule = Schedule(settings, images)
    costs = {}
    epochs = {"at most": config.train.max_epochs}
    stops = config.train.stopping and make_sampler(config.train.sampler).filters
    if config.expect is not None and stops and config.expect.epochs <= config.train.max_epochs:
        epochs["stopping as in the paper"] = config.expect.epochs
    for label, count in epochs.items():
        optimization, evaluation = schedule.predicted_images(count, config.space)
        costs[label] = {
            "epochs": count,
            "optimization_images": optimization,
            "evaluation_images": evaluation,
            "corrected_images": corrected_images(optimization, evaluation),
        }
    return {
        "train_images": images,
        "steps_per_epoch": schedule.steps_per_epoch,
        "steps": schedule.steps,
        "warmup_steps": schedule.warmup,
        "costs": costs,
        "supplement_corrected_images": supplement_corrected_images() if config.expect is not None else None,
    }


def plan_table(config: Config, train_images: int | None = None) -> Table:
    facts = plan(config, train_images)
    table = Table(title=Text(f"Plan: {config.train.sampler} training of {config.space.name}"), title_justify="left")
    for column in ("", "epochs", "optimization images", "evaluation images", f"corrected (r = {PAPER_RATIO})"):
        table.add_column(column, justify="right" if column else "left")
    for label, cost in facts["costs"].items():
        images = (cost["optimization_images"], cost["evaluation_images"], cost["corrected_images"])
        table.add_row(label, str(cost["epochs"]), *(_millions(count) for count in images))
    if facts["supplement_corrected_images"] is not None:
        told = _millions(facts["supplement_corrected_images"])
        table.add_row("the paper's supplement (no warm-up)", "46", "56.6M", "110.4M", told)
    table.caption = (
        f"{facts['train_images']:,} training images, {facts['steps_per_epoch']:,} steps an epoch, "
        f"{facts['warmup_steps']:,} steps of warm-up"
    )
    return table


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f}M" if count >= 1e6 else f"{count:,.0f}"
