"""Estimates of the time that a whole job takes on this machine, and the fitting of a job into a time.

    found = estimate(config, data, device)
    console.print(job_table(config, found))
    config, reasons = fit_hours(config, data, device, hours=2)

Times come from a measurement of a few seconds (`machine_speed.py`), so they differ from machine to machine and slightly
from call to call: a run that is resumed must not measure again.
"""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.table import Table

from greedynas.data.datasets import Data
from greedynas.greedy.samplers.sampler import make_sampler, stops_early
from greedynas.greedy.schedule import PAPER_RATIO, Schedule, corrected_images
from greedynas.jobs.machine_speed import Pace, measure_pace
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks as distributed
from greedynas.runtime.text import count, duration
from greedynas.settings.experiments import hooks_of
from greedynas.settings.schema import Config
from greedynas.spaces.budget import Budget
from greedynas.stages.recipes import make_recipe
from greedynas.stages.search import usual_searcher

EXPORT_SECONDS = 30.0  # conversions, latencies and the report
TESTED = 5  # passes over the test set: after retraining, and with every exported file
SLACK = 0.1  # share of the time that is kept in reserve
LONGER = 3  # largest factor on the preset's epochs, if there is more time than they need
SHORTER = 10  # largest divisor of the preset's epochs
SEARCH_SHARE = 0.15  # of the time: a search that takes more is shortened first
FEWEST_PATHS = 100
FEWEST_GENERATIONS = 5
LENGTHS = (
    "adapt.epochs",
    "train.max_epochs",
    "search.generations",
    "search.population",
    "retrain.epochs",
)  # shown if changed


@dataclass(frozen=True)
class Stage:
    """One stage of a job."""

    name: str
    what: str
    seconds: float
    optimization_images: int = 0
    evaluation_images: int = 0

    @property
    def corrected_images(self) -> float:
        return corrected_images(self.optimization_images, self.evaluation_images)


@dataclass(frozen=True)
class Estimate:
    """The stages of a job, and the speed of the machine that they were estimated from."""

    stages: tuple[Stage, ...]
    pace: Pace
    machine: str

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        stages = [{**asdict(stage), "corrected_images": stage.corrected_images} for stage in self.stages]
        return {"machine": self.machine, "seconds": self.seconds, "stages": stages, "pace": asdict(self.pace)}


def estimate(
    config: Config,
    data: Data,
    device: torch.device,
    budget: Budget | None = None,
    networks: int = 1,
    pace: Pace | None = None,
    rivals: int = 0,
) -> Estimate:
    """Return an estimate of the whole job, without early stopping of the supernet's training.

    `networks` is the number of networks that are searched and retrained one after the other, and `rivals` the number of
    networks that are retrained for comparison. The pace is measured unless it is given.
    """
    ranks = distributed.processes()
    machine = machine_name(device) if ranks == 1 else f"{ranks} ranks, each {machine_name(device)}"
    return predict(config, data, pace or measure_pace(config, data, device, budget), machine, networks, rivals)


def predict(config: Config, data: Data, pace: Pace, machine: str, networks: int = 1, rivals: int = 0) -> Estimate:
    """Return the estimate for settings that differ from the measured ones only in lengths, such as epochs and paths."""
    shared = (
        *_adapting(config, data, pace),
        _supernet(config, data, pace),
        _search(config, data, pace, networks),
        _retraining(config, data, pace, networks, rivals),
    )
    # Ranks are assumed to share the work without loss; rank 0 exports alone.
    quicker = tuple(replace(stage, seconds=stage.seconds / distributed.processes()) for stage in shared)
    return Estimate((*quicker, _export(data, pace, networks)), pace, machine)


def _adapting(config: Config, data: Data, pace: Pace) -> tuple[Stage, ...]:
    """Return the fine-tuning of the pretrained network, if there is one."""
    if config.pretrained is None:
        return ()
    recipe = make_recipe(config.adapt)
    steps = recipe.epochs * data.train.steps_per_epoch(recipe.batch_size)
    what = f"{recipe.epochs:,} epochs of {len(data.train):,} images"
    return (
        Stage(config.pretrained[0], what, steps * pace.adapt_step, steps * min(recipe.batch_size, len(data.train))),
    )


def _supernet(config: Config, data: Data, pace: Pace) -> Stage:
    settings = config.train.limited_to(len(data.val))
    schedule = Schedule(settings, len(data.train))
    paths = make_sampler(settings.sampler).paths_per_update(config.space)
    optimization, evaluation = schedule.predicted_images(space=config.space)
    seconds = schedule.steps * (paths * pace.step + pace.waiting)
    seconds += (
        max(schedule.steps - schedule.warmup, 0)
        * make_sampler(settings.sampler).learning_paths(config.space)
        * pace.step
    )
    seconds += schedule.filterings(schedule.steps) * pace.filtering
    what = f"{settings.max_epochs:,} epochs of {len(data.train):,} images"
    return Stage("supernet", what, seconds, optimization, evaluation)


