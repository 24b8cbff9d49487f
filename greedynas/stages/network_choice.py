"""The choice of the network to retrain: a search result, a random network, a path, a known network, or a timm model."""

import math
import zlib
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from greedynas.data.datasets import Data
from greedynas.models.bases.weights import load_pretrained
from greedynas.models.model_file import Card, make_network
from greedynas.rundir.arch_file import SCHEMA_VERSION, path_arch, read_arch
from greedynas.rundir.checkpoints import checkpoint_errors, load_weights, net_weights
from greedynas.rundir.run_directory import NAME
from greedynas.rundir.schemas import Search, read_record
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream, torch_stream
from greedynas.settings.schema import Config
from greedynas.spaces.budget import Budget
from greedynas.spaces.latency import LatencyTable, load_latency_table
from greedynas.spaces.paths import OpPath, canonical, compact, parse_path
from greedynas.spaces.space import Space, load_space, space_names
from greedynas.spaces.zoo import known_networks, resolve
from greedynas.stages.run import Run, supernet_of

TIMM = "timm:"
RANDOM = "random"  # as --arch, and as the name of that model
DRAWS = 1000  # random paths that are tried before giving up


@dataclass(frozen=True)
class Target:
    """A network to train: a path of a space, or a model of timm."""

    name: str  # of its folder in models/
    space: Space | None = None  # adapted to the run's images; the data sets the number of classes
    path: OpPath | None = None  # as it was evaluated or given; the network is built from its canonical form
    timm: str | None = None
    pretrained: str | None = None  # weights of a timm model: "cache" or a file
    tag: str = ""  # of timm's own weights
    search: str | None = None  # the search that found it
    in_supernet: bool = False  # whether the run's supernet has weights for it
    facts: dict[str, Any] = field(default_factory=dict)  # for arch.json: supernet_accuracy, latency_ms, within

    def identity(self) -> dict[str, Any]:
        """Return what identifies the network, independent of its name."""
        if self.space is None or self.path is None:
            return {"timm": self.timm, "pretrained": self.pretrained}
        return {"space": self.space.name, "canonical_path": list(canonical(self.path, self.space))}


def choose_target(
    folder: Path,
    config: Config,
    model: str | None,
    arch: str | None,
    name: str | None,
    pretrained: str | Path | None,
    seed: int = 0,
    latency_table: Path | None = None,
) -> Target:
    """Return the network to retrain: the run's chosen network, another one in models/, or the one that `arch` names.

    `seed` and `latency_table` apply only to `random`, which draws a network within the budget of the search that found
    `model`.
    """
    if latency_table is not None and arch != RANDOM:
        raise GreedyNASError("--latency-table applies only to --arch random, which draws a network within a budget")
    if model is not None and arch is not None and arch != RANDOM:
        raise GreedyNASError("--model names a network of this run and --arch another network: give only one of them")
    for given in (model, name):
        if given is not None and not NAME.fullmatch(given):
            raise GreedyNASError(f"a model's name consists of letters, digits, '.', '_' and '-', got {given!r}")
    weights = None if pretrained is None else str(pretrained)
    if arch is None:
        target = _in_this_run(folder, config, model)
        target = replace(target, pretrained=weights or target.pretrained)
    elif arch == RANDOM:
        target = _at_random(folder, config, model, seed, latency_table)
    elif arch.startswith(TIMM):
        target = _of_timm(arch.removeprefix(TIMM), weights)
    else:
        target = _by_path(arch, config)
    if target.pretrained is not None and target.timm is None:
        raise GreedyNASError("pretrained weights exist for timm models only; for a path of this run, use --inherit")
    return target if name is None else replace(target, name=name)


def _in_this_run(folder: Path, config: Config, model: str | None) -> Target:
    arch = read_arch(folder, model)
    name = arch["model"] if model is None else model
    search = read_search(folder, name)
    arch = arch if search is None else search["chosen"]  # retrain.top may have chosen another of its networks
    if "timm" in arch:
        target = _of_timm(str(arch["timm"]), arch.get("pretrained"))
        return replace(target, name=name)
    own = arch.get("space") == config.space.name
    if not own and arch.get("space") not in space_names():
        raise GreedyNASError(f"{name} is a network of the space {arch.get('space')!r}, which does not exist here")
    space = config.space if own else _for_images_of(config, str(arch["space"]))
    facts: dict[str, Any] = {key: arch[key] for key in ("latency_ms", "supernet_accuracy", "within") if key in arch}
    path = parse_path(arch.get("path"), space)
    return Target(name, space, path, search=None if search is None else name, in_supernet=own, facts=facts)


