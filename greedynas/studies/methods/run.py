"""`greedynas study methods`: the paper's Tables 1 and 7 and the supplement's last figure, on the user's own data.

Uniform, fair and greedy supernets are searched at random and by evolution, with several seeds; a network drawn at
random is compared with them. -E: trained for as long as greedy's corrected cost allows. Methods with architecture
parameters (darts and so on) train for at most greedy's largest corrected cost, and their network is derived within the
limits. Every found network is retrained in the same way, or its accuracy is looked up in a ground truth. The memory and
the time of an update are measured for every method, as in Table 2 of the paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from greedynas.greedy.samplers.sampler import make_sampler
from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.runtime.rng import stream
from greedynas.settings.schema import Config
from greedynas.spaces.budget import Budget
from greedynas.spaces.paths import OpPath, canonical, compact
from greedynas.studies.contests import (
    Options,
    Search,
    check_options,
    contest_config,
    drawing_part,
    index_of,
    make_search_task,
    network_of,
    own_epochs,
    supernet_part,
    top1_of,
    true_rank,
)
from greedynas.studies.correlations import enough_paths
from greedynas.studies.methods.paper import NO_SUPERNET
from greedynas.studies.methods.results import methods_study
from greedynas.studies.step_cost import step_part
from greedynas.studies.study import Done, Part, publish, run_parts
from greedynas.studies.truth import Truth

RANDOM = "random"
EQUAL = "-E"
METHODS = (RANDOM, "uniform", "uniform-E", "fair", "greedy")
LEARNED = ("darts", "fbnet", "proxyless", "proxyless-reinforce", "mdenas", "single-path")
KNOWN = (*METHODS, "fair-E", *LEARNED)
DERIVATION = "derivation"
SEARCHERS = ("random", "evolution")
# The paper has 120 epochs for uniform and 150 for FairNAS, and at most 60 for greedy, each with 2.40M evaluated and 1.23M
# trained images.
GREEDY_AT_MOST = 60 * (1.23 + 2.40 / 3.33)
FULL = {"uniform": 120 * 1.23 / GREEDY_AT_MOST, "fair": 150 * 1.23 / GREEDY_AT_MOST, **dict.fromkeys(LEARNED, 1.0)}
QUICK = {"train.max_epochs": 4, "search.population": 20, "search.generations": 5, "retrain.epochs": 3}
QUICK_SEEDS = 2
# The settings that greedy's cost depends on.
PRICED = {"sampler", "m", "k", "pool_size", "filter_images", "bn", "calibration_images", "warmup", "filtering", "pool_sampling",
          "stopping", "max_epochs", "batch_size"}  # fmt: skip
KEPT = (
    "max_epochs",
    "epochs",
    "stopped",
    "pi",
    "optimization_images",
    "evaluation_images",
    "corrected_images",
    "seconds",
)


@dataclass(frozen=True)
class MethodsOptions(Options):
    methods: tuple[str, ...] = METHODS
    searchers: tuple[str, ...] = SEARCHERS
    epochs: float | None = None  # of plain training, for methods that are not matched to greedy; None: as in the paper
    systematic: int = 0  # number of paths of each supernet's search that are retrained


def quick(options: MethodsOptions) -> MethodsOptions:
    """Return options of small sizes for the embedded images: minutes on a CPU, without meaningful results."""
    return replace(options, changes={**QUICK, **options.changes}, seeds=options.seeds[:QUICK_SEEDS], quick=True)


def study_methods(folder: Path, options: MethodsOptions, console: Console) -> dict[str, Any]:
    """Train, search and retrain the missing parts, then compare."""
    _refuse_methods(options)
    base = contest_config(options, KNOWN)
    truth = check_options(base, options)
    configs = {method: method_config(method, options) for method in options.methods if method != RANDOM}
    _refuse_systematic(base, options)
    done = run_parts(folder, [*_drawings(base, options), *_supernets(configs, options)], console, options.jobs)
    done |= run_parts(folder, _matched(configs, options, done), console, options.jobs)
    done |= run_parts(folder, _measurements(configs), console, 1)  # one at a time, because times are measured
    sampled = systematic(done, options, base) if options.systematic else {}
    found = _found(done, options)
    wanted = {(network_of(one, base.space), seed, options.retrain_seeds) for (_, _, seed), one in found.items()}
    wanted |= {(canonical(path, base.space), key[1], 1) for key, one in sampled.items() for path in one["paths"]}
    top1, retrained = top1_of(folder, wanted, base, options, truth, console)
    feasible = None if truth is None else make_search_task(truth.space, options).feasible(truth.paths)
    rows = []
    for (method, searcher, seed), chosen in found.items():
        network = network_of(chosen, base.space)
        row = _row(
            method, searcher, seed, chosen, done[f"{method}-{seed}"], top1[network, seed][: options.retrain_seeds]
        )
        row["network"] = compact(network, base.space)
        rows.append(row if truth is None or feasible is None else {**row, **true_rank(network, truth, feasible)})
    for (_, seed), one in sampled.items():
        one["top1"] = [top1[canonical(path, base.space), seed][0] for path in one["paths"]]
        one["paths"] = [compact(path, base.space) for path in one["paths"]]
    settings = {
        **options.as_json(),
        "methods": options.methods,
        "searchers": options.searchers,
        "epochs": options.epochs,
        "systematic": options.systematic,
        "space": base.space.name,
    }
    reference = None if truth is None or feasible is None else reference_of(truth, feasible)
    steps = {method: done[f"step-{method}"].result for method in configs if f"step-{method}" in done}
    study = methods_study(rows, list(sampled.values()), reference, settings, [*done.values(), *retrained], steps)
    return publish(folder, study, console)


# Options


def _refuse_methods(options: MethodsOptions) -> None:
    for method in options.methods:
        if method not in KNOWN:
            raise unknown("method", method, list(KNOWN))
        if method.endswith(EQUAL) and "greedy" not in options.methods:
            raise GreedyNASError(f"{method} trains at greedy's cost: add --method greedy")
    for searcher in options.searchers:
        if searcher not in SEARCHERS:
            raise unknown("searcher", searcher, list(SEARCHERS))
    for owner in {key.partition(".")[0] for key in options.changes} & set(KNOWN):
        if owner == RANDOM or owner not in options.methods:
            raise GreedyNASError(f"--set {owner}.…: this study has no supernet {owner}")
    if options.epochs is not None and options.epochs < 1:
        raise GreedyNASError(f"--epochs must be at least 1, got {options.epochs:g}")


def _refuse_systematic(config: Config, options: MethodsOptions) -> None:
    if options.systematic:
        enough_paths(options.systematic)
        searched = config.search.population * config.search.generations
        if searched < options.systematic:
            raise GreedyNASError(
                f"--systematic {options.systematic} is more than the {searched} searched paths; search more "
                "(search.population, search.generations)"
            )


def method_config(method: str, options: MethodsOptions) -> Config:
    config = contest_config(options, KNOWN, method, method.removesuffix(EQUAL))
    make_sampler(config.train.sampler).check(config.space)  # refuses spaces that it cannot train
    highest = {
        key: value for key, value in options.budget.model_dump(exclude_none=True).items() if key.startswith("max_")
    }
    if getattr(make_sampler(config.train.sampler), "aims", False) and highest and config.train.target is None:
        table = config.train.latency_table if options.latency_table is None else str(options.latency_table)
        aim = {"target": Budget.model_validate(highest), "latency_table": table}
        config = config.model_copy(update={"train": config.train.model_copy(update=aim)})
    return config


def searchers_of(method: str, options: MethodsOptions) -> tuple[str, ...]:
    """Return the searchers of a method's supernets."""
    return (DERIVATION,) if method in LEARNED else options.searchers