def _search(config: Config, data: Data, pace: Pace, networks: int) -> Stage:
    searched = min(config.search.population * config.search.generations, config.space.size)
    paths = networks * (1 if usual_searcher(config, config.search) == "derivation" else searched)
    schedule = Schedule(config.train, len(data.train))
    supernets = 1 + len(hooks_of(config.experimental).lasting_steps(schedule))
    what = f"{paths:,} paths on {len(data.val):,} images" + (f" and {supernets} supernets" if supernets > 1 else "")
    evaluations = paths * supernets
    return Stage("search", what, evaluations * pace.evaluation, evaluation_images=evaluations * len(data.val))


def _retraining(config: Config, data: Data, pace: Pace, networks: int, rivals: int) -> Stage:
    recipe, settings = make_recipe(config.retrain), config.retrain
    everything, size = data.train_and_val(), recipe.batch_size
    long_steps = recipe.epochs * everything.steps_per_epoch(size)
    long_images = long_steps * min(size, len(everything))
    steps, images = (networks + rivals) * long_steps, (networks + rivals) * long_images
    what = f"{recipe.epochs:,} epochs of {len(everything):,} images"
    what = what if networks + rivals == 1 else f"{networks + rivals} times {what}"
    if settings.top > 1:
        short = settings.top * (settings.top_epochs or max(1, recipe.epochs // 10)) * data.train.steps_per_epoch(size)
        steps, images = steps + networks * short, images + networks * short * min(size, len(data.train))
        what += f", after {settings.top} short trainings"
    return Stage("retraining", what, steps * pace.retrain_step, images)


def _export(data: Data, pace: Pace, networks: int) -> Stage:
    seconds = EXPORT_SECONDS + TESTED * data.test_count * pace.classification
    return Stage("export and report", "", networks * seconds)


def job_table(config: Config, found: Estimate) -> Table:
    """Return the plan that `run` prints before it starts."""
    space = config.space
    title = f"Plan: {space.name} at {space.image_size} px, on {found.machine}"
    table = Table(title=title, title_justify="left", show_footer=True)
    table.add_column("stage", footer="in all")
    table.add_column("")
    table.add_column("time", justify="right", footer=f"about {duration(found.seconds)}")
    for name, key in (
        ("optimization images", "optimization_images"),
        ("evaluation images", "evaluation_images"),
        (f"corrected (r = {PAPER_RATIO})", "corrected_images"),
    ):
        total = sum(getattr(stage, key) for stage in found.stages)
        table.add_column(name, justify="right", footer=count(total))
    for stage in found.stages:
        images = (stage.optimization_images, stage.evaluation_images, stage.corrected_images)
        counts = [count(number) if number else "" for number in images]
        table.add_row(stage.name, stage.what, duration(stage.seconds), *counts)
    stops = config.train.stopping and stops_early(config.train.sampler)
    early = "; the supernet may stop earlier" if stops else ""
    table.caption = f"estimated from a measurement of {found.pace.measuring:.0f} s on this machine{early}"
    return table


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return device.type if device.type != "cpu" else f"{threads} CPU thread{'s' if threads > 1 else ''}"


# Fitting a job into a time


def fit_hours(
    config: Config,
    data: Data,
    device: torch.device,
    hours: float,
    budget: Budget | None = None,
    networks: int = 1,
    keep: Collection[str] = (),
    pace: Pace | None = None,
) -> tuple[Config, list[str]]:
    """Return settings with which the whole job takes about nine tenths of the given hours, and a list of the changes.

    The epochs of supernet and retraining are scaled together, by at most 3 and at least a tenth. A search that would
    take more than its share is shortened first. Settings named in `keep` (dotted) are not changed. The pace is measured
    unless it is given.
    """
    if not (hours > 0 and math.isfinite(hours)):
        raise GreedyNASError(f"--hours must be a positive number, got {hours:g}")
    pace = pace or measure_pace(config, data, device, budget)
    machine, allowed = machine_name(device), (1 - SLACK) * 3600 * hours
    supernet, search, retraining, _ = predict(config, data, pace, machine, networks).stages[-4:]
    ratio = supernet.seconds / retraining.seconds

    def seconds(candidate: Config) -> float:
        return predict(candidate, data, pace, machine, networks).seconds

    def scale(candidate: Config, factor: float) -> Config:
        return scaled(candidate, _eased(factor, 1 / ratio), _eased(factor, ratio), keep)

    searched = shorter_search(config, SEARCH_SHARE * allowed / search.seconds, keep)
    if seconds(scale(searched, 1 / SHORTER)) > allowed:
        searched = shorter_search(config, 0, keep)
    shortest = scale(searched, 1 / SHORTER)
    if seconds(shortest) > allowed:
        raise GreedyNASError(
            f"{hours:g} hours are too short for this data on {machine}: the job takes at least --hours "
            f"{_rounded_up(seconds(shortest) / (1 - SLACK) / 3600)} for "
            f"{', '.join(f'{stage.name} {stage.what}' for stage in predict(shortest, data, pace, machine).stages[:3])}; "
            "allow that time, or use fewer images or a smaller image_size"
        )
    low, high = 1 / SHORTER, float(LONGER)
    if seconds(scale(searched, high)) <= allowed:
        low = high
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(scale(searched, middle)) <= allowed else (low, middle)
    fitted = scale(searched, low)
    outcome = f"the whole job is estimated at {duration(seconds(fitted))} of the given {duration(3600 * hours)}"
    if low == LONGER:
        outcome += f"; no stage is trained for more than {LONGER} times the epochs of the preset"
    return fitted, [*_changes(config, fitted), outcome]


def share_of_epochs(config: Config, data: Data, pace: Pace, hours: float, networks: int = 1) -> float:
    """Return roughly what share of the epochs of all trainings fits into the given hours, with the shortest search."""
    stages = predict(shorter_search(config, 0), data, pace, "", networks).stages
    trained = sum(stage.seconds for stage in stages if stage.optimization_images)
    rest = sum(stage.seconds for stage in stages) - trained
    return max((1 - SLACK) * 3600 * hours - rest, 0.0) / trained


def _eased(factor: float, other: float) -> float:
    """Return the factor for a stage, which is spared while it takes less than a third of the other stage's time."""
    return max(factor, min(1.0, factor * other / 3))


def scaled(config: Config, supernet: float, retraining: float, keep: Collection[str] = ()) -> Config:
    """Return the settings with scaled epochs (at least one), and with pool and warm-up scaled accordingly."""
    train, retrain = config.train, config.retrain
    epochs = train.max_epochs if "train.max_epochs" in keep else max(1, int(train.max_epochs * supernet))
    share = epochs / train.max_epochs
    changes: dict[str, Any] = {"max_epochs": epochs}
    if isinstance(train.warmup, int) and "train.warmup" not in keep:
        changes["warmup"] = round(train.warmup * share)
    if share < 1 and "train.pool_size" not in keep:  # a larger pool would not fill up
        changes["pool_size"] = max(train.k, round(train.pool_size * share))
    trainings: dict[str, Any] = {}
    if "retrain.epochs" not in keep:
        trainings["epochs"] = max(1, int(make_recipe(retrain).epochs * retraining))
    if retrain.top_epochs is not None and "retrain.top_epochs" not in keep:
        trainings["top_epochs"] = max(1, int(retrain.top_epochs * retraining))
    adapting = {}
    if config.pretrained is not None and "adapt.epochs" not in keep:
        adapting["epochs"] = max(1, int(make_recipe(config.adapt).epochs * retraining))
    return _with(config, train=changes, retrain=trainings, adapt=adapting)


def shorter_search(config: Config, share: float, keep: Collection[str] = ()) -> Config:
    """Return the settings with at most this share of the paths: fewer generations, then a smaller population."""
    search = config.search
    paths = max(int(search.population * search.generations * min(share, 1)), FEWEST_PATHS)
    changes = {}
    if "search.generations" not in keep:
        changes["generations"] = min(search.generations, max(paths // search.population, FEWEST_GENERATIONS))
    if "search.population" not in keep:
        changes["population"] = min(search.population, max(paths // changes.get("generations", search.generations), 2))
    return _with(config, search=changes)


def _with(config: Config, **sections: dict[str, Any]) -> Config:
    """Return the settings with changes to sections, without validation because only lengths change."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()}
    )


def _changes(old: Config, new: Config) -> list[str]:
    found = []
    for key in LENGTHS:
        section, name = key.split(".")
        before, after = (getattr(getattr(config, section), name) for config in (old, new))
        if name == "epochs":
            before, after = (make_recipe(getattr(config, section)).epochs for config in (old, new))
        if before != after:
            found.append(f"{key} {after:,} instead of {before:,}, as the time allows")
    return found


def _rounded_up(hours: float) -> str:
    """Return the hours, rounded up to two significant digits."""
    digits = 1 - math.floor(math.log10(hours))
    return f"{math.ceil(hours * 10**digits) / 10**digits:g}"
