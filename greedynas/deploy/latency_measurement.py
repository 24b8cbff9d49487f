"""Measure a latency table on this machine: every distinct block of a space, then a few whole networks.

A block on its own shows costs that it does not have inside a network: the call and, in ONNX Runtime, reordering the image
into the blocked layout of the convolutions and back. So each block is timed once and as COPIES of itself in one graph, and
its latency is what one more copy adds: one after the other where the shape stays, side by side with their outputs added
where it changes. (The addition is the same for all ops of a layer that changes the shape, and every path has such a layer:
the constant takes it back.) Copies have their own weights in memory, as the blocks of a network have.

The graphs take turns, round after round, so that drift and other programs meet all of them alike. Disturbances only ever
add time: of a graph's medians, one a round, the lowest counts. Blocks and constant are then what networks take on a quiet
machine, even when this one was not.
"""

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from torch import Tensor, nn

from greedynas.deploy.onnx_files import export_onnx, onnx_runner
from greedynas.models.blocks import initialise, make_block
from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.runtime.rng import stream, torch_stream
from greedynas.runtime.terminal import text_column
from greedynas.spaces.latency import Block, Entry, Fit, LatencyTable, fill, fixed_layers
from greedynas.spaces.space import Layer, Space

if TYPE_CHECKING:
    import onnx

BACKENDS = ["onnxruntime", "torch"]
COPIES = 4
WARMUP = 3  # runs of each graph before the first round
RUNS = 5  # of each graph in a round; their median counts
FIT_NETWORKS = 8

Runner = Callable[[], float]  # runs a graph once, returns milliseconds
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is


class Engine(Protocol):
    """What computes. A part is a block in the engine's own form."""

    backend: str
    device: str
    threads: int | None

    def parts(self, layer: Layer, ops: Sequence[str], activation: str) -> list[Any]: ...

    def runner(self, parts: Sequence[Any], layer: Layer, side_by_side: bool = False) -> Runner:
        """Parts in a row, or side by side with their outputs added, on the input of `layer`."""
        ...


def measure_latency(
    space: Space,
    backend: str = "onnxruntime",
    *,
    device: str = "cpu",
    threads: int = 1,
    repeats: int = 20,
    progress: Progress | None = None,
) -> LatencyTable:
    """Time every distinct block of `space` in `repeats` rounds, and fit the constant on whole networks; batch size 1."""
    if repeats < 1:
        raise GreedyNASError(f"repeats must be at least 1, got {repeats}")
    told = progress or (lambda what, done, total: None)
    with _torch_threads(threads):
        engine = open_engine(backend, device, threads)
        parts = _all_parts(space, engine, told)
        timings = _time_blocks(space, engine, parts, repeats, told)
        table = fill(space, timings, device=engine.device, backend=engine.backend, threads=engine.threads)
        paths = [tuple(path) for path in space.sample(FIT_NETWORKS, stream(0, "latency")).tolist()]
        networks = [_network(space, engine, parts, path) for path in paths]
        measured = quietest(take_turns(networks, repeats, lambda done, total: told("whole networks", done, total)))
        if not measured.all():
            raise GreedyNASError("a network took no time at all: the clock of this machine does not run")
    predicted = np.array([table.price(path, space) for path in paths])
    constant = float(np.median(measured - predicted))
    error = float(np.median(np.abs(predicted + constant - measured) / measured))
    return table.model_copy(update={"constant_ms": constant, "fit": Fit(networks=len(paths), median_error=error)})


