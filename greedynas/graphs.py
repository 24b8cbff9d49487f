"""Small images on a GPU: the kernels are so short that launching them from Python takes longer than running them.

So every block is recorded once as CUDA graphs, forward and backward with the update of its weights. A training step is then
some twenty replays, whatever the path: blocks of neighbouring layers meet in buffers that all ops of a layer share. The
parameters and the optimizer's momentum are the ones of the plain loop, changed in place.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greedynas import engine
from greedynas.config import TrainSettings
from greedynas.evaluation import BNMode, autocast, bn_mode, full_precision, run_block
from greedynas.paths import OpPath
from greedynas.supernet import Supernet

SMALL = 64  # pixels; larger images keep the GPU busy by themselves
FEW_PATHS = 8  # fewer are evaluated before they are recorded
WARM_UPS = 2  # before recording: libraries choose their algorithms and take their workspaces on the first calls


def worth_recording(images: Tensor) -> bool:
    return images.device.type == "cuda" and images.shape[-1] <= SMALL and engine.mode() != "off"


class GraphedTraining:
    """Training steps on batches of one shape: what `training.train_step` does, by replay."""

    def __init__(
        self,
        net: Supernet,
        optimizer: torch.optim.Optimizer,
        images: Tensor,
        labels: Tensor,
        settings: TrainSettings,
        class_weights: Tensor | None,
        precision: str,
    ):
        self.net, self.settings, self.class_weights, self.precision = net, settings, class_weights, precision
        self.images, self.labels = images.clone(), labels.clone()
        device = images.device
        self.lr, self.loss = torch.zeros((), device=device), torch.zeros((), device=device)
        self.decays: dict[Tensor, float] = {
            p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
        }
        # SGD begins with the gradient itself as momentum, which is what zeros lead to.
        self.momenta: dict[Tensor, Tensor] = {
            p: optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in net.parameters()
        }
        ends = [*net.stem.parameters(), *net.head.parameters(), *net.classifier.parameters()]
        self.sums: dict[Tensor, Tensor] = {
            p: torch.zeros_like(p) for p in ends
        }  # trained by every path of a `fair` update
        example = torch.zeros(1, device=device)  # the update's kernel is loaded before it is recorded
        self.momenta[example], self.decays[example] = example.clone(), 0.0
        self._update([example], [example.clone()])
        with _unchanged(net):
            self._allocate_boundaries()
            self._record()

    def __call__(self, images: Tensor, labels: Tensor, paths: Sequence[OpPath], lr: float) -> Tensor:
        """One update; returns the mean loss over the paths."""
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.lr.fill_(lr)
        losses = []
        for path in paths:
            self.stem[0].replay()
            for layer, op in zip(self.layers, path, strict=True):
                layer[op][0].replay()
            self.head.replay()
            losses.append(self.loss.clone())
            for layer, op in zip(reversed(self.layers), reversed(path), strict=True):
                layer[op][1].replay()
            self.stem[1].replay()
        self.update.replay()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _allocate_boundaries(self) -> None:
        """The input of every layer and of the head, and the gradient of the loss by it."""
        x, self.inputs = self.images, []
        with torch.no_grad(), self._autocast():
            for block in (self.net.stem, *self.net.blocks([0] * len(self.net.space.layers))):
                x = block(x)
                self.inputs.append(torch.empty_like(x, memory_format=torch.channels_last))
        self.grads = [torch.empty_like(x) for x in self.inputs]

    def _record(self) -> None:
        net, last = self.net, len(self.net.space.layers)
        self.stem = self._record_block(net.stem, None, self.inputs[0], self.grads[0], None, None)
        self.layers: list[list[tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]]] = []
        for i, ops in enumerate(net.layers):
            # Of a layer's ops one is active in a step: they share the memory of their activations.
            pool = torch.cuda.graph_pool_handle()
            ends = (self.inputs[i], self.inputs[i + 1], self.grads[i + 1], self.grads[i])
            self.layers.append([self._record_block(block, *ends, pool) for block in ops])  # type: ignore[attr-defined]
        leaf = self.inputs[last].detach().requires_grad_()
        parameters = [*net.head.parameters(), *net.classifier.parameters()]

        def classify() -> None:
            with self._autocast():
                logits = net.classify(leaf)
            weights, smoothing = self.class_weights, self.settings.label_smoothing
            loss = F.cross_entropy(full_precision(logits), self.labels, weights, label_smoothing=smoothing)
            self.loss.copy_(loss.detach())
            grads = torch.autograd.grad(loss, [leaf, *parameters])
            self.grads[last].copy_(grads[0])
            self._add_up(parameters, grads[1:])

        self.head = _recorded(classify)
        for total in self.sums.values():  # recording ran them a few times
            total.zero_()
        self.update = _recorded(self._update_ends, warm_up=False)

    def _record_block(
        self,
        block: Any,
        x: Tensor | None,
        out: Tensor,
        grad_out: Tensor,
        grad_in: Tensor | None,
        pool: Any,
    ) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        """(forward, backward and update). Without an input of its own it is the stem, which reads the images."""
        leaf = self.images if x is None else x.detach().requires_grad_()
        parameters = list(block.parameters())
        wanted = parameters if x is None else [leaf, *parameters]

        def forward() -> Tensor:
            with self._autocast():
                result: Tensor = block(leaf)
            out.copy_(result.detach())
            return result

        def backward(result: Tensor, train: bool = True) -> None:
            grads = torch.autograd.grad(result, wanted, grad_out)
            if grad_in is not None:
                grad_in.copy_(grads[0])
                grads = grads[1:]
            if x is None:
                self._add_up(parameters, grads)
            elif train:
                self._update(parameters, grads)

        _warm_up(lambda: backward(forward(), train=False))
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        with torch.cuda.graph(graphs[0], pool=pool):
            result = forward()
        with torch.cuda.graph(graphs[1], pool=pool):
            backward(result)
        return graphs

    def _autocast(self) -> Any:
        # A cached cast would be recorded in one graph and missing in the others.
        if self.precision == "bf16":
            return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
        return autocast(self.images.device, self.precision)

    def _add_up(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        laid_out = [_laid_out(grad, p) for grad, p in zip(grads, parameters, strict=True)]
        torch._foreach_add_([self.sums[p] for p in parameters], laid_out)

    def _update_ends(self) -> None:
        parameters, sums = list(self.sums), list(self.sums.values())
        self._update(parameters, sums)
        torch._foreach_zero_(sums)

    def _update(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """SGD with Nesterov momentum in place, one kernel for each weight decay."""
        momentum = self.settings.momentum
        for decay in {self.decays[p] for p in parameters}:
            chosen = [(p, _laid_out(g, p)) for p, g in zip(parameters, grads, strict=True) if self.decays[p] == decay]
            with torch.no_grad():
                torch._fused_sgd_(
                    [p for p, _ in chosen],
                    [g for _, g in chosen],
                    [self.momenta[p] for p, _ in chosen],
                    weight_decay=decay,
                    momentum=momentum,
                    lr=self.lr,
                    dampening=0.0,
                    nesterov=momentum > 0,
                    maximize=False,
                    is_first_step=False,
                )


class GraphedEvaluation:
    """Forward evaluation of paths on chunks of one shape: walks the prefix tree as `evaluation` does, by replay."""

    def __init__(
        self, net: Supernet, images: Tensor, labels: Tensor, calibration: Tensor | None, bn: BNMode, precision: str
    ):
        # The net itself is not kept: it keeps its recordings (see `recorded_evaluation`), and they end with it.
        self.images, self.labels = images.clone(), labels.clone()
        self.calibration = None if calibration is None else calibration.clone()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            # The statistics that recalibration writes must live as long as the graphs that write them.
            self.buffers = stack.enter_context(bn_mode(net, bn))
            if precision == "bf16":
                stack.enter_context(torch.autocast("cuda", torch.bfloat16, cache_enabled=False))
            self._record(net)

    def _record(self, net: Supernet) -> None:
        pool = torch.cuda.graph_pool_handle()
        stage = (self.images, self.calibration)
        self.boundaries: list[tuple[Tensor, Tensor | None]] = []
        blocks = [net.stem, *net.blocks([0] * len(net.space.layers))]
        for block in blocks:
            stage = run_block(block, *stage)
            self.boundaries.append(tuple(None if x is None else torch.empty_like(x) for x in stage))  # type: ignore[arg-type]

        def record(block: nn.Module, source: tuple[Tensor, Tensor | None], target: tuple[Tensor, Tensor | None]) -> Any:
            def work() -> None:
                for result, out in zip(run_block(block, *source), target, strict=True):
                    if out is not None and result is not None:
                        out.copy_(result)

            return _recorded(work, pool=pool)

        self.stem = record(net.stem, (self.images, self.calibration), self.boundaries[0])
        self.layers = [
            [record(block, self.boundaries[i], self.boundaries[i + 1]) for block in ops]  # type: ignore[attr-defined]
            for i, ops in enumerate(net.layers)
        ]
        self.loss = torch.zeros((), device=self.images.device)
        self.right = torch.zeros(len(self.labels), dtype=torch.bool, device=self.images.device)

        def classify() -> None:
            features, _ = run_block(net.head, *self.boundaries[-1])
            logits = net.classifier(features.mean((2, 3)))
            self.loss.copy_(F.cross_entropy(full_precision(logits), self.labels, reduction="sum"))
            self.right.copy_(logits.argmax(1) == self.labels)

        self.head = _recorded(classify, pool=pool)

    def __call__(
        self,
        distinct: Sequence[OpPath],
        shared: Sequence[int],
        images: Tensor,
        labels: Tensor,
        calibration: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Summed losses (paths,) and which images are right (paths, images) of sorted, distinct paths."""
        self.images.copy_(images)
        self.labels.copy_(labels)
        if self.calibration is not None and calibration is not None:
            self.calibration.copy_(calibration)
        losses = torch.empty(len(distinct), device=images.device)
        rights = torch.empty(len(distinct), len(labels), dtype=torch.bool, device=images.device)
        self.stem.replay()
        for i, (path, known) in enumerate(zip(distinct, shared, strict=True)):
            for layer, op in zip(self.layers[known:], path[known:], strict=True):
                layer[op].replay()
            self.head.replay()
            losses[i].copy_(self.loss)
            rights[i].copy_(self.right)
        return losses, rights


