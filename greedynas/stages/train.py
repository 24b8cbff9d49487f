"""The training of a supernet in a run directory, its plan and its summary."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from greedynas.data.datasets import Data
from greedynas.greedy.methods.method import Method
from greedynas.greedy.ratio import BUSY, plausible
from greedynas.greedy.samplers.sampler import make_sampler, matching_sampler, stops_early
from greedynas.greedy.schedule import PAPER_RATIO, Schedule, corrected_images, supplement_corrected_images
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.steps import TrainingStep
from greedynas.greedy.training import train_supernet
from greedynas.models.shared_supernet import SharedSupernet
from greedynas.models.supernet import Supernet
from greedynas.rundir.callbacks import Callback, make_callbacks
from greedynas.rundir.run_directory import versions
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.memory import suggesting_what_fits, training_trial
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger
from greedynas.settings.experiments import hooks_of
from greedynas.settings.schema import Config
from greedynas.spaces.feasible import feasible_paths
from greedynas.spaces.paths import most_expensive
from greedynas.stages.adapt import adapted_network, begin_supernet, refuse_wrong_weights
from greedynas.stages.run import Run, choose_precisions, read_data, set_up, supernet_of


def train_stage(
    config: Config,
    folder: Path,
    console: Console,
    data: Data | None = None,
    *,
    show_plan: bool = True,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train a supernet in `folder`, or resume its training, and return the summary that `--json` prints."""
    config = config.model_copy(update={"data": config.data.located()})
    device = set_up(config)
    precision, eval_precision = choose_precisions(config, device)
    # The data is opened first, so that an unreadable source leaves no run directory behind.
    if data is None:
        with console.status("reading the images"):
            data = read_data(config, device, folder)
    sampler = matching_sampler(config.space, config.train)
    if isinstance(sampler, Method) and sampler.mixes and hooks_of(config.experimental).supernet is not Supernet:
        raise GreedyNASError(
            f"{config.train.sampler} mixes the ops of a layer, which have several weights with "
            "experimental.split_after_identity: switch that off"
        )
    settings, limited = settings_for(config, data)
    feasible_paths(config.space.adapt(num_classes=len(data.class_names)), settings.limits)  # refuses impossible limits
    ranks.on_first(lambda: refuse_wrong_weights(config, data, folder))
    with Run.start(folder, config) as run:
        run.check_data(data)
        for note in [*data.notes, *limited]:
            logger.info("%s", note, extra={"progress": True})  # printed by the next line, also with --verbose
            console.print(note, highlight=False, markup=False)
        net = supernet_of(config, len(data.class_names), device)
        logger.info("training on %s in %s, evaluating in %s; %s", device, precision, eval_precision, versions())
        if show_plan:
            console.print(plan_table(config.model_copy(update={"train": settings}), len(data.train)))
        largest = most_expensive(net.space)
        view = data.train.view
        trial = training_trial(lambda images: net(images, largest), view.channels, view.size, device, precision)
        lower = "lower train.bn_images or train.filter_images in another --out"
        with suggesting_what_fits("train.batch_size", config.train.batch_size, trial, lower):
            teacher = adapted_network(run, config, data, device, precision, console)
            if teacher is not None and isinstance(net, SharedSupernet) and run.load_checkpoint() is None:
                begin_supernet(net, teacher, data, config.seed)
            taught_by = teacher if settings.teacher_weight > 0 else None
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
                make_step=partial(TrainingStep, teacher=taught_by, teacher_precision=eval_precision),
            )
    return summary(state)


def settings_for(config: Config, data: Data) -> tuple[TrainSettings, list[str]]:
    """Return the training settings for the images that can be read, and notes on what differs from the run's settings.

    `auto` counts files, some of which may be unreadable: its number of filter images is lowered to the readable ones. A
    number that the user chose is refused if there are fewer images.
    """
    wanted, available = config.train.filter_images, len(data.val)
    train = config.train.model_copy(update={"accuracy_images": min(config.train.accuracy_images, available)})
    if not make_sampler(config.train.sampler).filters or wanted <= available:
        return train, []
    if config.asked is None or not config.asked.chose("train.filter_images"):
        raise GreedyNASError(
            f"train.filter_images = {wanted} but there are {available} validation images; lower it or raise "
            "data.val_images"
        )
    note = f"{available:,} validation images can be read, so every filtering uses these instead of {wanted:,}"
    return train.limited_to(available), [note]


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
        else f"the cost of a training step in forward passes could not be measured here, because {BUSY}"
    )
    console.print(
        f"Trained for {result['epochs']} epochs ({result['stopped']}): {result['optimization_images']:,} optimization "
        f"and {result['evaluation_images']:,} evaluation images, {result['corrected_images']:,.0f} corrected "
        f"(r = {PAPER_RATIO}); {cost}. Pool: {result['pool']} paths.",
        highlight=False,
    )


def plan(config: Config, train_images: int | None = None) -> dict[str, Any]:
    """Return the cost of a training in images before it starts; without data, for the images of the preset."""
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
    stops = config.train.stopping and stops_early(config.train.sampler)
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
        corrected = _millions(facts["supplement_corrected_images"])
        table.add_row("the paper's supplement (no warm-up)", "46", "56.6M", "110.4M", corrected)
    table.caption = (
        f"{facts['train_images']:,} training images, {facts['steps_per_epoch']:,} steps an epoch, "
        f"{facts['warmup_steps']:,} steps of warm-up"
    )
    return table


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f}M" if count >= 1e6 else f"{count:,.0f}"
