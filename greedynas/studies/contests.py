"""Contests between methods that train supernets and search them; found networks are retrained, or looked up in a truth.

`study methods` and `study ablation` share this module. There are three kinds of parts: a supernet with its searches, a
network drawn without a search, and a retraining. A network that several methods find with the same seed is retrained
once for all of them.
"""

import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from greedynas.data.specs import FORMS
from greedynas.greedy.samplers.sampler import make_sampler
from greedynas.greedy.schedule import Schedule, corrected_images, epochs_within
from greedynas.greedy.settings import SearchSettings, TrainSettings
from greedynas.jobs.resolving import load_config
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream
from greedynas.settings.loading import resolve_key
from greedynas.settings.schema import AUTO, Config
from greedynas.spaces.budget import Budget
from greedynas.spaces.latency import load_latency_table
from greedynas.spaces.paths import OpPath, canonical, compact
from greedynas.stages.run import Run
from greedynas.stages.train import train_stage
from greedynas.studies.study import Done, Part, run_parts
from greedynas.studies.supernets import FREE_KEYS, method_preset, settings_of_training, shared_data
from greedynas.studies.truth import Truth, read_truth

if TYPE_CHECKING:
    from greedynas.greedy.searchers.task import Task
    from greedynas.spaces.space import Space


@dataclass(frozen=True)
class Options:
    """The options of the command lines of both studies."""

    preset: str
    changes: dict[str, Any]  # settings; those of one method start with its name
    budget: Budget
    seeds: tuple[int, ...] = (0, 1, 2)
    retrain_seeds: int = 1  # trainings of each found network
    latency_table: Path | None = None
    truth: Path | None = None  # replaces retraining
    keep: bool = True  # the run directories
    jobs: int | None = None
    quick: bool = False  # small sizes

    def as_json(self) -> dict[str, Any]:
        """Return the options for `study.json`."""
        return {
            "preset": self.preset,
            "set": self.changes,
            "budget": self.budget.model_dump(exclude_none=True),
            "seeds": list(self.seeds),
            "retrain_seeds": self.retrain_seeds,
            "ground_truth": self.truth is not None,
            "quick": self.quick,
        }


@dataclass(frozen=True)
class Search:
    """One search on a supernet."""

    name: str
    searcher: str
    pool_init: bool = True


# Settings


def contest_config(
    options: Options, names: Sequence[str] = (), name: str | None = None, sampler: str | None = None
) -> Config:
    """Return the settings of all methods, or, given a sampler, those of one method (`--set uniform.lr=0.2`)."""
    if options.preset == AUTO:
        raise GreedyNASError(
            "auto chooses other settings on every machine; train once (greedynas train auto …) and name that run instead of a preset"
        )
    source = Path(options.preset)
    if (source / "config.yaml").is_file():  # a run directory
        source = source / "config.yaml"
    changes: dict[str, Any] = {}
    for key, value in options.changes.items():
        if key.partition(".")[0] not in names:
            changes[".".join(resolve_key(key, "train"))] = value
    for key, value in options.changes.items():
        owner, _, rest = key.partition(".")
        if owner == name and rest:
            changes[".".join(resolve_key(rest, "train"))] = value
    return load_config(source, changes) if sampler is None else method_preset(source, changes, sampler)


def own_epochs(options: Options, name: str) -> bool:
    """Return whether the options set a method's number of epochs."""
    return bool({f"{name}.max_epochs", f"{name}.train.max_epochs"} & options.changes.keys())


def check_options(config: Config, options: Options) -> Truth | None:
    """Refuse wrong options before hours of training; return the ground truth if it replaces retraining."""
    if find_spec("pymoo") is None:
        raise GreedyNASError("searches need pymoo, which is not installed here; install it: pip install pymoo")
    if not config.data.source:
        raise GreedyNASError(f"name the data with --data: {FORMS}")
    if not options.seeds or options.retrain_seeds < 1:
        raise GreedyNASError("at least one seed is needed for supernets and for retrainings")
    retrain = config.retrain
    if retrain.inherit or retrain.top > 1 or retrain.teacher is not None:
        raise GreedyNASError(
            "a study trains the found networks from scratch: retrain.inherit, top and teacher cannot be set here"
        )
    make_search_task(config.space, options).sample(1, stream(0, "check"))  # refuses a budget that no path satisfies
    if options.truth is None:
        return None
    if options.retrain_seeds > 1:
        raise GreedyNASError("with --truth nothing is retrained: leave --retrain-seeds out")
    return read_truth(options.truth, config.space)


