"""A search that goes on training its supernet on the paths that it considers best. Not in the paper.

A supernet shares its weights among all paths, and gives those of good paths a little less than they could have. With
`experimental.shifting = 0.2`, the first half of a search ranks paths on the supernet of the training. The best of them, as
many as a population, are then trained for a fifth of the epochs of the training, each equally often, and the other half of
the search starts from them and ranks paths on the new weights. Only the second half counts, because accuracies on two
supernets cannot be compared. The idea is that of supernet shifting (Zhang et al., CVPR 2024).

The supernet of the run stays as it is; the shifted one is in `searches/NAME/shifted`.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.samplers.sampler import Draw
from greedynas.greedy.search import search_steps
from greedynas.greedy.searchers.task import Accuracies, Found, Plan, Searched
from greedynas.greedy.settings import SAMPLERS, TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.steps import supernet_optimizer
from greedynas.greedy.training import train_supernet
from greedynas.greedy.validation import SupernetAccuracies
from greedynas.rundir.checkpoints import training_tensors
from greedynas.rundir.run_directory import RunDirectory
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_json, write_json
from greedynas.runtime.parallel import ranks
from greedynas.settings.experiments import Hooks
from greedynas.spaces.paths import OpPath

SAMPLER = "shifting"  # trains the paths of the pool
LR = 0.1  # of the learning rate of the training, at the beginning of the cosine schedule
FIRST = "first.json"  # the paths of the first half


def shifting(share: Any, hooks: Hooks) -> Hooks:
    """Return the hooks with a search that goes on training for this share of the epochs."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise GreedyNASError(f"experimental.shifting must be a share of epochs between 0 and 1, got {share!r:.80}")
    return replace(hooks, search=partial(shifted_search, share=float(share))) if share > 0 else hooks


def from_pool(draw: Draw) -> list[OpPath]:
    """Return a path of the pool, each equally likely."""
    return [draw.pool.sample(draw.rng)]


SAMPLERS.register(SAMPLER, from_pool)


def shifted_search(
    plan: Plan,
    evaluate: Accuracies,
    searcher: str,
    earlier: Sequence[Found],
    home: Path,
    train: TrainSettings,
    precision: str,
    share: float,
) -> Iterator[Searched]:
    """Search for half of the generations, train the best paths, and search from them for the other half."""
    if not isinstance(evaluate, SupernetAccuracies):
        raise GreedyNASError(
            "experimental.shifting trains the supernet of a search, and this search has another evaluator"
        )
    half = plan.generations // 2
    if half < 1:
        raise GreedyNASError("experimental.shifting needs search.generations of at least 2")
    first, known = Searched(plan.task), known_first(home)
    for first in search_steps(replace(plan, generations=half), evaluate, searcher, known or earlier):
        if known is None:
            yield first
    if known is None:
        write_json(home / FIRST, {"found": [astuple(entry) for entry in first.found]})
    best = sorted(first.found, key=lambda entry: -entry.accuracy)[: plan.population]
    shifted = shift(evaluate, best, home / "shifted", shorter(train, share, len(best)), precision, plan.seed)
    again = replace(plan, pool=[entry.path for entry in best], generations=plan.generations - half)
    later = [replace(entry, generation=entry.generation - half) for entry in earlier if entry.generation >= half]
    for second in search_steps(again, shifted, searcher, later):
        found = [replace(entry, generation=entry.generation + half) for entry in second.found]
        yield replace(second, found=found)


def known_first(home: Path) -> list[Found] | None:
    """Return the paths of a finished first half, or None. Every rank has those of the first one."""
    saved = ranks.on_first(lambda: read_json(home / FIRST).get("found"))
    if saved is None:
        return None
    try:
        return [Found(tuple(map(int, path)), float(accuracy), int(generation)) for path, accuracy, generation in saved]
    except (TypeError, ValueError):
        raise GreedyNASError(f"{home / FIRST} cannot be read; remove {home} to search again") from None


def shorter(train: TrainSettings, share: float, paths: int) -> TrainSettings:
    """Return the settings of the second training: fewer epochs, a smaller learning rate, and the given number of paths."""
    changes = {
        "sampler": SAMPLER,
        "max_epochs": max(1, round(share * train.max_epochs)),
        "lr": LR * train.lr,
        "lr_warmup": 0.0,
        "stopping": False,
        "whole_every": None,
        "pool_size": max(paths, train.k),
    }
    return TrainSettings.model_validate({**train.model_dump(), **changes})


def shift(
    evaluate: SupernetAccuracies,
    best: Sequence[Found],
    folder: Path,
    settings: TrainSettings,
    precision: str,
    seed: int,
) -> SupernetAccuracies:
    """Train paths on a copy of the supernet, and return an evaluator on it. An interrupted training is resumed."""
    shifted, net = evaluate.with_settings(evaluate.settings, seed), deepcopy(evaluate.net)
    shifted.net = net
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock").touch()
    with RunDirectory(folder) as run:
        if run.load_checkpoint() is None:
            pool = CandidatePool(settings.pool_size)
            for place, entry in enumerate(best):
                pool.update(entry.path, float(place))  # in the order of their accuracies
            run.supernet.mkdir(exist_ok=True)
            tensors = training_tensors(net, supernet_optimizer(net, settings))
            run.save_checkpoint(0, tensors, TrainState(pool).to_json())
        train_supernet(
            net, evaluate.data, settings, seed=seed, precision=precision, eval_precision=evaluate.precision, run=run
        )
    return shifted
