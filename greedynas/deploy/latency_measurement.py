"""The measurement of a latency table on this machine: first every distinct block of a space, then a few whole networks.

A single block has costs that it does not have inside a network: the call and, in ONNX Runtime, reordering the image
into the blocked layout of the convolutions and back. So each block is timed once alone and once as COPIES of itself in
one graph, and its latency is the time that one more copy adds. The copies are chained if the block keeps the shape;
otherwise they run side by side and their outputs are added. (The addition is the same for all ops of a layer that
changes the shape, and every path has such a layer, so the constant compensates for it.) Copies have separate weights,
as the blocks of a network do.

The graphs are timed in turns (see `timing.py`), and the quietest round of each counts. Blocks and constant are thus
those of a quiet machine, even if this one was not. The computation is done by a latency backend (see
`latency_backends/`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from greedynas.deploy.latency_backends.backend import LatencyBackend, open_backend
from greedynas.deploy.timing import RUNS, Runner, quietest, take_turns
from greedynas.rundir.progress import Progress as Bar
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream
from greedynas.spaces.latency import Block, Entry, Fit, LatencyTable, fill, fixed_layers, refuse_sizes
from greedynas.spaces.space import Layer, Space

COPIES = 4
FIT_NETWORKS = 8

Progress = Callable[[str, int, int], None]  # called with a task, its finished items and all of its items


def measure_latency(
    space: Space,
    backend: str = "onnxruntime",
    *,
    device: str = "cpu",
    threads: int = 1,
    repeats: int = 20,
    progress: Progress | None = None,
) -> LatencyTable:
    """Measure a latency table on this machine: time every distinct block of a space, and fit the constant to networks.

    Args:
        space: The space whose blocks are timed, one image at a time.
        backend: The backend: onnxruntime, torch, or the name of a plugin's backend.
        device: The device: cpu, or cuda with torch.
        threads: The number of CPU threads.
        repeats: The number of rounds over all blocks.
        progress: A function that is called with the name of a task, its finished items and all of its items.

    Returns:
        The table, with the error of its predictions for a few networks.

    Raises:
        GreedyNASError: There is no such backend, it does not support the device, or a number is out of range.

    Example:
        >>> import greedynas
        >>> space = greedynas.load_space("tiny.yaml")
        >>> table = greedynas.measure_latency(space, "torch", repeats=1)
        >>> table.price((1, 1, 1, 1), space) > 0
        True
    """
    if repeats < 1:
        raise GreedyNASError(f"repeats must be at least 1, got {repeats}")
    refuse_sizes(space)
    report = progress or (lambda what, done, total: None)
    with _torch_threads(threads):
        opened = open_backend(backend, device, threads)
        parts = all_parts(space, opened, report)
        timings = _time_blocks(space, opened, parts, repeats, report)
        table = fill(space, timings, device=opened.device, backend=opened.backend, threads=opened.threads)
        paths = [tuple(path) for path in space.sample(FIT_NETWORKS, stream(0, "latency")).tolist()]
        networks = [opened.runner(*parts_of(space, parts, path)) for path in paths]
        measured = quietest(take_turns(networks, repeats, lambda done, total: report("whole networks", done, total)))
        if not measured.all():
            raise GreedyNASError("a network took no time at all: the clock of this machine does not work")
    return with_constant(table, space, paths, measured)


def with_constant(
    table: LatencyTable, space: Space, paths: Sequence[Sequence[int]], measured: NDArray[np.float64]
) -> LatencyTable:
    """Return a table whose constant is fitted to the measured milliseconds of whole networks."""
    if not len(paths):
        return table
    predicted = np.array([table.price(tuple(path), space) for path in paths])
    constant = float(np.median(measured - predicted))
    error = float(np.median(np.abs(predicted + constant - measured) / measured))
    return table.model_copy(update={"constant_ms": constant, "fit": Fit(networks=len(paths), median_error=error)})


@contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """Show the progress of each task of `measure_latency`, one after the other."""
    shown: dict[str, Bar] = {}
    with ExitStack() as stack:

        def update(what: str, done: int, total: int) -> None:
            if what not in shown:
                stack.close()  # the bar of the task before
                shown[what] = stack.enter_context(Bar(console, what, total, unit="part"))
            shown[what].update(done)

        yield update


def all_parts(space: Space, backend: LatencyBackend, report: Progress) -> dict[Block, Any]:
    """Return every distinct block in the backend's form, without identities that do nothing."""
    wanted: dict[tuple[int, ...], tuple[Layer, list[str]]] = {}
    for layer in (*fixed_layers(space), *space.layers):
        _, ops = wanted.setdefault(_place(layer), (layer, []))
        ops += [op for op in layer.ops if op not in ops and not layer.is_nothing(op)]
    parts: dict[Block, Any] = {}
    for done, (layer, ops) in enumerate(wanted.values()):
        report("building blocks", done, len(wanted))
        if ops:
            made = backend.parts(layer, ops, space.activation)
            parts |= {Block.of(layer, op): part for op, part in zip(ops, made, strict=True)}
    report("building blocks", len(wanted), len(wanted))
    return parts


