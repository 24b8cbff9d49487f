"""`arch.json`: the description of a network in a run, from the run's space, from another one, or from timm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from greedynas.rundir.run_directory import NAME
from greedynas.rundir.schemas import VERSIONS, Arch, read_record
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import write_json
from greedynas.spaces.paths import canonical, op_names
from greedynas.spaces.space import Space

SCHEMA_VERSION = VERSIONS["arch"]


def path_arch(name: str, path: Sequence[int], space: Space) -> dict[str, Any]:
    """Return the content of `arch.json` for a path; `name` is the folder under models/."""
    costs = space.costs([path])
    return {
        "schema_version": SCHEMA_VERSION,
        "model": name,
        "space": space.name,
        "path": list(path),
        "canonical_path": list(canonical(path, space)),
        "ops": op_names(path, space),
        "macs": int(costs.macs[0]),
        "params": int(costs.params[0]),
        "num_classes": space.num_classes,
        "image_size": space.settle(path)[0].image_size,
    }


def read_arch(folder: Path, model: str | None = None) -> dict[str, Any]:
    """Return the `arch.json` of a model, or that of the run's chosen network."""
    file = folder / "arch.json" if model is None else folder / "models" / model / "arch.json"
    if not file.is_file():
        missing = f"{folder} has no chosen network yet" if model is None else f"{folder} has no model {model!r}"
        raise GreedyNASError(f"{missing}; find one with greedynas search {folder}")
    arch = read_record(file, Arch)
    if not NAME.fullmatch(arch.get("model") or ""):
        raise GreedyNASError(f"{file} does not describe a network; search again")
    return arch


def write_arch(folder: Path, chosen: dict[str, Any]) -> None:
    """Write `models/NAME/arch.json`; fields that retraining added are kept if the network is the same."""
    file = folder / "models" / chosen["model"] / "arch.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    before = read_arch(folder, chosen["model"]) if file.exists() else {}
    write_json(file, {**before, **chosen} if before.get("path") == chosen["path"] else chosen)