def open_engine(backend: str, device: str = "cpu", threads: int = 1) -> Engine:
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if device not in ("cpu", "cuda"):
        raise unknown("device", device, ["cpu", "cuda"])
    if not 1 <= threads <= 1024:
        raise GreedyNASError(f"threads must be from 1 to 1024, got {threads}")
    if device == "cuda" and backend != "torch":
        raise GreedyNASError(f"{backend} is timed on the CPU; for a GPU use --backend torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise GreedyNASError("device is cuda, but PyTorch sees no GPU here; use cpu")
    return TorchEngine(device, threads) if backend == "torch" else OnnxEngine(threads)


class TorchEngine:
    """Plain PyTorch: eager, eval mode, channels last."""

    def __init__(self, device: str, threads: int):
        self._device = torch.device(device)
        self.backend = f"torch {torch.__version__}"
        self.device = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
        self.threads = None if device == "cuda" else threads

    def parts(self, layer: Layer, ops: Sequence[str], activation: str) -> list[nn.Module]:
        blocks = [_block(layer, op, activation) for op in ops]
        return [block.to(self._device, memory_format=torch.channels_last) for block in blocks]  # type: ignore[call-overload]

    def runner(self, parts: Sequence[nn.Module], layer: Layer, side_by_side: bool = False) -> Runner:
        parts = [deepcopy(part) for part in parts]  # weights of their own: shared ones would stay in the cache
        net = _SideBySide(parts) if side_by_side else nn.Sequential(*parts)
        x = _image(layer).to(self._device, memory_format=torch.channels_last)

        @torch.inference_mode()
        def on_cpu() -> float:
            start = time.perf_counter_ns()
            net(x)
            return (time.perf_counter_ns() - start) / 1e6

        @torch.inference_mode()
        def on_cuda() -> float:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            net(x)
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop))

        return on_cuda if self._device.type == "cuda" else on_cpu


class OnnxEngine:
    """ONNX Runtime on the CPU, with all of its graph optimisations."""

    def __init__(self, threads: int):
        import onnxruntime

        self.backend = f"onnxruntime {onnxruntime.__version__}"
        self.device = cpu_name()
        self.threads: int | None = threads

    def parts(self, layer: Layer, ops: Sequence[str], activation: str) -> list["onnx.ModelProto"]:
        """All ops of a layer in one export, which takes seconds whatever is in it, and then apart."""
        from onnx.utils import Extractor

        model = export_onnx(_Together([_block(layer, op, activation) for op in ops]), _image(layer))
        whole = Extractor(model)
        inputs = [value.name for value in model.graph.input]
        return [whole.extract_model(inputs, [output.name]) for output in model.graph.output]

    def runner(self, parts: Sequence["onnx.ModelProto"], layer: Layer, side_by_side: bool = False) -> Runner:
        return onnx_runner(join_onnx(parts, side_by_side), _image(layer), self.threads or 1)


def join_onnx(models: Sequence["onnx.ModelProto"], side_by_side: bool = False) -> "onnx.ModelProto":
    """One graph of several: each fed by the one before, or all by the same input and their outputs added."""
    import onnx

    joined = onnx.ModelProto(ir_version=models[0].ir_version, opset_import=models[0].opset_import)
    graph = joined.graph
    graph.name = "joined"
    source, outputs = "input", []
    for i, model in enumerate(models):
        names = {"": "", model.graph.input[0].name: source}

        def renamed(name: str, i: int = i, names: dict[str, str] = names) -> str:
            return names.setdefault(name, f"{i}/{name}")

        for tensor in model.graph.initializer:
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = renamed(tensor.name)
        for node in model.graph.node:
            graph.node.add().CopyFrom(node)
            graph.node[-1].name = f"{i}/{node.name}"
            graph.node[-1].input[:] = [renamed(name) for name in node.input]
            graph.node[-1].output[:] = [renamed(name) for name in node.output]
        outputs.append(renamed(model.graph.output[0].name))
        source = source if side_by_side else outputs[-1]
    if side_by_side:
        for i, output in enumerate(outputs[1:]):
            total = f"sum {i}"
            graph.node.append(onnx.helper.make_node("Add", [outputs[0] if i == 0 else f"sum {i - 1}", output], [total]))
        outputs = [*outputs, total] if len(models) > 1 else outputs
    graph.input.add().CopyFrom(models[0].graph.input[0])
    graph.input[0].name = "input"
    graph.output.add().CopyFrom(models[-1].graph.output[0])
    graph.output[0].name = outputs[-1]
    return joined


