"""Supernets for studies: trained in a run directory, taken from its checkpoints, evaluated on many paths."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from greedynas.data.datasets import Data, open_data
from greedynas.data.specs import FORMS
from greedynas.greedy.evaluation import Evaluation
from greedynas.greedy.schedule import Schedule, epochs_within
from greedynas.greedy.state import TrainState
from greedynas.greedy.validation import SupernetAccuracies
from greedynas.jobs.resolving import load_config
from greedynas.models.supernet import Supernet
from greedynas.rundir.checkpoints import (
    DAMAGE,
    Checkpoint,
    Checkpoints,
    checkpoint_errors,
    load_weights,
    net_weights,
    read_checkpoint,
)
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError
from greedynas.settings.experiments import hooks_of
from greedynas.settings.schema import Config
from greedynas.spaces.paths import OpPath
from greedynas.stages.run import FREE, choose_precisions, set_up, supernet_of
from greedynas.stages.train import train_stage

# For parts with a "config": the result depends neither on the machine nor on the location of the images.
FREE_KEYS = frozenset(f"config.{key}" for key in FREE | {"name", "data.source", "data.root", "data.memory_gb"})


@dataclass
class Trained:
    """A supernet with the data it was trained on."""

    net: Supernet
    data: Data
    config: Config
    accuracies: SupernetAccuracies  # evaluates paths as a search of the run would


_open: dict[Any, Data] = {}  # the data that were opened last


def shared_data(config: Config, device: torch.device) -> Data:
    """Return the data of a run; consecutive parts with the same data in a process decode it once."""
    if not config.data.source:
        raise GreedyNASError(f"name the data with --data: {FORMS}")
    size, channels, seed = config.space.image_size, config.space.image_channels, config.seed
    key = (config.data, size, channels, device)
    data = _open.get(key)
    if data is not None and data.train.view.seed != seed:
        data = data.split_anew(config.data, seed)
    if data is None:
        _open.clear()  # frees memory before other data are opened
        data = open_data(config.data, image_size=size, image_channels=channels, seed=seed, device=device)
    _open[key] = data
    return data


def settings_of_training(config: Config, seed: int) -> dict[str, Any]:
    """Return the settings that a supernet's training depends on."""
    return config.model_copy(update={"seed": seed, "rivals": {}}).model_dump(mode="json")


def method_preset(source: str | Path, changes: dict[str, Any], sampler: str) -> Config:
    """Return the settings with which a study trains a sampler, from the preset that the source names for it.

    If the source names no preset for this sampler, its own settings are used with the sampler changed.
    """
    return as_rival(load_config(source, changes), sampler, changes)


def as_rival(config: Config, sampler: str, changes: dict[str, Any] | None = None) -> Config:
    """Return the settings with another sampler, trained like the preset that they name for it.

    Everything but the training, such as the images, stays the same, because the study compares trainings.
    """
    if config.train.sampler == sampler:
        return config
    if sampler not in config.rivals:
        return config.model_copy(update={"train": config.train.model_copy(update={"sampler": sampler})})
    rival = load_config(config.rivals[sampler], {**(changes or {}), "train.sampler": sampler})
    names = ("log_every", "checkpoint_minutes", "checkpoint_steps", "keep_checkpoints")
    train = rival.train.model_copy(update={name: getattr(config.train, name) for name in names})
    update = {"train": train, "experimental": rival.experimental, "study_epochs": rival.study_epochs}
    return config.model_copy(update=update)


def within_cost(config: Config, train_images: int, cost_epochs: float) -> Config:
    """Return the settings with as many epochs as a corrected cost allows; the cost is in epochs of plain training."""
    epochs = epochs_within(config.train, train_images, cost_epochs * train_images, config.space)
    if epochs < 1:
        raise GreedyNASError(
            f"one epoch of {config.train.sampler} training costs more than {cost_epochs:g} epochs of plain training; "
            "allow more, or filter on fewer images"
        )
    return config.model_copy(update={"train": config.train.model_copy(update={"max_epochs": epochs})})


def train_in(folder: Path, config: Config, console: Console) -> tuple[Trained, dict[str, Any]]:
    """Train a supernet in a run directory, or resume its training; return it with the summary of the training."""
    device = choose_device(config.device)
    data = shared_data(config, device)
    summary = train_stage(config, folder, console, data)
    return load_trained(folder, config, data), summary


def load_trained(folder: Path, config: Config, data: Data | None = None, file: Path | None = None) -> Trained:
    """Load the newest supernet of a run with its snapshots, or the one of a given checkpoint.

    The run is not locked, because nothing is written.
    """
    checkpoint = Checkpoints(folder / "supernet").load() if file is None else whole_checkpoint(file)
    if checkpoint is None:
        raise no_checkpoints(folder)
    trained = new_supernet(config, data)
    load_weights(trained.net, net_weights(checkpoint[0]))
    if file is None:
        schedule = Schedule(config.train, len(trained.data.train))
        with checkpoint_errors(folder / "supernet"):
            last = TrainState.from_json(checkpoint[1], config.space).step
        accuracies = hooks_of(config.experimental).accuracies(trained.accuracies, folder / "supernet", schedule, last)
        trained = replace(trained, accuracies=accuracies)
    return trained


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    files = Checkpoints(folder / "supernet").files()[::-1]
    if not files:
        raise no_checkpoints(folder)
    return files


def whole_checkpoint(file: Path) -> Checkpoint:
    try:
        return read_checkpoint(file)
    except DAMAGE as error:
        raise GreedyNASError(f"checkpoint {file} cannot be read: {error}") from None


def no_checkpoints(folder: Path) -> GreedyNASError:
    return GreedyNASError(f"{folder} has no checkpoints of a supernet; train one with greedynas train")


def new_supernet(config: Config, data: Data | None = None) -> Trained:
    """Return an untrained supernet with the weights from which training would start."""
    device = set_up(config)
    data = data or shared_data(config, device)
    net = supernet_of(config, len(data.class_names), device)
    precision = choose_precisions(config, device)[1]
    return Trained(net, data, config, SupernetAccuracies(net, data, config.search, config.seed, precision))


def rank_paths(
    trained: Trained,
    paths: Sequence[OpPath],
    bn: str | None = None,
    images: NDArray[np.int64] | None = None,
    bn_images: int | None = None,
) -> tuple[Evaluation, float]:
    """Evaluate paths on validation images (all, or those given) as a search does; return the results and the seconds.

    `bn_images` sets how many images share BatchNorm statistics, as in filtering.
    """
    changes = {"bn": bn or trained.config.search.bn, "bn_images": bn_images or trained.config.search.bn_images}
    accuracies = trained.accuracies.with_settings(trained.config.search.model_copy(update=changes), trained.config.seed)
    start = time.perf_counter()
    result = accuracies.evaluate(paths, images)
    return result, time.perf_counter() - start
