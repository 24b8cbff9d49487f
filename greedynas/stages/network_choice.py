"""Which network is trained: one that a search found, a random one beside it, a path, a known network, any model of timm."""

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
from greedynas.data.transforms import normalisation
from greedynas.models.model_file import Card, make_network
from greedynas.models.pretrained import load_pretrained
from greedynas.rundir.arch_file import SCHEMA_VERSION, path_arch, read_arch
from greedynas.rundir.checkpoints import fitting, load_weights, net_weights
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
DRAWS = 1000  # random paths, before it is said that there is no other network


@dataclass(frozen=True)
class Target:
    """A network to train: a path of a space, or a model of timm."""

    name: str  # of its folder under models/
    space: Space | None = None  # for the run's images; the number of classes is the data's
    path: OpPath | None = None  # as it was evaluated or written; the network is built of its canonical form
    timm: str | None = None
    pretrained: str | None = None  # weights of a timm model: "cache" or a file
    tag: str = ""  # of timm's own weights
    search: str | None = None  # the search that found it
    in_supernet: bool = False  # whether the run's supernet has weights for it
    facts: dict[str, Any] = field(default_factory=dict)  # for arch.json: supernet_accuracy, latency_ms, within

    def identity(self) -> dict[str, Any]:
        """What makes it the same network."""
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
    """Return the run's chosen network, another one in models/, or any other by name.

    `seed` and `latency_table` are for `random` alone: it draws a network within the budget of the search that found `model`.
    """
    if latency_table is not None and arch != RANDOM:
        raise GreedyNASError("--latency-table is for --arch random alone: no other network is drawn within a budget")
    if model is not None and arch is not None and arch != RANDOM:
        raise GreedyNASError("--model names a network of this run and --arch another one: give one of them")
    for given in (model, name):
        if given is not None and not NAME.fullmatch(given):
            raise GreedyNASError(f"a model's name has letters, digits, '.', '_' and '-', got {given!r}")
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
        raise GreedyNASError("pretrained weights are for timm models; for a path of this run there is --inherit")
    return target if name is None else replace(target, name=name)


def _in_this_run(folder: Path, config: Config, model: str | None) -> Target:
    arch = read_arch(folder, model)
    name = arch["model"] if model is None else model
    search = read_search(folder, name)
    arch = arch if search is None else search["chosen"]  # retraining may have chosen another one of its networks
    if "timm" in arch:
        target = _of_timm(str(arch["timm"]), arch.get("pretrained"))
        return replace(target, name=name)
    own = arch.get("space") == config.space.name
    if not own and arch.get("space") not in space_names():
        raise GreedyNASError(f"{name} is a network of the space {arch.get('space')!r}, which is not known here")
    space = config.space if own else _for_images_of(config, str(arch["space"]))
    facts: dict[str, Any] = {key: arch[key] for key in ("latency_ms", "supernet_accuracy", "within") if key in arch}
    path = parse_path(arch.get("path"), space)
    return Target(name, space, path, search=None if search is None else name, in_supernet=own, facts=facts)


def found_targets(folder: Path, target: Target) -> list[Target]:
    """Return the target and then the other networks of its search, best first, of equals the cheapest; each network once."""
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
    """What the search chose by, in a file that is known to be one of a search."""
    score: float | None = entry.get("score")
    return float(entry["accuracy"]) if score is None else score


def _costs(entry: dict[str, Any], objectives: list[str]) -> list[float]:
    """Return the costs of a path, with infinity for a latency that the table cannot tell."""
    return [math.inf if entry.get(name) is None else float(entry[name]) for name in objectives]


def read_search(folder: Path, name: str) -> dict[str, Any] | None:
    """A finished search."""
    file = folder / "searches" / name / "search.json"
    if not file.is_file():
        return None
    search = read_record(file, Search)
    if search.get("chosen") is None:
        raise GreedyNASError(f"the search {name} is not finished; give its search command again")
    return search


