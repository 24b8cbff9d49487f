"""Evaluation of paths on small images on a GPU, by replay of CUDA graphs (see `graphs.py` for training)."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from greedynas.evaluation import BNMode, bn_mode, pooled, run_block
from greedynas.gpu import recording
from greedynas.gpu.recording import Casts, Graph, bring, writing
from greedynas.paths import OpPath
from greedynas.supernet import Supernet

FEW_PATHS = 8  # fewer, counted over all calls, are evaluated before they are recorded
MOST_CLASSES = 2048  # for which the kernel of the scores has room


class GraphedEvaluation:
    """Forward evaluation of paths on chunks of one shape: walks the prefix tree as `evaluation` does, by replay."""

    def __init__(
        self, net: Supernet, images: Tensor, labels: Tensor, calibration: Tensor | None, bn: BNMode, precision: str
    ):
        # The net itself is not kept: it keeps its recordings (see `recorded_evaluation`), and they end with it.
        self.images, self.labels = images.clone(), labels.clone()
        self.calibration = None if calibration is None else calibration.clone()
        self.classifier = net.classifier.weight.detach(), net.classifier.bias.detach()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            # The statistics that recalibration writes must live as long as the graphs that write them.
            self.buffers = stack.enter_context(bn_mode(net, bn))
            pool = recording.new_pool()
            if precision == "bf16":
                stack.enter_context(torch.autocast("cuda", torch.bfloat16, cache_enabled=False))
                self.casts = Casts(net)
                stack.enter_context(self.casts.attached())
            self.refresh = recording.recorded(self.casts.refresh, pool) if precision == "bf16" else None
            self._record(net, pool)

    def _record(self, net: Supernet, pool: Any) -> None:
        stage = (self.images, self.calibration)
        self.boundaries: list[tuple[Tensor, Tensor | None]] = []
        blocks = [net.stem, *net.blocks([0] * len(net.space.layers))]
        for block in blocks[:-1]:
            stage = run_block(block, *stage)
            self.boundaries.append(tuple(None if x is None else torch.empty_like(x) for x in stage))  # type: ignore[arg-type]

        def record(block: nn.Module, source: tuple[Tensor, Tensor | None], target: tuple[Tensor, Tensor | None]) -> Any:
            # With calibration images a block runs twice, and where it writes is not a single place.
            def work() -> None:
                with nullcontext() if target[1] is not None else writing(block, out=target[0]):
                    results = run_block(block, *source)
                for result, out in zip(results, target, strict=True):
                    if out is not None and result is not None:
                        bring(result, out)

            return recording.recorded(work, pool)

        def record_last(block: nn.Module, stream: Any) -> tuple[Graph, list[Tensor]]:
            """Up to what the classifier sees, which is kept."""
            features: list[Tensor] = []

            def work() -> None:
                features[:] = [pooled(net, *run_block(block, *self.boundaries[-1])).float()]

            return recording.recorded(work, stream=stream), features  # with memory of its own, too

        self.stem = record(net.stem, (self.images, self.calibration), self.boundaries[0])
        *layers, last = net.layers
        self.layers = [
            [record(block, self.boundaries[i], self.boundaries[i + 1]) for block in ops]  # type: ignore[attr-defined]
            for i, ops in enumerate(layers)
        ]
        # Siblings run side by side.
        self.streams = [torch.cuda.Stream() for _ in last]  # type: ignore[attr-defined]
        self.last = [record_last(block, beside) for block, beside in zip(last, self.streams, strict=True)]  # type: ignore[call-overload]

    def __call__(
        self,
        distinct: Sequence[OpPath],
        shared: Sequence[int],
        images: Tensor,
        labels: Tensor,
        calibration: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Summed losses (paths,) and which images are right (paths, images) of sorted, distinct paths."""
        from greedynas.gpu.small import scores

        self.images.copy_(images)
        self.labels.copy_(labels)
        if self.calibration is not None and calibration is not None:
            self.calibration.copy_(calibration)
        count, parts = len(labels), -(-len(labels) // 16)
        # Rows begin at addresses that are multiples of 16.
        losses = torch.empty((len(distinct), -(-parts // 4) * 4), device=images.device)
        rights = torch.empty((len(distinct), -(-count // 16) * 16), dtype=torch.int8, device=images.device)
        if self.refresh is not None:
            self.refresh.replay()
        self.stem.replay()
        for i, (path, known) in enumerate(zip(distinct, shared, strict=True)):
            if known < len(self.layers):  # siblings, which differ in the last layer alone, run side by side
                self._join()
                for layer, op in zip(self.layers[known:], path[known:-1], strict=True):
                    layer[op].replay()
                self._fork()
            graph, features = self.last[path[-1]]
            with self._beside(path[-1]):
                graph.replay()
                scores(
                    features[0], *self.classifier, self.labels, losses[i, :parts], rights[i], self.refresh is not None
                )
        self._join()
        return losses[:, :parts].sum(1), rights[:, :count].view(torch.bool)

    def _fork(self) -> None:
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())

    def _join(self) -> None:
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _beside(self, op: int) -> Any:
        return torch.cuda.stream(self.streams[op])


_evaluations: "WeakKeyDictionary[Supernet, dict[Any, GraphedEvaluation | int]]" = WeakKeyDictionary()


def recorded_evaluation(
    net: Supernet,
    paths: int,
    images: Tensor,
    labels: Tensor,
    calibration: Tensor | None,
    bn: BNMode,
    precision: str,
) -> GraphedEvaluation | None:
    """The recording for chunks of this shape; None where replaying does not pay yet."""
    if not recording.worth_recording(images) or net.space.num_classes > MOST_CLASSES:
        return None
    weights = next(net.parameters()).data_ptr()  # a net that moved is recorded anew
    key = (images.shape, None if calibration is None else calibration.shape, bn, precision, weights)
    known = _evaluations.setdefault(net, {})
    found = known.get(key, 0)
    if isinstance(found, GraphedEvaluation):
        return found
    if found + paths < FEW_PATHS:
        known[key] = found + paths
        return None
    known[key] = recorded = GraphedEvaluation(net, images, labels, calibration, bn, precision)
    return recorded
