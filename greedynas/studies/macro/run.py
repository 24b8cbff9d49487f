"""`greedynas study macro`: compare the rankings of supernets with the ground truth of 3,969 trained networks.

For each method and seed, a supernet is trained on CIFAR-10 and all 6,561 paths are ranked on the validation images, as
in a search. The methods get the same corrected cost; on request, greedy is also trained at a share of it. Untrained
networks (NWOT) are ranked as well. The ground truth is read only afterwards.
"""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from greedynas.data.datasets import Data
from greedynas.data.specs import FORMS
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.validation import calibration_images
from greedynas.jobs.resolving import load_config
from greedynas.models.batchnorm import BN_MODES
from greedynas.models.nwot import BATCH, nwot_score
from greedynas.rundir.checkpoints import step_of
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.runtime.parallel import ranks
from greedynas.runtime.rng import stream
from greedynas.settings.loading import resolve_key
from greedynas.settings.schema import Config
from greedynas.spaces.paths import OpPath, canonical
from greedynas.studies.correlations import FEWEST
from greedynas.studies.macro.results import UNTRAINED, macro_study
from greedynas.studies.study import Part, publish, run_parts
from greedynas.studies.supernets import (
    FREE_KEYS,
    checkpoints_of,
    load_trained,
    method_preset,
    rank_paths,
    settings_of_training,
    shared_data,
    train_in,
    within_cost,
)
from greedynas.studies.truth import Truth, find_truth, read_truth

METHODS = ("uniform", "fair", "greedy")
# --quick: 2,000 of CIFAR-10's images to train on, 50 to filter on; 1,000 paths ranked on 150 images. In so few steps
# a falling learning rate is better.
QUICK = {
    "data.val_images": 0.96,
    "train.batch_size": 64,
    "train.filter_images": 50,
    "train.bn_images": 50,
    "train.lr": 0.1,
    "fair.lr": 0.03,  # an update adds the gradients of three paths
    "train.lr_end": 0.0,
    "train.decay_all": False,
    "train.zero_residuals": False,
    "experimental.split_after_identity": False,
    "experimental.snapshots": 1,
}
EPOCHS = 60.0
QUICK_EPOCHS, QUICK_PATHS, QUICK_IMAGES = 6.0, 1000, 150
UNTRAINED_SEEDS = 3  # they differ little, and each takes about six minutes of a CPU core
QUICK_UNTRAINED = 10 * FEWEST  # networks, so that their top 10% can be ranked


@dataclass(frozen=True)
class MacroOptions:
    """The options of the command line."""

    changes: dict[str, Any]  # settings; those of one method start with its name
    methods: tuple[str, ...] = METHODS
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    epochs: float = EPOCHS  # the corrected cost of every method, in epochs of plain training
    greedy_shares: tuple[float, ...] = ()  # shares of that cost; greedy is also trained with each of them
    bn: tuple[
        str, ...
    ] = ()  # BatchNorm modes to rank with; the first one is used for the main results. Empty: that of the search
    moments: int = 1  # rankings during training, the last one at its end
    paths: int | None = None  # number of random paths to rank; None: all
    images: int | None = None  # number of validation images to rank on; None: all
    untrained: bool = True  # rank untrained networks too, with the first seeds
    untrained_networks: int | None = None  # number of random networks among the ranked ones; None: all
    keep: bool = True  # the run directories, with the supernets
    jobs: int | None = None
    truth: Path | None = None
    preset: str = "cifar10-tuned"
    base: dict[str, Any] = field(  # like `changes`, which override these
        default_factory=lambda: {"data.check_duplicates": False}
    )
    quick: bool = False  # small sizes


def quick(options: MacroOptions) -> MacroOptions:
    """Return options for a small study that takes minutes on a CPU, without meaningful results."""
    return replace(
        options,
        base={**options.base, **QUICK},
        seeds=options.seeds[:1],
        epochs=QUICK_EPOCHS if options.epochs == EPOCHS else options.epochs,
        paths=options.paths or QUICK_PATHS,
        images=options.images or QUICK_IMAGES,
        untrained_networks=QUICK_UNTRAINED,
        quick=True,
    )