def found_targets(folder: Path, target: Target) -> list[Target]:
    """Return the target and then the other networks of its search, each once, by accuracy and among equals by cost."""
    search, space = read_search(folder, str(target.search)), target.space
    if search is None or space is None or target.path is None:
        return [target]
    distinct = {canonical(target.path, space): target}
    for entry in sorted(search["found"], key=lambda entry: (-_worth(entry), *_costs(entry, search["objectives"]))):
        path = parse_path(entry["path"], space)
        facts = {"supernet_accuracy": entry["accuracy"]}
        facts |= {"latency_ms": entry["latency_ms"]} if "latency_ms" in entry else {}
        distinct.setdefault(canonical(path, space), replace(target, path=path, facts=facts))
    return list(distinct.values())


def _worth(entry: dict[str, Any]) -> float:
    """Return the value that the search maximised for this entry: its score, or else its accuracy."""
    score: float | None = entry.get("score")
    return float(entry["accuracy"]) if score is None else score


def _costs(entry: dict[str, Any], objectives: list[str]) -> list[float]:
    """Return the costs of a path, with infinity for a latency that the table does not contain."""
    return [math.inf if entry.get(name) is None else float(entry[name]) for name in objectives]


def read_search(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the record of a finished search, or None if there is no search of this name."""
    file = folder / "searches" / name / "search.json"
    if not file.is_file():
        return None
    search = read_record(file, Search)
    if search.get("chosen") is None:
        raise GreedyNASError(f"the search {name} is not finished; repeat its search command to resume it")
    return search


def _at_random(folder: Path, config: Config, model: str | None, seed: int, latency_table: Path | None) -> Target:
    """Return a random network within the budget of a search; every path within the budget is equally likely.

    The network that the search found is excluded, because the random network is compared with it.
    """
    found = read_arch(folder, model)
    name = found["model"] if model is None else model
    search = read_search(folder, name)
    if search is None:
        raise GreedyNASError(f"{name} was not found by a search of this run, whose budget --arch random needs")
    space = config.space.adapt(num_classes=search["chosen"].get("num_classes"))  # costs depend on the classes
    budget = Budget.model_validate(search["budget"])
    latency = None
    if "latency_ms" in budget.limits():
        latency = _table_of(folder, latency_table, search, space)
    taken = {canonical(parse_path(arch["path"], space), space) for arch in (found, search["chosen"])}
    drawn = space.sample(DRAWS, stream(seed, "random network"), budget, latency)
    path = next((path for path in map(tuple, drawn.tolist()) if canonical(path, space) not in taken), None)
    if path is None:
        raise GreedyNASError(f"only the found network keeps the budget of {name}, so no random one can be drawn")
    facts: dict[str, Any] = {"within": name}
    if latency is not None:
        facts["latency_ms"] = float(latency.cost_table(space)(np.array([path]))[0])
    return Target(RANDOM, config.space, path, in_supernet=True, facts=facts)


def _table_of(folder: Path, latency_table: Path | None, search: dict[str, Any], space: Space) -> LatencyTable:
    """Return the latency table that limited a search; a different table is refused."""
    file = latency_table or folder / "latency.json"
    if not file.is_file():
        raise GreedyNASError(
            f"the search {search['name']} limits latency, but {file} is missing; name its table with --latency-table"
        )
    table, chosen = load_latency_table(file), search["chosen"]
    priced = float(table.cost_table(space)(np.array([chosen["path"]]))[0])
    if not math.isclose(priced, chosen.get("latency_ms") or 0.0, rel_tol=1e-6):
        raise GreedyNASError(
            f"{file} is not the table of the search {search['name']}: the found network takes {priced:.4g} ms according to this table, "
            f"but {chosen.get('latency_ms')} ms according to the search; name its table with --latency-table"
        )
    return table


def _by_path(arch: str, config: Config) -> Target:
    """Return a known network, or a path of the run's space."""
    known = known_networks().get(arch.strip().lower())
    if known is not None and known.space != config.space.name:
        return Target(known.name, _for_images_of(config, known.space), known.path)
    space, path = resolve(arch, config.space)
    name = compact(canonical(path, space), space).replace(",", "-")
    if len(name) > 100:
        name = f"path-{zlib.crc32(name.encode()):08x}"
    return Target(known.name if known else name, space, path, in_supernet=True)


def _for_images_of(config: Config, space: str) -> Space:
    """Return another space, adapted to the images of the run; a space that cannot take them is refused."""
    return load_space(space).adapt(image_size=config.space.image_size, image_channels=config.space.image_channels)


def _of_timm(text: str, pretrained: str | None) -> Target:
    import timm

    architecture, _, tag = text.strip().partition(".")
    if architecture not in (models := timm.list_models()):
        near = get_close_matches(architecture, models, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; see timm.list_models()"
        raise GreedyNASError(f"timm has no model {architecture!r}{hint}")
    if tag and text.strip() not in (tagged := timm.list_pretrained(f"{architecture}.*")):
        raise GreedyNASError(f"timm has no weights {text.strip()!r}; known: {', '.join(tagged)}")
    name = f"timm-{architecture}" + ("" if pretrained is None else "-pretrained")
    return Target(name, timm=architecture, tag=tag, pretrained=pretrained)


# From a target to a network


def make_card(target: Target, data: Data) -> Card:
    view = data.train.view
    mean, std = view.normalisation
    common: dict[str, Any] = {
        "name": target.name,
        "class_names": tuple(data.class_names),
        "image_size": view.size,
        "image_channels": view.channels,
        "crop_fraction": view.size / view.stored,
        "mean": mean,
        "std": std,
    }
    if target.space is None or target.path is None:
        return Card(timm=target.timm, **common)
    space = target.space.adapt(num_classes=len(data.class_names))
    space, path = space.settle(canonical(target.path, space))
    if space.image_size != view.size:
        seen = view.at_size(space.image_size)
        common |= {"image_size": seen.size, "crop_fraction": seen.size / seen.stored}
    return Card(space=space, path=path, **common)


def make_arch(target: Target, card: Card) -> dict[str, Any]:
    """Return the content of `arch.json` before the network is trained."""
    if card.space is not None and target.space is not None and target.path is not None:
        space = target.space.adapt(num_classes=card.space.num_classes)
        return {**path_arch(target.name, target.path, space), **target.facts}
    network = make_network(card)
    arch = {
        "schema_version": SCHEMA_VERSION,
        "model": target.name,
        "timm": target.timm,
        "macs": count_macs(network, card),
        "params": sum(parameter.numel() for parameter in network.parameters()),
        "num_classes": len(card.class_names),
        "image_size": card.image_size,
    }
    return arch if target.pretrained is None else {**arch, "pretrained": target.pretrained}


@torch.no_grad()
def count_macs(network: nn.Module, card: Card) -> int:
    """Return the multiply-adds of all convolutions and matrix products for one image."""
    image = torch.zeros(1, card.image_channels, card.image_size, card.image_size)
    try:
        with FlopCounterMode(display=False) as counter:
            network.eval()(image)
    except Exception as error:  # architectures raise different errors for a size that they do not support
        reason = str(error).strip().partition("\n")[0]
        raise GreedyNASError(
            f"timm's {card.timm} does not support images of {card.image_size} px with {card.image_channels} channels: "
            f"{reason:.200}"
        ) from None
    return int(counter.get_total_flops()) // 2


def start_network(target: Target, card: Card, run: Run, *, seed: int, dropout: float, inherit: bool) -> nn.Module:
    """Return the network with its initial weights: random ones, those of the supernet, or pretrained ones."""
    network = make_network(card, torch_stream(seed, "retrain init"), dropout)
    if inherit:
        inherit_weights(network, target, card, run)
    if target.pretrained is not None:
        name = f"{target.timm}.{target.tag}" if target.tag else str(target.timm)
        load_pretrained(network, name, target.pretrained)
    return network


def inherit_weights(network: nn.Module, target: Target, card: Card, run: Run) -> None:
    """Copy the supernet's weights of the path, as it was evaluated, into the network.

    The canonical form of the path has other weights in the supernet.
    """
    if not target.in_supernet or card.space is None:
        raise GreedyNASError(f"{target.name} is not a path of this run's supernet and cannot inherit its weights")
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        raise GreedyNASError(f"{run.folder} has no supernet to inherit weights from; train one with greedynas train")
    supernet = supernet_of(run.config(), len(card.class_names), torch.device("cpu"))
    with checkpoint_errors(run.supernet):
        load_weights(supernet, net_weights(checkpoint[0]))
    # Matched by order: both forms have the same blocks, but may count them to different stages.
    values = supernet.subnet(target.path).state_dict().values()
    network.load_state_dict(dict(zip(network.state_dict(), values, strict=True)))