def _time_blocks(
    space: Space, backend: LatencyBackend, parts: dict[Block, Any], rounds: int, report: Progress
) -> dict[Block, Entry]:
    """Return the time that one more copy of each block adds to a graph."""
    places = places_of(space)
    runners: list[Runner] = []
    for block, part in parts.items():
        layer = places[block.in_channels, block.out_channels, block.stride, block.in_size]
        runners.append(backend.runner([part], layer))
        runners.append(backend.runner([part] * COPIES, layer, side_by_side=not block.keeps_shape or block.op == "FC"))
    # Between two runs of a network, the weights of other blocks displace those of a block from the caches.
    others = torch.ones(max(1, round(_mean_params(space))))
    medians = take_turns(runners, rounds, lambda done, total: report("timing blocks", done, total), others.sum)
    return block_entries(list(parts), medians[0::2], medians[1::2], rounds * RUNS * 2)


def block_entries(
    blocks: Sequence[Block], one: NDArray[np.float64], many: NDArray[np.float64], count: int
) -> dict[Block, Entry]:
    """Return the entries of blocks from the rounds of each block alone and as copies, (blocks, rounds)."""
    each = np.maximum(quietest(many) - quietest(one), 0) / (COPIES - 1)
    spread = np.subtract(*np.percentile((many - one) / (COPIES - 1), [75, 25], axis=1))
    return {
        block: Entry(ms=float(ms), spread=float(apart), count=count)
        for block, ms, apart in zip(blocks, each, spread, strict=True)
    }


def parts_of(space: Space, parts: dict[Block, Any], path: Sequence[int]) -> tuple[list[Any], Layer]:
    """Return the parts of a whole network in order, and its first layer."""
    *stem_and_head, classifier = fixed_layers(space)
    stem, head = stem_and_head[: len(space.stem)], stem_and_head[len(space.stem) :]
    chosen = [(layer, layer.ops[op]) for layer, op in zip(space.layers, path, strict=True)]
    chosen = [(layer, op) for layer, op in chosen if not layer.is_nothing(op)]
    ends = [[(layer, layer.ops[0]) for layer in layers] for layers in (stem, [*head, classifier])]
    return [parts[Block.of(layer, op)] for layer, op in (*ends[0], *chosen, *ends[1])], stem[0]


def places_of(space: Space) -> dict[tuple[int, int, int, int], Layer]:
    """Return a layer for each distinct combination of shapes in a space."""
    return {_place(layer): layer for layer in (*fixed_layers(space), *space.layers)}


def _mean_params(space: Space) -> float:
    table = space.cost_tables["params"]
    return table.fixed + sum(float(table.cells(layer).mean()) for layer in range(len(space.layers)))


def _place(layer: Layer) -> tuple[int, int, int, int]:
    return layer.in_channels, layer.out_channels, layer.stride, layer.in_size


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)
