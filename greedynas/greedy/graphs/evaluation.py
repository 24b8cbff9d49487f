"""The evaluation of paths on small images on a GPU, by replaying CUDA graphs (see `training.py` for training)."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from greedynas.gpu import recording
from greedynas.gpu.recording import Casts, Graph, bring, writing
from greedynas.models.batchnorm import bn_mode, pooled, run_block
from greedynas.models.supernet import Supernet
from greedynas.spaces.paths import OpPath
from greedynas.spaces.space import Space

FEW_PATHS = 8  # recording begins when this number of paths, counted over all calls, has been evaluated
FEW_SUBTREES = 8  # fewer subtrees in one chunk are evaluated path by path
MOST_CLASSES = 2048  # the limit of the kernel of the scores

Stage = tuple[Tensor, Tensor | None]  # evaluated images and, in mode recalibrate, calibration images


class GraphedEvaluation:
    """A recorded evaluation of paths on chunks of one shape, which walks the prefix tree as `evaluation` does."""

    def __init__(
        self, net: Supernet, images: Tensor, labels: Tensor, calibration: Tensor | None, bn: str, precision: str
    ):
        # The net is not kept here: it keeps its recordings (see `recorded_evaluation`), which are freed with it.
        self.bn, self.half = bn, precision == "bf16"
        self.images, self.labels = images.clone(), labels.clone()
        self.calibration = None if calibration is None else calibration.clone()
        self.classifier = net.classifier.weight.detach(), net.classifier.bias.detach()
        self.casts = Casts(net) if self.half else None
        self.buffers: list[Tensor] = []  # the statistics that recalibration writes must live as long as the graphs
        self.pool = recording.new_pool()
        self.subtrees: dict[int, Subtree] = {}  # by the index of the first of their blocks
        with self._conditions(net):
            self.refresh = recording.recorded(self.casts.refresh, self.pool) if self.casts is not None else None
            self._record(net)
        torch.cuda.empty_cache()  # memory of the warm-up

    @contextmanager
    def _conditions(self, net: Supernet) -> Iterator[None]:
        """Set up the BatchNorm mode and the precision in which graphs are recorded."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            self.buffers += stack.enter_context(bn_mode(net, self.bn))
            if self.casts is not None:
                stack.enter_context(torch.autocast("cuda", torch.bfloat16, cache_enabled=False))
                stack.enter_context(self.casts.attached())
            yield

    def _record(self, net: Supernet) -> None:
        stage = (self.images, self.calibration)
        self.boundaries: list[Stage] = []  # the input of every layer
        blocks = [net.stem, *net.blocks([0] * len(net.space.layers))]
        for block in blocks[:-1]:
            stage = run_block(block, *stage)
            self.boundaries.append(tuple(None if x is None else torch.empty_like(x) for x in stage))  # type: ignore[arg-type]

        def record(block: nn.Module, source: Stage, target: Stage) -> Graph:
            # With calibration images a block runs twice, so it cannot write to a single buffer.
            def work() -> None:
                with nullcontext() if target[1] is not None else writing(block, out=target[0]):
                    results = run_block(block, *source)
                for result, out in zip(results, target, strict=True):
                    if out is not None and result is not None:
                        bring(result, out)

            return recording.recorded(work, self.pool)

        *layers, last = net.layers
        self.stem = record(net.stem, (self.images, self.calibration), self.boundaries[0])
        self.layers = [
            [record(block, self.boundaries[i], self.boundaries[i + 1]) for block in ops]  # type: ignore[attr-defined]
            for i, ops in enumerate(layers)
        ]
        self.scores = Scores.empty(1, len(self.labels), self.images.device)
        self.last = [
            recording.recorded(partial(self._classify, net, block, self.boundaries[-1], 0, self.scores), self.pool)
            for block in last  # type: ignore[attr-defined]
        ]

    def _record_subtrees(self, net: Supernet, families: Iterable[Sequence[OpPath]]) -> None:
        """Record the subtrees of these families that are not recorded yet.

        There are several if the last two layers have separate blocks behind an identity.
        """
        for first in {net.places(family[0])[-2] for family in families} - self.subtrees.keys():
            self.subtrees[first] = self._record_subtree(net, first)

    def _record_subtree(self, net: Supernet, first: int) -> "Subtree":
        """Record all ops of the last two layers as parallel branches.

        The blocks of the last layer but one are those from index `first` on.
        """
        ops, leaves = net.space.num_ops[-2:]
        scores = Scores.empty(ops * leaves, len(self.labels), self.images.device)

        def branch(op: int) -> None:
            stage = run_block(net.layers[-2][first + op], *self.boundaries[-2])  # type: ignore[index]
            for leaf in range(leaves):
                block = net.layers[-1][net.place(-1, leaf, op)]  # type: ignore[index]
                self._classify(net, block, stage, op * leaves + leaf, scores)

        branches = [partial(branch, op) for op in range(ops)]
        # Recalibration uses statistics that all branches share, so they run one after the other.
        work = recording.in_turn(branches) if self.calibration is not None else recording.side_by_side(branches)
        with self._conditions(net):
            graph = recording.recorded(work)
        torch.cuda.empty_cache()
        return Subtree(graph, scores)

    def _classify(self, net: Supernet, block: nn.Module, stage: Stage, row: int, into: "Scores") -> None:
        """Run the last layer and the head, and write losses and correct predictions to a row of `into`."""
        from greedynas.gpu.kernels.small import scores

        features = pooled(net, *run_block(block, *stage)).float()
        scores(features, *self.classifier, self.labels, into.losses[row, : into.parts], into.rights[row], self.half)

    def __call__(
        self,
        net: Supernet,
        distinct: Sequence[OpPath],
        shared: Sequence[int],
        images: Tensor,
        labels: Tensor,
        calibration: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return summed losses (paths,) and correctly classified images (paths, images) of sorted, distinct paths."""
        self.images.copy_(images)
        self.labels.copy_(labels)
        if self.calibration is not None and calibration is not None:
            self.calibration.copy_(calibration)
        if self.refresh is not None:
            self.refresh.replay()
        self.stem.replay()
        found = Scores.empty(len(distinct), len(labels), images.device)
        families = [list(family) for _, family in itertools.groupby(distinct, lambda path: path[:-2])]
        whole = [is_whole(family, net.space) for family in families]
        if sum(whole) >= FEW_SUBTREES:
            self._record_subtrees(net, itertools.compress(families, whole))
        row = 0
        for family, complete in zip(families, whole, strict=True):
            path = net.places(family[0])
            if complete and path[-2] in self.subtrees:
                subtree = self.subtrees[path[-2]]
                self._replay_layers(path[:-2], shared[row])
                subtree.graph.replay()
                found.take(row, subtree.scores)
                row += len(family)
                continue
            for path in map(net.places, family):
                self._replay_layers(path[:-1], shared[row])
                self.last[path[-1]].replay()
                found.take(row, self.scores)
                row += 1
        return found.losses[:, : found.parts].sum(1), found.rights[:, : len(labels)].view(torch.bool)

    def _replay_layers(self, ops: OpPath, known: int) -> None:
        for layer, op in zip(self.layers[known : len(ops)], ops[known:], strict=True):
            layer[op].replay()


def is_whole(family: Sequence[OpPath], space: Space) -> bool:
    """Return whether some paths that agree in all but their last two layers are all such paths of the space."""
    return len(space.layers) > 1 and len(family) == math.prod(space.num_ops[-2:])


@dataclass
class Scores:
    """The losses and the correct predictions of several paths on a chunk. Rows are aligned to 16 bytes."""

    losses: Tensor  # (paths, parts): sums over groups of 16 images
    rights: Tensor  # (paths, images), int8
    parts: int

    @classmethod
    def empty(cls, paths: int, images: int, device: torch.device) -> "Scores":
        parts = -(-images // 16)
        losses = torch.empty((paths, -(-parts // 4) * 4), device=device)
        return cls(losses, torch.empty((paths, -(-images // 16) * 16), dtype=torch.int8, device=device), parts)

    def take(self, row: int, others: "Scores") -> None:
        self.losses[row : row + len(others.losses)].copy_(others.losses)
        self.rights[row : row + len(others.rights)].copy_(others.rights)


@dataclass
class Subtree:
    graph: Graph
    scores: Scores


_evaluations: "WeakKeyDictionary[Supernet, dict[Any, GraphedEvaluation | int]]" = WeakKeyDictionary()


def recorded_evaluation(
    net: Supernet,
    paths: int,
    images: Tensor,
    labels: Tensor,
    calibration: Tensor | None,
    bn: str,
    precision: str,
) -> GraphedEvaluation | None:
    """Return the recording for chunks of this shape, or None if recording is not worthwhile (yet)."""
    if not net.recordable or not recording.worth_recording(images) or net.space.num_classes > MOST_CLASSES:
        return None
    weights = next(net.parameters()).data_ptr()  # a net whose weights were moved is recorded again
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
