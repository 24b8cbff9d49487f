"""`greedynas study ranking DIR`: Table 3 and Figure 4 of the paper for a run, on how well few images rank paths.

Filtering ranks paths by their loss on a few validation images. This study ranks random paths in this way and by their
accuracy on the whole validation set: for an untrained supernet, a uniformly trained one and that of the run, for
several numbers of images, for all checkpoints, and with each of the three kinds of BatchNorm statistics.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from greedynas.data.settings import DataOptions, stored_settings
from greedynas.greedy.schedule import epochs_within
from greedynas.greedy.state import TrainState
from greedynas.models.batchnorm import BN_MODES
from greedynas.rundir.checkpoints import checkpoint_errors, step_of
from greedynas.rundir.run_directory import refuse_links
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream
from greedynas.settings.schema import Config
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space
from greedynas.stages.run import read_run_config
from greedynas.studies.correlations import enough_paths, rank_correlations
from greedynas.studies.ranking.results import ranking_study
from greedynas.studies.study import Part, publish, run_parts
from greedynas.studies.supernets import (
    FREE_KEYS,
    Trained,
    as_rival,
    checkpoints_of,
    load_trained,
    new_supernet,
    rank_paths,
    shared_data,
    train_in,
    whole_checkpoint,
)

MANY = 100  # filter images; larger draws hardly differ, so one is enough
IMAGES = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


@dataclass(frozen=True)
class RankingOptions:
    """The options of the command line."""

    uniform: Path | None = None  # a run with a uniformly trained supernet
    train_uniform: bool = False  # train a uniform supernet at the run's corrected cost
    paths: int = 1000
    images: tuple[int, ...] = ()  # numbers of filter images; empty: 10 and up
    draws: int = 3  # number of draws of filter images, for each number of images
    jobs: int | None = None
    named: DataOptions = field(default_factory=DataOptions)  # the images named on the command line


@dataclass(frozen=True)
class Kind:
    """A supernet: an untrained one, or a checkpoint of a run."""

    name: str  # untrained, uniform, greedy…
    folder: Path
    config: Config
    file: Path | None
    step: int = 0


def study_ranking(folder: Path, out: Path, options: RankingOptions, console: Console) -> dict[str, Any]:
    """Evaluate the missing supernets, and report how well few images agree with all."""
    enough_paths(options.paths)
    refuse_links(folder)  # by default the study is written into the run
    config = _config_of(folder, options)
    own = _kinds(folder, config)
    uniform = _uniform_run(folder, out, config, own, options, console)
    rival = [] if uniform is None else _kinds(uniform, _config_of(uniform, options))
    last = [Kind("untrained", folder, config, None), *rival[-1:], *own[-1:]]
    earlier = [*rival[:-1], *own[:-1]]
    parts = [_part(kind, mode, config, options) for kind in last for mode in BN_MODES.names()]
    parts += [_part(kind, config.train.bn, config, options, brief=True) for kind in earlier]
    done = run_parts(out, parts, console, options.jobs)
    settings = {"run": str(folder), "bn": config.train.bn, "filter_images": config.train.filter_images,
                "paths": options.paths, "draws": options.draws}  # fmt: skip
    return publish(out, ranking_study([done[part.name] for part in parts], settings), console)


def _config_of(folder: Path, options: RankingOptions) -> Config:
    config = read_run_config(folder)
    return config.model_copy(update={"data": stored_settings(config.data, options.named, folder)})


def _kinds(folder: Path, config: Config) -> list[Kind]:
    """Return the checkpoints of a run, oldest first."""
    return [Kind(config.train.sampler, folder, config, file, step_of(file)) for file in checkpoints_of(folder)]


def _uniform_run(
    folder: Path, out: Path, config: Config, own: list[Kind], options: RankingOptions, console: Console
) -> Path | None:
    """Return the run directory of the uniform rival, if one is wanted, after training it at the same cost if
    necessary."""
    if options.uniform is not None:
        rival = read_run_config(options.uniform)
        if rival.train.sampler != "uniform":
            raise GreedyNASError(f"{options.uniform} was trained with sampler {rival.train.sampler}, not uniform")
        if rival.space != config.space:
            raise GreedyNASError(f"{options.uniform} is of space {rival.space.name}, {folder} of {config.space.name}")
        return options.uniform
    if not options.train_uniform or config.train.sampler == "uniform":
        return None
    assert own[-1].file is not None
    with checkpoint_errors(own[-1].file):
        state = TrainState.from_json(whole_checkpoint(own[-1].file)[1], config.space)
    rival = as_rival(config, "uniform")
    settings = {
        "folder": str(out / "parts" / "train-uniform"),
        "corrected_images": state.corrected_images,
        "config": rival.model_dump(mode="json"),
    }
    part = Part("train-uniform", train_uniform, settings, FREE_KEYS | {"folder"})
    run_parts(out, [part], console, options.jobs)
    return out / "parts" / "train-uniform"


def train_uniform(folder: Path, settings: dict[str, Any], console: Console) -> dict[str, Any]:
    """Train with uniform sampling and its own settings for as many epochs as the run's corrected cost allows."""
    config = Config.model_validate(settings["config"])
    images = len(shared_data(config, choose_device(config.device)).train)
    epochs = max(1, epochs_within(config.train, images, settings["corrected_images"], config.space))
    train = config.train.model_copy(update={"max_epochs": epochs})
    return train_in(folder, config.model_copy(update={"train": train}), console)[1]