def _at_random(folder: Path, config: Config, model: str | None, seed: int, latency_table: Path | None) -> Target:
    """Return a random network that keeps the limits of a search, each path within them equally likely.

    The network that the search led to is not drawn: it is what this one is compared with.
    """
    found = read_arch(folder, model)
    name = found["model"] if model is None else model
    search = read_search(folder, name)
    if search is None:
        raise GreedyNASError(f"{name} was not found by a search of this run: --arch random needs the budget of one")
    space = config.space.adapt(num_classes=search["chosen"].get("num_classes"))  # costs depend on the classes
    budget = Budget.model_validate(search["budget"])
    latency = None
    if "latency_ms" in budget.limits():
        latency = _table_of(folder, latency_table, search, space)
    taken = {canonical(parse_path(arch["path"], space), space) for arch in (found, search["chosen"])}
    drawn = space.sample(DRAWS, stream(seed, "random network"), budget, latency)
    path = next((path for path in map(tuple, drawn.tolist()) if canonical(path, space) not in taken), None)
    if path is None:
        raise GreedyNASError(f"no network but the found one keeps the budget of {name}: there is none to draw")
    facts: dict[str, Any] = {"within": name}
    if latency is not None:
        facts["latency_ms"] = float(latency.cost_table(space)(np.array([path]))[0])
    return Target(RANDOM, config.space, path, in_supernet=True, facts=facts)


def _table_of(folder: Path, latency_table: Path | None, search: dict[str, Any], space: Space) -> LatencyTable:
    """Return the latency table that a search was limited by; another one is refused."""
    file = latency_table or folder / "latency.json"
    if not file.is_file():
        raise GreedyNASError(
            f"the search {search['name']} limits latency and {file} is not there; name its table with --latency-table"
        )
    table, chosen = load_latency_table(file), search["chosen"]
    priced = float(table.cost_table(space)(np.array([chosen["path"]]))[0])
    if not math.isclose(priced, chosen.get("latency_ms") or 0.0, rel_tol=1e-6):
        raise GreedyNASError(
            f"{file} is not the table of the search {search['name']}: it gives the found network {priced:.4g} ms, "
            f"the search {chosen.get('latency_ms')} ms; name its table with --latency-table"
        )
    return table


def _by_path(arch: str, config: Config) -> Target:
    """A known network, or a path of the run's space."""
    known = known_networks().get(arch.strip().lower())
    if known is not None and known.space != config.space.name:
        return Target(known.name, _for_images_of(config, known.space), known.path)
    space, path = resolve(arch, config.space)
    name = compact(canonical(path, space), space).replace(",", "-")
    if len(name) > 100:
        name = f"path-{zlib.crc32(name.encode()):08x}"
    return Target(known.name if known else name, space, path, in_supernet=True)


def _for_images_of(config: Config, space: str) -> Space:
    """Another space for the images of the run; one that cannot take them says why."""
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
    mean, std = normalisation(view.channels)
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
    return Card(space=space, path=canonical(target.path, space), **common)


def make_arch(target: Target, card: Card) -> dict[str, Any]:
    """What `arch.json` says of it before it is trained."""
    if card.space is not None and target.path is not None:
        return {**path_arch(target.name, target.path, card.space), **target.facts}
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
    """Multiply-adds of convolutions and matrix products for one image."""
    image = torch.zeros(1, card.image_channels, card.image_size, card.image_size)
    try:
        with FlopCounterMode(display=False) as counter:
            network.eval()(image)
    except Exception as error:  # each architecture has its own way to refuse a size
        reason = str(error).strip().partition("\n")[0]
        raise GreedyNASError(
            f"timm's {card.timm} does not take images of {card.image_size} px with {card.image_channels} channels: {reason:.200}"
        ) from None
    return int(counter.get_total_flops()) // 2


def start_network(target: Target, card: Card, run: Run, *, seed: int, dropout: float, inherit: bool) -> nn.Module:
    """The network as its training begins: with fresh weights, the supernet's, or pretrained ones."""
    network = make_network(card, torch_stream(seed, "retrain init"), dropout)
    if inherit:
        inherit_weights(network, target, card, run)
    if target.pretrained is not None:
        name = f"{target.timm}.{target.tag}" if target.tag else str(target.timm)
        load_pretrained(network, name, target.pretrained)
    return network


def inherit_weights(network: nn.Module, target: Target, card: Card, run: Run) -> None:
    """The supernet's weights of the path as it was evaluated: its canonical form has others there."""
    if not target.in_supernet or card.space is None:
        raise GreedyNASError(f"{target.name} is no network of this run's supernet: it cannot inherit weights from it")
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        raise GreedyNASError(f"{run.folder} has no supernet to inherit weights from; train one with greedynas train")
    supernet = supernet_of(run.config(), len(card.class_names), torch.device("cpu"))
    with fitting(run.supernet):
        load_weights(supernet, net_weights(checkpoint[0]))
    # One after the other: the same blocks, which the two forms may count to different stages.
    values = supernet.subnet(target.path).state_dict().values()
    network.load_state_dict(dict(zip(network.state_dict(), values, strict=True)))