def make_search_task(space: "Space", options: Options) -> "Task":
    from greedynas.greedy.searchers.task import make_task

    latency = None if options.latency_table is None else load_latency_table(options.latency_table).cost_table(space)
    return make_task(space, options.budget, (), latency)


# Supernets and their searches


def supernet_part(
    name: str,
    seed: int,
    config: Config,
    searches: Iterable[Search],
    options: Options,
    cost: dict[str, Any] | None = None,
) -> Part:
    """Return the part that trains a supernet and searches it.

    `cost` sets the length of training: {"epochs": epochs of plain training}, {"images": corrected images}, or {"train": settings
    of a rival, "times": multiple of its largest cost}, limited to the best number of epochs. None: as in the settings.
    """
    settings = {
        "cost": cost,
        "searches": [vars(search) for search in searches],
        **_searched(options),
        "keep": options.keep,
        "config": settings_of_training(config, seed),
    }
    return Part(f"{name}-{seed}", train_and_search, settings, FREE_KEYS | {"keep"})


def train_and_search(folder: Path, settings: dict[str, Any], console: Console) -> dict[str, Any]:
    """Train a supernet in a run directory and run all searches on it."""
    from greedynas.stages.search import Request, search_stage

    config = Config.model_validate(settings["config"])
    data = shared_data(config, choose_device(config.device))
    config = with_cost(config, len(data.train), settings["cost"])
    result = {"max_epochs": config.train.max_epochs, **train_stage(config, folder, console, data)}
    budget = Budget.model_validate(settings["budget"])
    # The comparison is about the best networks that supernets and searchers find, not about the cheapest of equal ones.
    search_settings = config.search.model_copy(update={"tolerance": 0.0})
    requests = [
        Request(one["name"], budget, one["searcher"], (), one["pool_init"], search_settings, config.seed)
        for one in settings["searches"]
    ]
    table = None if settings["latency_table"] is None else Path(settings["latency_table"])
    found = {search["name"]: search for search in search_stage(folder, requests, table, console, data)}
    result |= {"train_images": len(data.train), "val_images": len(data.val), "searches": {}}
    for name, search in found.items():
        result["searches"][name] = {key: search[key] for key in ("chosen", "from_pool", "rejected", "seconds")}
        result[f"{name}_paths"] = np.array([entry["path"] for entry in search["found"]], dtype=np.int16)
        result[f"{name}_accuracy"] = np.array([entry["accuracy"] for entry in search["found"]])
    if not settings["keep"]:
        shutil.rmtree(folder)
    return result


def with_cost(config: Config, train_images: int, cost: Mapping[str, Any] | None) -> Config:
    """Return the settings with the number of epochs that the cost allows: rounded, or at most, if epochs cost differently."""
    if cost is None:
        return config
    most = None
    if "epochs" in cost:
        wanted = cost["epochs"] * train_images
    elif "images" in cost:
        wanted = cost["images"]
    else:
        rival = Schedule(TrainSettings.model_validate(cost["train"]), train_images)
        wanted = cost["times"] * corrected_images(*rival.predicted_images())
        most = config.study_epochs
    sampler = make_sampler(config.train.sampler)
    if sampler.filters or sampler.learning_paths(config.space):  # epochs of warm-up cost less
        epochs = max(1, epochs_within(config.train, train_images, wanted, config.space))
    else:
        one = config.train.model_copy(update={"max_epochs": 1})
        of_one = corrected_images(*Schedule(one, train_images).predicted_images(space=config.space))
        epochs = max(1, round(wanted / of_one))
    epochs = epochs if most is None else min(epochs, most)
    return config.model_copy(update={"train": config.train.model_copy(update={"max_epochs": epochs})})


def drawing_part(name: str, seed: int, config: Config, options: Options) -> Part:
    """Return the part that draws a network without a search."""
    own = settings_of_retraining(config, seed)
    return Part(f"{name}-{seed}", draw_network, {**_searched(options), "config": own}, FREE_KEYS)