def _part(kind: Kind, mode: str, config: Config, options: RankingOptions, brief: bool = False) -> Part:
    """Return a part. With `brief`, it only uses the run's own number of filter images."""
    settings = {
        "kind": kind.name,
        "step": kind.step,
        "folder": str(kind.folder),
        "checkpoint": None if kind.file is None else kind.file.name,
        "bn": mode,
        "own_bn": config.train.bn,
        "paths": options.paths,
        "images": None if brief or mode != config.train.bn else list(options.images or IMAGES),
        "draws": options.draws,
        "config": kind.config.model_dump(mode="json"),
    }
    name = f"{kind.name}-{mode}" + (f"-step{kind.step}" if kind.file is not None else "")
    return Part(name, rank_by_few, settings, FREE_KEYS | {"folder"})


def rank_by_few(folder: Path, settings: dict[str, Any], console: Console) -> dict[str, Any]:
    """Return correlations between rankings by few images and by all, for one supernet in one BatchNorm mode."""
    config = Config.model_validate(settings["config"])
    data = shared_data(config, choose_device(config.device))
    run = Path(settings["folder"])
    if settings["checkpoint"] is None:
        trained = new_supernet(config, data)
    else:
        trained = load_trained(run, config, data, run / "supernet" / settings["checkpoint"])
    paths = random_paths(config.space, settings["paths"], config.seed)
    whole, _ = rank_paths(trained, paths, settings["bn"])
    own = min(config.train.filter_images, len(data.val))
    counts = sorted(
        {own, *(n for n in settings["images"] or () if n <= len(data.val) / 2)}
    )  # more than half would be nearly the whole validation set
    curve = []
    for count in counts:
        drawn = [
            _agreement(trained, paths, settings["bn"], count, draw, whole.accuracies)
            for draw in range(settings["draws"] if count <= MANY else 1)
        ]
        curve.append({"images": count, **{key: [one[key] for one in drawn] for key in drawn[0]}})
    return {
        "val_images": len(data.val),
        "filter_images": own,
        "curve": curve,
        "mean_accuracy": float(whole.accuracies.mean()),
        "deviation": float(whole.accuracies.std()),
        "accuracies": whole.accuracies.astype(np.float32),
        "losses": whole.losses.astype(np.float32),
    }


def _agreement(
    trained: Trained, paths: list[OpPath], mode: str, count: int, draw: int, truth: NDArray[np.float64]
) -> dict[str, Any]:
    """Return correlations of the loss and the accuracy on some filter images with the accuracy on all images."""
    chosen = trained.data.val.balanced(count, stream(trained.config.seed, "ranked by few", count, draw))
    few, _ = rank_paths(trained, paths, mode, chosen, bn_images=trained.config.train.bn_images)
    losses = np.nan_to_num(few.losses, nan=np.inf, posinf=1e30)
    return {"loss": rank_correlations(-losses, truth), "accuracy": rank_correlations(few.accuracies, truth)}


def random_paths(space: Space, count: int, seed: int) -> list[OpPath]:
    """Return distinct random paths, or all paths of a space that has no more."""
    if space.size <= count:
        found = [tuple(path) for path in np.ndindex(*space.num_ops)]
        enough_paths(len(found))
        return found
    rng = stream(seed, "paths of the ranking study")
    chosen: dict[OpPath, None] = {}
    while len(chosen) < count:
        chosen |= dict.fromkeys(tuple(path) for path in space.sample(count, rng).tolist())
    return list(chosen)[:count]
