"""The latency kit: the graphs of a latency measurement as files, with a script that times them on another device.

The graphs are those of `latency_measurement`: each block alone and as copies, and a few whole networks, on which the
constant is fitted. The script (`kit/run.py`) needs only Python and the runtime. It writes `timings.json`, which has the
description of the kit, so that `greedynas latency import` needs nothing else.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from greedynas.deploy.latency_backends.backend import make_image, open_backend
from greedynas.deploy.latency_measurement import (
    COPIES,
    FIT_NETWORKS,
    Progress,
    all_parts,
    block_entries,
    parts_of,
    places_of,
    with_constant,
)
from greedynas.deploy.timing import RUNS
from greedynas.runtime.errors import GreedyNASError, first_problem
from greedynas.runtime.files import write_atomically, write_json
from greedynas.runtime.rng import stream
from greedynas.spaces.latency import MAX_MS, Block, LatencyTable, Text, fill, refuse_sizes
from greedynas.spaces.paths import parse_path
from greedynas.spaces.space import Space

SCRIPT = Path(__file__).parent / "kit" / "run.py"
TIMINGS = "greedynas latency timings"
RUNTIMES = ("litert", "onnxruntime", "executorch")

Count = Annotated[int, Field(ge=1, le=2**31)]
Milliseconds = Annotated[float, Field(gt=0, le=MAX_MS, allow_inf_nan=False)]


class _Data(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")


class GraphBlock(_Data):
    """The block of a graph."""

    op: Text
    in_channels: Count
    out_channels: Count
    stride: Count
    in_size: Count


class Graph(_Data):
    """A file of a kit: copies of a block, or the whole network of a path."""

    file: Text
    block: GraphBlock | None = None
    copies: Count = 1
    path: tuple[Annotated[int, Field(ge=0)], ...] | None = None


class Kit(_Data):
    """The description of a kit, `kit.json`."""

    kind: Literal["greedynas latency kit"]
    schema_version: Literal[1]
    runtime: Text
    precision: Text
    space: Text
    image_size: Count
    num_classes: Count
    graphs: Annotated[tuple[Graph, ...], Field(min_length=1, max_length=100_000)]
    inputs: dict[str, list[int]] = {}


class Timings(_Data):
    """What the script of a kit writes, `timings.json`."""

    kind: Literal["greedynas latency timings"]
    schema_version: Literal[1]
    device: Text
    runtime: Text
    threads: Count
    kit: Kit
    rounds_ms: dict[str, Annotated[tuple[Milliseconds, ...], Field(min_length=1, max_length=100_000)]]


def write_kit(space: Space, runtime: str, folder: Path, progress: Progress = lambda what, done, total: None) -> Kit:
    """Write a kit into a new folder.

    Args:
        space: The space whose blocks are to be timed.
        runtime: One of `RUNTIMES`.
        folder: The folder, which must not exist or be empty.
        progress: A function that is called with a task, its finished items and all of its items.

    Returns:
        The description of the kit.

    Raises:
        GreedyNASError: The folder is not empty, or the runtime is unknown or not installed.
    """
    if runtime not in RUNTIMES:
        raise GreedyNASError(f"there are kits for {', '.join(RUNTIMES)}, not for {runtime!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GreedyNASError(f"{folder} exists already; name a new folder")
    refuse_sizes(space)
    backend = open_backend(runtime)
    parts = all_parts(space, backend, progress)
    folder.mkdir(parents=True, exist_ok=True)
    graphs, inputs = [], {}
    wanted = list(_graphs(space, parts))
    for number, (graph, chosen, layer, side_by_side) in enumerate(wanted):
        progress("writing graphs", number, len(wanted))
        file = f"{number:04}{backend.suffix}"
        write_atomically(folder / file, backend.graph(chosen, layer, side_by_side))
        graphs.append(graph.model_copy(update={"file": file}))
        inputs[file] = list(make_image(layer).shape)
    progress("writing graphs", len(wanted), len(wanted))
    kit = Kit(
        kind="greedynas latency kit",
        schema_version=1,
        runtime=runtime,
        precision="fp32",
        space=space.name,
        image_size=space.image_size,
        num_classes=space.num_classes,
        graphs=tuple(graphs),
        inputs=inputs,
    )
    shutil.copyfile(SCRIPT, folder / "run.py")
    write_json(folder / "kit.json", kit.model_dump(mode="json"))
    return kit


def _graphs(space: Space, parts: dict[Block, Any]) -> Iterator[tuple[Graph, list[Any], Any, bool]]:
    places = places_of(space)
    for block, part in parts.items():
        layer = places[block.in_channels, block.out_channels, block.stride, block.in_size]
        about, side_by_side = GraphBlock(**vars(block)), not block.keeps_shape or block.op == "FC"
        yield Graph(file="", block=about), [part], layer, False
        yield Graph(file="", block=about, copies=COPIES), [part] * COPIES, layer, side_by_side
    for path in space.sample(FIT_NETWORKS, stream(0, "latency")).tolist():
        chosen, layer = parts_of(space, parts, path)
        yield Graph(file="", path=tuple(path)), chosen, layer, False


def is_timings(text: str) -> bool:
    """Return whether a JSON text is the output of a kit's script."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("kind") == TIMINGS


def table_of(file: Path, text: str, space: Space) -> LatencyTable:
    """Return the latency table of a space from the output of a kit's script.

    Raises:
        GreedyNASError: The file is damaged, or belongs to another space.
    """
    try:
        timings = Timings.model_validate_json(text)
    except ValidationError as error:
        raise GreedyNASError(f"{file} has no timings of a kit: {first_problem(error).removeprefix(': ')}") from None
    kit = timings.kit
    missing = [graph.file for graph in kit.graphs if graph.file not in timings.rounds_ms]
    if missing:
        raise GreedyNASError(f"{file} lacks the timings of {len(missing)} graphs, such as {missing[0]}")
    lengths = {len(rounds) for rounds in timings.rounds_ms.values()}
    if len(lengths) > 1:
        raise GreedyNASError(f"{file} is damaged: its graphs have different numbers of rounds")
    rounds = {file: np.array(values) for file, values in timings.rounds_ms.items()}
    single: dict[Block, NDArray[np.float64]] = {}
    copied: dict[Block, NDArray[np.float64]] = {}
    networks: list[tuple[tuple[int, ...], float]] = []
    for graph in kit.graphs:
        if graph.block is not None:
            (single if graph.copies == 1 else copied)[Block(**graph.block.model_dump())] = rounds[graph.file]
        elif graph.path is not None:
            networks.append((parse_path(list(graph.path), space), float(rounds[graph.file].min())))
    blocks = [block for block in single if block in copied]
    one, many = (np.array([times[block] for block in blocks]) for times in (single, copied))
    entries = block_entries(blocks, one, many, RUNS * lengths.pop() * 2)
    table = fill(space, entries, device=timings.device, backend=timings.runtime, threads=timings.threads)
    if table.missing():
        raise GreedyNASError(
            f"{file} is of {kit.space} at {kit.image_size} px with {kit.num_classes} classes, and lacks "
            f"{len(table.missing())} blocks of {space.name} at {space.image_size} px with {space.num_classes} classes"
        )
    return with_constant(table, space, [path for path, _ in networks], np.array([ms for _, ms in networks]))