# Parts


def _drawings(config: Config, options: MethodsOptions) -> list[Part]:
    return [drawing_part(RANDOM, seed, config, options) for seed in options.seeds if RANDOM in options.methods]


def _supernets(configs: Mapping[str, Config], options: MethodsOptions) -> list[Part]:
    """Return the parts of the supernets whose cost is known from the start."""
    greedy = method_config("greedy", options).train.model_dump(mode="json", include=PRICED)
    parts = []
    for seed in options.seeds:
        for method, config in configs.items():
            if method.endswith(EQUAL):
                continue
            cost: dict[str, Any] | None = None
            if method != "greedy" and not own_epochs(options, method):
                whole = {"train": greedy, "times": FULL[method]}
                cost = whole if options.epochs is None else {"epochs": options.epochs}
            searches = [Search(searcher, searcher) for searcher in searchers_of(method, options)]
            parts.append(supernet_part(method, seed, config, searches, options, cost))
    return parts


def _measurements(configs: Mapping[str, Config]) -> list[Part]:
    """Return the parts that measure the updates of each method."""
    return [step_part(method, config) for method, config in configs.items() if not method.endswith(EQUAL)]


def _matched(configs: Mapping[str, Config], options: MethodsOptions, done: Mapping[str, Done]) -> list[Part]:
    """Return the parts of the supernets that train for as long as greedy's cost with the same seed allows."""
    searches = [Search(searcher, searcher) for searcher in options.searchers]
    return [
        supernet_part(
            method, seed, config, searches, options, {"images": done[f"greedy-{seed}"].result["corrected_images"]}
        )
        for seed in options.seeds
        for method, config in configs.items()
        if method.endswith(EQUAL)
    ]