def study_macro(folder: Path, options: MacroOptions, console: Console) -> dict[str, Any]:
    """Train and rank the supernets that are missing, then compare all of them with the truth."""
    configs = {method: method_config(method, options) for method in options.methods}
    _refuse(options)
    truth = read_truth(find_truth(options.truth), next(iter(configs.values())).space)
    truth = truth.only(ranked_paths(len(truth.paths), options.paths))
    _refuse_few(truth)
    if not all(config.data.source for config in configs.values()):
        raise GreedyNASError(f"name the data with --data: {FORMS}")
    shares = [(method, 1.0) for method in options.methods] + [("greedy", share) for share in options.greedy_shares]
    parts = [
        make_part(method, seed, configs[method], options, share) for seed in options.seeds for method, share in shares
    ]
    if options.untrained:
        parts += [untrained_part(seed, options) for seed in options.seeds[:UNTRAINED_SEEDS]]
    done = run_parts(folder, parts, console, options.jobs)
    asked = {
        key: value for key, value in vars(options).items() if key not in ("jobs", "truth", "keep", "changes", "base")
    }
    settings = {**asked, "set": {**options.base, **options.changes}}
    return publish(folder, macro_study(truth, list(done.values()), settings), console)


def ranked_paths(total: int, count: int | None) -> NDArray[np.int64]:
    """Return the indices of the ranked paths, which are the same for every part."""
    if count is None or count >= total:
        return np.arange(total)
    return np.sort(stream(0, "ranked paths").choice(total, count, replace=False))


def _refuse_few(truth: Truth) -> None:
    if len(truth.distinct) < 10 * FEWEST:
        raise GreedyNASError(
            f"too few paths for a correlation: --paths {len(truth.paths)} are {len(truth.distinct)} distinct networks, and their "
            f"top 10% must be at least {FEWEST}; take {12 * FEWEST} paths or more, preferably all"
        )


def _refuse(options: MacroOptions) -> None:
    if not options.seeds:
        raise GreedyNASError("at least one seed is needed")
    if options.greedy_shares and "greedy" not in options.methods:
        raise GreedyNASError("--greedy-share is for greedy, which is not among the methods; add --method greedy")
    for share in options.greedy_shares:
        if not 0 < share < 1:
            raise GreedyNASError(f"--greedy-share is a share of the others' cost, above 0 and below 1, got {share:g}")
    for mode in options.bn:
        if mode not in BN_MODES:
            raise BN_MODES.unknown(mode)


def method_config(method: str, options: MacroOptions) -> Config:
    """Return the settings of one method: its preset, the changes for all methods, then its own changes."""
    if method not in METHODS:
        raise unknown("method", method, list(METHODS))
    return method_preset(options.preset, _changes(options, method), method)


def _changes(options: MacroOptions, method: str | None = None) -> dict[str, Any]:
    """Return the changed settings by dotted key: those for all methods, then one method's own."""
    changes: dict[str, Any] = {}
    for chosen in (options.base, options.changes):  # later ones override earlier ones
        common = {key: value for key, value in chosen.items() if key.partition(".")[0] not in METHODS}
        own = {key.partition(".")[2]: value for key, value in chosen.items() if key.partition(".")[0] == method}
        for key, value in (*common.items(), *own.items()):
            changes[".".join(resolve_key(key, "train"))] = value
    return changes


def make_part(method: str, seed: int, config: Config, options: MacroOptions, share: float = 1.0) -> Part:
    """Return the part for a supernet of a method at a share of the cost."""
    name, label = (method, method) if share == 1 else (f"{method}-{share:g}", f"{method} {100 * share:g}%")
    keys = {key.partition(".")[2] for key in options.changes if key.partition(".")[0] == method}
    settings = {
        "method": label,
        "cost_epochs": options.epochs * share,
        # A method may be set to train for fewer epochs than its cost allows.
        "own_epochs": config.train.max_epochs if keys & {"max_epochs", "train.max_epochs"} and share == 1 else None,
        "bn": list(options.bn or (config.search.bn,)),
        "moments": options.moments,
        "paths": options.paths,
        "images": options.images,
        "keep": options.keep,
        "config": settings_of_training(config, seed),
    }
    return Part(f"{name}-{seed}", train_and_rank, settings, FREE_KEYS | {"keep"})


def train_and_rank(folder: Path, settings: dict[str, Any], console: Console) -> dict[str, Any]:
    """Train a supernet, then evaluate all paths in every BatchNorm mode."""
    config = Config.model_validate(settings["config"])
    data = shared_data(config, choose_device(config.device))
    config = with_epochs(config, len(data.train), settings)
    trained, summary = train_in(folder, config, console)
    paths, images = paths_and_images(config, data, settings)
    result: dict[str, Any] = {
        "max_epochs": config.train.max_epochs,
        **summary,
        "val_images": len(data.val) if images is None else len(images),
        "train_images": len(data.train),
        "rank_seconds": {},
        "moments": [],
    }
    for mode in settings["bn"]:
        found, seconds = rank_paths(trained, paths, mode, images)
        result["rank_seconds"][mode] = seconds
        result[f"{mode}_accuracy"] = found.accuracies.astype(np.float32)
        result[f"{mode}_loss"] = found.losses.astype(np.float32)
    for step, file in _moments(folder, settings["moments"], summary["steps"]).items():
        earlier = load_trained(folder, config, data, file)
        found, _ = rank_paths(earlier, paths, settings["bn"][0], images)
        result["moments"].append({"step": step, "epoch": step / (summary["steps"] / summary["epochs"])})
        result[f"step{step}_accuracy"] = found.accuracies.astype(np.float32)
    if not settings["keep"]:
        ranks.on_first(lambda: shutil.rmtree(folder))
    return result


