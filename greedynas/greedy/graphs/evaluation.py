"""Evaluation of paths on small images on a GPU, by replay of CUDA graphs (see `graphs.py` for training)."""

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

FEW_PATHS = 8  # fewer, counted over all calls, are evaluated before they are recorded
FEW_SUBTREES = 8  # fewer in one chunk are walked path by path
MOST_CLASSES = 2048  # for which the kernel of the scores has room

Stage = tuple[Tensor, Tensor | None]  # evaluated images and, in mode recalibrate, those of the statistics


class GraphedEvaluation:
    """Forward evaluation of paths on chunks of one shape: walks the prefix tree as `evaluation` does, by replay."""

    def __init__(
        self, net: Supernet, images: Tensor, labels: Tensor, calibration: Tensor | None, bn: str, precision: str
    ):
        # The net itself is not kept: it keeps its recordings (see `recorded_evaluation`), and they end with it.
        self.bn, self.half = bn, precision == "bf16"
        self.images, self.labels = images.clone(), labels.clone()
        self.calibration = None if calibration is None else calibration.clone()
        self.classifier = net.classifier.weight.detach(), net.classifier.bias.detach()
        self.casts = Casts(net) if self.half else None
        self.buffers: list[Tensor] = []  # the statistics that recalibration writes live as long as what writes them
        self.pool = recording.new_pool()
        self.subtrees: dict[int, Subtree] = {}  # by where the first of their blocks is
        with self._conditions(net):
            self.refresh = recording.recorded(self.casts.refresh, self.pool) if self.casts is not None else None
            self._record(net)
        torch.cuda.empty_cache()  # of what was warmed up

    @contextmanager
    def _conditions(self, net: Supernet) -> Iterator[None]:
        """What holds when something is recorded."""
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
            # With calibration images a block runs twice, and where it writes is not a single place.
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
        """Those of these families that are not there yet: more than one where the last two layers have blocks for an identity
        before them."""
        for first in {net.places(family[0])[-2] for family in families} - self.subtrees.keys():
            self.subtrees[first] = self._record_subtree(net, first)

    def _record_subtree(self, net: Supernet, first: int) -> "Subtree":
        """All ops of the last two layers behind the input of the first of them, branch beside branch. Where that layer's blocks
        for them begin is `first`."""
        ops, leaves = net.space.num_ops[-2:]
        scores = Scores.empty(ops * leaves, len(self.labels), self.images.device)

        def branch(op: int) -> None:
            stage = run_block(net.layers[-2][first + op], *self.boundaries[-2])  # type: ignore[index]
            for leaf in range(leaves):
                block = net.layers[-1][net.place(-1, leaf, op)]  # type: ignore[index]
                self._classify(net, block, stage, op * leaves + leaf, scores)

        branches = [partial(branch, op) for op in range(ops)]
        # Recalibration goes through statistics that all branches share: they take turns.
        work = recording.in_turn(branches) if self.calibration is not None else recording.side_by_side(branches)
        with self._conditions(net):
            graph = recording.recorded(work)
        torch.cuda.empty_cache()
        return Subtree(graph, scores)

    def _classify(self, net: Supernet, block: nn.Module, stage: Stage, row: int, into: "Scores") -> None:
        """The last layer, the head and what the labels say."""
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
        """Summed losses (paths,) and which images are right (paths, images) of sorted, distinct paths."""
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
        for family, all_there in zip(families, whole, strict=True):
            path = net.places(family[0])
            if all_there and path[-2] in self.subtrees:
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
    """Whether paths that differ in their last two layers at most are all that there are of them."""
    return len(space.layers) > 1 and len(family) == math.prod(space.num_ops[-2:])


@dataclass
class Scores:
    """Of several paths on a chunk of images. Rows begin at addresses that are multiples of 16."""

    losses: Tensor  # (paths, parts): sums over every 16 images
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
