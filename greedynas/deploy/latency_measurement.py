"""Measure a latency table on this machine: every distinct block of a space, then a few whole networks.

A block on its own shows costs that it does not have inside a network: the call and, in ONNX Runtime, reordering the image
into the blocked layout of the convolutions and back. So each block is timed once and as COPIES of itself in one graph, and
its latency is what one more copy adds: one after the other where the shape stays, side by side with their outputs added
where it changes. (The addition is the same for all ops of a layer that changes the shape, and every path has such a layer:
the constant takes it back.) Copies have their own weights in memory, as the blocks of a network have.

The graphs take turns (see `timing.py`), and of each the quietest round counts. Blocks and constant are then what networks
take on a quiet machine, even when this one was not. What computes is a latency backend (see `latency_backends/`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from greedynas.deploy.latency_backends.backend import LatencyBackend, open_backend
from greedynas.deploy.timing import RUNS, Runner, quietest, take_turns
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream
from greedynas.runtime.terminal import text_column
from greedynas.spaces.latency import Block, Entry, Fit, LatencyTable, fill, fixed_layers
from greedynas.spaces.space import Layer, Space

COPIES = 4
FIT_NETWORKS = 8

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is


def measure_latency(
    space: Space,
    backend: str = "onnxruntime",
    *,
    device: str = "cpu",
    threads: int = 1,
    repeats: int = 20,
    progress: Progress | None = None,
) -> LatencyTable:
    """Measure a latency table on this machine: time every distinct block of a space, and fit the constant on whole networks.

    Args:
        space: The space whose blocks are timed, one image at a time.
        backend: What computes: onnxruntime, torch, or one of a plugin.
        device: Where it computes: cpu, or cuda with torch.
        threads: CPU threads.
        repeats: Rounds over all blocks.
        progress: Called with what is being done, how much of it is done, and how much there is.

    Returns:
        The table, with what its predictions were off by on a few networks.

    Raises:
        GreedyNASError: There is no such backend, it cannot compute there, or a number makes no sense.

    Example:
        >>> import greedynas
        >>> space = greedynas.load_space("tiny.yaml")
        >>> table = greedynas.measure_latency(space, "torch", repeats=1)
        >>> table.price((1, 1, 1, 1), space) > 0
        True
    """
    if repeats < 1:
        raise GreedyNASError(f"repeats must be at least 1, got {repeats}")
    told = progress or (lambda what, done, total: None)
    with _torch_threads(threads):
        opened = open_backend(backend, device, threads)
        parts = _all_parts(space, opened, told)
        timings = _time_blocks(space, opened, parts, repeats, told)
        table = fill(space, timings, device=opened.device, backend=opened.backend, threads=opened.threads)
        paths = [tuple(path) for path in space.sample(FIT_NETWORKS, stream(0, "latency")).tolist()]
        networks = [_network(space, opened, parts, path) for path in paths]
        measured = quietest(take_turns(networks, repeats, lambda done, total: told("whole networks", done, total)))
        if not measured.all():
            raise GreedyNASError("a network took no time at all: the clock of this machine does not run")
    predicted = np.array([table.price(path, space) for path in paths])
    constant = float(np.median(measured - predicted))
    error = float(np.median(np.abs(predicted + constant - measured) / measured))
    return table.model_copy(update={"constant_ms": constant, "fit": Fit(networks=len(paths), median_error=error)})


@contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """Show a bar for what `measure_latency` does; nothing where the console is no terminal."""
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield tell


def _all_parts(space: Space, backend: LatencyBackend, told: Progress) -> dict[Block, Any]:
    """Return every distinct block, in the backend's form; those that do nothing are left out."""
    wanted: dict[tuple[int, ...], tuple[Layer, list[str]]] = {}
    for layer in (*fixed_layers(space), *space.layers):
        _, ops = wanted.setdefault(_place(layer), (layer, []))
        ops += [op for op in layer.ops if op not in ops and not layer.is_nothing(op)]
    parts: dict[Block, Any] = {}
    for done, (layer, ops) in enumerate(wanted.values()):
        told("building blocks", done, len(wanted))
        if ops:
            made = backend.parts(layer, ops, space.activation)
            parts |= {Block.of(layer, op): part for op, part in zip(ops, made, strict=True)}
    told("building blocks", len(wanted), len(wanted))
    return parts


def _time_blocks(
    space: Space, backend: LatencyBackend, parts: dict[Block, Any], rounds: int, told: Progress
) -> dict[Block, Entry]:
    """Return what one more of each block adds to a graph."""
    places = {_place(layer): layer for layer in (*fixed_layers(space), *space.layers)}
    runners: list[Runner] = []
    for block, part in parts.items():
        layer = places[block.in_channels, block.out_channels, block.stride, block.in_size]
        runners.append(backend.runner([part], layer))
        runners.append(backend.runner([part] * COPIES, layer, side_by_side=not block.keeps_shape or block.op == "FC"))
    # Since its last run a block of a network has lost its place in the caches to the weights of all the others.
    others = torch.ones(max(1, round(_mean_params(space))))
    medians = take_turns(runners, rounds, lambda done, total: told("timing blocks", done, total), others.sum)
    one, many = medians[0::2], medians[1::2]
    each = np.maximum(quietest(many) - quietest(one), 0) / (COPIES - 1)
    spread = np.subtract(*np.percentile((many - one) / (COPIES - 1), [75, 25], axis=1))
    return {
        block: Entry(ms=float(ms), spread=float(apart), count=rounds * RUNS * 2)
        for block, ms, apart in zip(parts, each, spread, strict=True)
    }


def _network(space: Space, backend: LatencyBackend, parts: dict[Block, Any], path: Sequence[int]) -> Runner:
    *stem_and_head, classifier = fixed_layers(space)
    stem, head = stem_and_head[: len(space.stem)], stem_and_head[len(space.stem) :]
    chosen = [(layer, layer.ops[op]) for layer, op in zip(space.layers, path, strict=True)]
    chosen = [(layer, op) for layer, op in chosen if not layer.is_nothing(op)]
    ends = [[(layer, layer.ops[0]) for layer in layers] for layers in (stem, [*head, classifier])]
    return backend.runner([parts[Block.of(layer, op)] for layer, op in (*ends[0], *chosen, *ends[1])], stem[0])


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