_evaluations: "WeakKeyDictionary[Supernet, dict[Any, GraphedEvaluation]]" = WeakKeyDictionary()


def recorded_evaluation(
    net: Supernet,
    paths: int,
    images: Tensor,
    labels: Tensor,
    calibration: Tensor | None,
    bn: BNMode,
    precision: str,
) -> GraphedEvaluation | None:
    """The recording for chunks of this shape; None where replaying does not pay."""
    if not worth_recording(images):
        return None
    weights = next(net.parameters()).data_ptr()  # a net that moved is recorded anew
    key = (images.shape, None if calibration is None else calibration.shape, bn, precision, weights)
    known = _evaluations.setdefault(net, {})
    if key not in known and paths >= FEW_PATHS:
        known[key] = GraphedEvaluation(net, images, labels, calibration, bn, precision)
    return known.get(key)


def _recorded(work: Callable[[], None], pool: Any = None, warm_up: bool = True) -> torch.cuda.CUDAGraph:
    if warm_up:
        _warm_up(work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


def _warm_up(work: Callable[[], Any]) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)


class _unchanged:
    """Whatever is run inside, parameters and buffers are afterwards what they were, in the same memory."""

    def __init__(self, net: nn.Module):
        self.tensors = list(net.state_dict(keep_vars=True).values())

    def __enter__(self) -> None:
        self.kept = [tensor.detach().clone() for tensor in self.tensors]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for tensor, kept in zip(self.tensors, self.kept, strict=True):
                tensor.copy_(kept)


def _laid_out(grad: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the memory layout of its parameter: the fused update walks both as flat memory."""
    return grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)