def untrained_part(seed: int, options: MacroOptions) -> Part:
    """Return the part that ranks untrained networks; it depends only on the space and the data."""
    asked = load_config(options.preset, _changes(options))
    config = Config(
        name=asked.name, space=asked.space, image_size=asked.image_size, seed=seed, device=asked.device, data=asked.data
    )
    settings = {
        "method": UNTRAINED,
        "paths": options.paths,
        "networks": options.untrained_networks,
        "batch": BATCH,
        "config": config.model_dump(mode="json"),
    }
    return Part(f"nwot-{seed}", rank_untrained, settings, FREE_KEYS)


def rank_untrained(folder: Path, settings: dict[str, Any], console: Console) -> dict[str, Any]:
    """Score every distinct network with fresh weights on one batch of training images, on the CPU."""
    config = Config.model_validate(settings["config"])
    try:
        data = shared_data(config, choose_device(config.device))
    except GreedyNASError as error:  # the supernets may come from another machine
        raise GreedyNASError(f"{error}; --no-untrained leaves out the part that needs the images") from None
    images = calibration_images(data, settings["batch"], stream(config.seed, "images of untrained networks")).cpu()
    networks = untrained_networks(config, settings)
    scores = [nwot_score(path, config.space, images, config.seed) for path in ranks.share(networks)]
    return {
        "images": len(images),
        "networks": np.array(networks, dtype=np.int8),
        "scores": np.concatenate(ranks.gather(np.array(scores, dtype=np.float64))),
    }


def untrained_networks(config: Config, settings: dict[str, Any]) -> list[OpPath]:
    """Return the canonical paths of the ranked networks, or a random sample of the size that the settings give."""
    everything = list(np.ndindex(*config.space.num_ops))
    ranked = [everything[i] for i in ranked_paths(len(everything), settings["paths"])]
    networks = sorted({canonical(path, config.space) for path in ranked})
    count = settings["networks"]
    if count is None or count >= len(networks):
        return networks
    chosen = np.sort(stream(0, "untrained networks").choice(len(networks), count, replace=False))
    return [networks[i] for i in chosen]


def paths_and_images(
    config: Config, data: Data, settings: dict[str, Any]
) -> tuple[list[OpPath], NDArray[np.int64] | None]:
    """Return the paths and the validation images (None: all) that they are ranked on."""
    everything = list(np.ndindex(*config.space.num_ops))
    paths = [everything[i] for i in ranked_paths(len(everything), settings["paths"])]
    if settings["images"] is None:
        return paths, None
    count = min(settings["images"], len(data.val))
    return paths, data.val.balanced(count, stream(config.seed, "ranked images"))


def with_epochs(config: Config, train_images: int, settings: dict[str, Any]) -> Config:
    """Return the settings with as many epochs as the cost allows, and with checkpoints at the moments.

    There are fewer epochs if fewer are best or if the method was given its own number.
    """
    affordable = within_cost(config, train_images, settings["cost_epochs"]).train.max_epochs
    own, best = settings["own_epochs"], config.study_epochs
    if own is not None and own > affordable:
        raise GreedyNASError(
            f"{config.train.sampler}.max_epochs={own} costs more than --epochs {settings['cost_epochs']:g} allows: "
            f"at most {affordable}"
        )
    train = config.train.model_copy(update={"max_epochs": own or min(affordable, best or affordable)})
    if settings["moments"] > 1:
        steps = -(-Schedule(train, train_images).steps // settings["moments"])
        train = train.model_copy(update={"checkpoint_steps": steps, "keep_checkpoints": 10**6})
    return config.model_copy(update={"train": train})


def _moments(folder: Path, count: int, steps: int) -> dict[int, Path]:
    """Return the checkpoints at the moments of a training by step, without the last one."""
    if count < 2:
        return {}
    files = {step_of(file): file for file in checkpoints_of(folder)}
    every = -(-steps // count)
    return {step: file for step, file in files.items() if step % every == 0 and step < steps}