def take_turns(
    runners: Sequence[Runner],
    rounds: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    between: Callable[[], Any] = lambda: None,
) -> NDArray[np.float64]:
    """Medians of RUNS runs, (runners, rounds), in milliseconds; `between` is called before each run."""

    def run(runner: Runner) -> float:
        between()
        return runner()

    medians = np.empty((len(runners), rounds))
    for runner in runners:
        for _ in range(WARMUP):
            runner()
    for turn in range(rounds):
        for i, runner in enumerate(runners):
            medians[i, turn] = statistics.median(run(runner) for _ in range(RUNS))
        progress(turn + 1, rounds)
    return medians


def quietest(medians: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each graph takes when nothing disturbs it."""
    return medians.min(axis=1)


def cpu_name() -> str:
    """The processor, as far as the system tells."""
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        match = None
    name = match[1].strip() if match else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} CPUs"


@contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """A bar for what `measure_latency` does; nothing where the console is no terminal."""
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield tell


def _all_parts(space: Space, engine: Engine, told: Progress) -> dict[Block, Any]:
    """Every distinct block, in the engine's form; those that do nothing are left out."""
    wanted: dict[tuple[int, ...], tuple[Layer, list[str]]] = {}
    for layer in (*fixed_layers(space), *space.layers):
        _, ops = wanted.setdefault(_place(layer), (layer, []))
        ops += [op for op in layer.ops if op not in ops and not layer.is_nothing(op)]
    parts: dict[Block, Any] = {}
    for done, (layer, ops) in enumerate(wanted.values()):
        told("building blocks", done, len(wanted))
        if ops:
            made = engine.parts(layer, ops, space.activation)
            parts |= {Block.of(layer, op): part for op, part in zip(ops, made, strict=True)}
    told("building blocks", len(wanted), len(wanted))
    return parts


def _time_blocks(
    space: Space, engine: Engine, parts: dict[Block, Any], rounds: int, told: Progress
) -> dict[Block, Entry]:
    """What one more of each block adds to a graph."""
    places = {_place(layer): layer for layer in (*fixed_layers(space), *space.layers)}
    runners: list[Runner] = []
    for block, part in parts.items():
        layer = places[block.in_channels, block.out_channels, block.stride, block.in_size]
        runners.append(engine.runner([part], layer))
        runners.append(engine.runner([part] * COPIES, layer, side_by_side=not block.keeps_shape or block.op == "FC"))
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


def _network(space: Space, engine: Engine, parts: dict[Block, Any], path: Sequence[int]) -> Runner:
    *stem_and_head, classifier = fixed_layers(space)
    stem, head = stem_and_head[: len(space.stem)], stem_and_head[len(space.stem) :]
    chosen = [(layer, layer.ops[op]) for layer, op in zip(space.layers, path, strict=True)]
    chosen = [(layer, op) for layer, op in chosen if not layer.is_nothing(op)]
    ends = [[(layer, layer.ops[0]) for layer in layers] for layers in (stem, [*head, classifier])]
    return engine.runner([parts[Block.of(layer, op)] for layer, op in (*ends[0], *chosen, *ends[1])], stem[0])


def _mean_params(space: Space) -> float:
    table = space.cost_tables["params"]
    return table.fixed + sum(float(table.cells(layer).mean()) for layer in range(len(space.layers)))


def _place(layer: Layer) -> tuple[int, int, int, int]:
    return layer.in_channels, layer.out_channels, layer.stride, layer.in_size


def _image(layer: Layer) -> Tensor:
    shape = (1, layer.in_channels, layer.in_size, layer.in_size)
    return torch.randn(shape, generator=torch_stream(0, "latency"))


def _block(layer: Layer, op: str, activation: str) -> nn.Module:
    block = _Classifier(layer) if op == "FC" else make_block(op, layer, activation)
    initialise(block, torch_stream(0, "latency"))
    return block.eval()


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Classifier(nn.Module):
    """Pooling and the linear layer, as in `Network`."""

    def __init__(self, layer: Layer):
        super().__init__()
        self.linear = nn.Linear(layer.in_channels, layer.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


class _Together(nn.Module):
    """Several blocks on one input, each with its own output."""

    def __init__(self, blocks: Sequence[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(block(x) for block in self.blocks)


class _SideBySide(nn.Module):
    """The sum of several blocks on one input."""

    def __init__(self, blocks: Sequence[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (block(x) for block in self.blocks)
        for other in others:
            first = first + other
        return first