def draw_network(_: Path, settings: dict[str, Any], __: Console) -> dict[str, Any]:
    """Draw a feasible path uniformly at random."""
    from greedynas.greedy.searchers.task import Found
    from greedynas.stages.search import arch_json

    config = Config.model_validate(settings["config"])
    data = shared_data(config, choose_device(config.device))
    table = None if settings["latency_table"] is None else Path(settings["latency_table"])
    options = Options("", {}, Budget.model_validate(settings["budget"]), latency_table=table)
    task = make_search_task(config.space.adapt(num_classes=len(data.class_names)), options)
    path = task.sample(1, stream(config.seed, "network without a search"))[0]
    chosen = arch_json("random", Found(path, 0.0, 0), task)
    del chosen["supernet_accuracy"]
    return {"chosen": chosen}


def _searched(options: Options) -> dict[str, Any]:
    table = options.latency_table
    return {
        "budget": options.budget.model_dump(exclude_none=True),
        "latency_table": None if table is None else str(table),
    }


# How good the networks are


def top1_of(
    folder: Path,
    wanted: Iterable[tuple[OpPath, int, int]],
    config: Config,
    options: Options,
    truth: Truth | None,
    console: Console,
) -> tuple[dict[tuple[OpPath, int], list[float]], list[Done]]:
    """Return top-1 in percent by network and seed, and the trainings. `wanted` has (canonical path, seed, trainings).

    Each training has a seed of its own, so that two supernets that find the same network are two observations.
    """
    if truth is not None:
        true = {(network, seed): [float(truth.accuracies[index_of(network, truth)])] for network, seed, _ in wanted}
        return true, []
    trainings = {(network, seed, i) for network, seed, count in wanted for i in range(count)}
    parts = {
        one: retraining_part(*one, config, options)
        for one in sorted(trainings, key=lambda one: (one[1], one[2], one[0]))  # by seed: the images are read once
    }
    done = run_parts(folder, list(parts.values()), console, options.jobs)
    found: dict[tuple[OpPath, int], list[float]] = {}
    for (network, seed, _), part in parts.items():
        found.setdefault((network, seed), []).append(100 * done[part.name].result["test_top1"])
    return found, list(done.values())


def retraining_part(network: OpPath, seed: int, training: int, config: Config, options: Options) -> Part:
    name = compact(network, config.space)
    label = name.replace(",", "-") if len(name) <= 100 else f"{zlib.crc32(name.encode()):08x}"
    settings = {
        "network": name,
        "retrain_seed": 1000 * seed + training,
        "keep": options.keep,
        "config": settings_of_retraining(config, seed),
    }
    return Part(f"net-{label}-{seed}-{training}", retrain_network, settings, FREE_KEYS | {"keep"})


def settings_of_retraining(config: Config, seed: int) -> dict[str, Any]:
    """Return the settings that a network's training depends on, such as the split, without the supernet's."""
    plain = {
        "train": TrainSettings(),
        "rivals": {},
        "experimental": {},
        "study_epochs": None,
        "search": SearchSettings(),
        "seed": seed,
        "asked": None,
        "reasons": (),
        "expect": None,
    }
    return config.model_copy(update=plain).model_dump(mode="json")


def retrain_network(folder: Path, settings: dict[str, Any], console: Console) -> dict[str, Any]:
    """Train a network from scratch in a run directory of its own."""
    from greedynas.stages.retrain import retrain_stage

    config = Config.model_validate(settings["config"])
    data = shared_data(config, choose_device(config.device))
    Run.start(folder, config).close()
    trained = retrain_stage(
        folder,
        console,
        settings=config.retrain,
        arch=settings["network"],
        name="network",
        seed=settings["retrain_seed"],
        data=data,
    )
    if not settings["keep"]:
        shutil.rmtree(folder)
    kept = ("test_top1", "test_top5", "test_macro", "test_loss", "test_images", "epochs", "macs", "params", "seconds")
    return {key: trained[key] for key in kept}


def index_of(path: Sequence[int], truth: Truth) -> int:
    """Return the index of a path in the ground truth, which has all paths in order."""
    return int(np.ravel_multi_index(tuple(path), truth.space.num_ops))


def true_rank(path: Sequence[int], truth: Truth, feasible: NDArray[np.bool_]) -> dict[str, int]:
    """Return the rank of a network, 1 for the best, among the distinct networks within the budget."""
    networks = np.unique(truth.network[feasible])
    better = truth.accuracies[networks] > truth.accuracies[index_of(path, truth)]
    return {"rank": int(better.sum()) + 1, "of": len(networks)}


def network_of(chosen: Mapping[str, Any], space: "Space") -> OpPath:
    return canonical(chosen["path"], space)