# Results of the parts


def _found(done: Mapping[str, Done], options: MethodsOptions) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return the chosen networks by method, searcher and seed."""
    found = {}
    for method in options.methods:
        for searcher in ("",) if method == RANDOM else searchers_of(method, options):
            for seed in options.seeds:
                result = done[f"{method}-{seed}"].result
                one = result if method == RANDOM else result["searches"][searcher]
                found[method, searcher, seed] = one["chosen"]
    return found


def _row(
    method: str, searcher: str, seed: int, chosen: dict[str, Any], part: Done, retrainings: list[float]
) -> dict[str, Any]:
    known = ("macs", "params", "latency_ms", "supernet_accuracy")
    costs: dict[str, Any] = {key: chosen[key] for key in known if key in chosen}
    return {
        "contestant": f"{method}, {searcher}" if searcher else NO_SUPERNET,
        "method": method,
        "searcher": searcher,
        "seed": seed,
        "ops": " ".join(chosen["ops"]),
        **costs,
        "top1": float(np.mean(retrainings)),
        "retrainings": retrainings,
        **{key: part.result[key] for key in KEPT if key in part.result},
        "machine": part.machine,
    }


def systematic(
    done: Mapping[str, Done], options: MethodsOptions, config: Config
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return, by method and seed, every (n/count)-th of all searched paths in the order of accuracy on the supernet.

    If the paths have to be retrained, only the supernets of the first seed are sampled.
    """
    searcher = "evolution" if "evolution" in options.searchers else options.searchers[0]
    seeds = options.seeds if options.truth is not None else options.seeds[:1]
    found = {}
    for method in options.methods:
        for seed in () if method == RANDOM or method in LEARNED else seeds:
            arrays = done[f"{method}-{seed}"].arrays
            accuracies: NDArray[np.float64] = arrays[f"{searcher}_accuracy"]
            if len(accuracies) < options.systematic:
                raise GreedyNASError(
                    f"--systematic {options.systematic}, but the search of {method}-{seed} found {len(accuracies)} paths "
                    "within the budget; allow a larger one"
                )
            chosen = every_nth(accuracies, options.systematic, stream(seed, "systematic sample"))
            paths: list[OpPath] = [tuple(path) for path in arrays[f"{searcher}_paths"][chosen].tolist()]
            found[method, seed] = {
                "method": method,
                "seed": seed,
                "searcher": searcher,
                "searched": len(accuracies),
                "paths": paths,
                "supernet_accuracy": accuracies[chosen].tolist(),
            }
    return found


def every_nth(accuracies: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return a systematic sample, best first: equal steps from a random start within the first step."""
    order = np.argsort(-accuracies, kind="stable")
    return order[((np.arange(count) + rng.random()) * len(order) / count).astype(np.int64)]


def reference_of(truth: Truth, feasible: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the mean and the best accuracy of the distinct networks within the budget, by the ground truth."""
    accuracies = np.where(feasible, truth.accuracies, -np.inf)
    best = truth.paths[int(accuracies.argmax())]
    networks = np.unique(truth.network[feasible])
    return {
        "feasible": len(networks),
        "feasible_paths": int(feasible.sum()),
        "mean": float(truth.accuracies[networks].mean()),
        "best": float(truth.accuracies[index_of(best, truth)]),
        "best_path": compact(best, truth.space),
    }
