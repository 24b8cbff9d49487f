"""Training on small images on a GPU, by replaying CUDA graphs.

Every block is recorded once: a forward graph, and a backward graph that also updates its weights. A training step is
then some twenty replays, whatever the path, because all ops of a layer read from and write to the same buffers. The
parameters and the optimizer's momentum are those of the plain loop, changed in place.
"""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from greedynas.gpu import recording
from greedynas.gpu.recording import Casts, Graph, bring, writing
from greedynas.greedy.settings import TrainSettings
from greedynas.models.losses import classification_loss
from greedynas.models.supernet import Supernet
from greedynas.runtime.devices import autocast, full_precision
from greedynas.spaces.paths import OpPath


class GraphedTraining:
    """Recorded training steps on batches of one shape, which do the same as `steps.train_step`."""

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
        # SGD starts with the gradient as momentum, which is the same as starting with zeros.
        self.momenta: dict[Tensor, Tensor] = {
            p: optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in net.parameters()
        }
        # Stem, head and classifier are trained by every path of a `fair` update, and updated after the last path.
        self.sums: dict[Tensor, Tensor] = {}
        if settings.sampler == "fair":
            ends = [*net.stem.parameters(), *net.head.parameters(), *net.classifier.parameters()]
            self.sums = {p: torch.zeros_like(p) for p in ends}
        self.casts = Casts(net) if precision == "bf16" else None
        self.trainers: list[_Trainer] = []
        with _unchanged(net), self.casts.attached() if self.casts is not None else ExitStack():
            self._allocate_boundaries()
            self._record()
        torch.cuda.empty_cache()  # memory of the warm-up

    def __call__(self, images: Tensor, labels: Tensor, paths: Sequence[OpPath], lr: float) -> Tensor:
        """Train the paths with one update and return their mean loss."""
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.lr.fill_(lr)
        losses = []
        for path in map(self.net.places, paths):
            self.stem[0].replay()
            for layer, op in zip(self.layers, path, strict=True):
                layer[op][0].replay()
            self.head.replay()
            losses.append(self.loss.clone())
            for layer, op in zip(reversed(self.layers), reversed(path), strict=True):
                layer[op][1].replay()
            self.stem[1].replay()
        if self.sums:
            self.update.replay()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def refresh(self) -> None:
        """Update the bf16 copies of the parameters after these were changed outside of the recorded steps."""
        if self.casts is not None:
            self.casts.refresh()

    def _allocate_boundaries(self) -> None:
        """Allocate the input of every layer and of the head, and the gradients with respect to these."""
        x, self.inputs = self.images, []
        with torch.no_grad(), self._autocast():
            for block in (self.net.stem, *self.net.blocks([0] * len(self.net.space.layers))):
                x = block(x)
                self.inputs.append(torch.empty_like(x, memory_format=torch.channels_last))
        self.grads = [torch.empty_like(x) for x in self.inputs]

    def _record(self) -> None:
        net, last = self.net, len(self.net.space.layers)
        self.stem = self._record_block(net.stem, None, self.inputs[0], self.grads[0], None, None)
        self.layers: list[list[tuple[Graph, Graph]]] = []
        for i, ops in enumerate(net.layers):
            # Only one op of a layer is active in a step, so they share the memory of their activations.
            pool = recording.new_pool()
            ends = (self.inputs[i], self.inputs[i + 1], self.grads[i + 1], self.grads[i])
            self.layers.append([self._record_block(block, *ends, pool) for block in ops])  # type: ignore[attr-defined]
        leaf = self.inputs[last].detach().requires_grad_()
        train = self._trainer([*net.head.parameters(), *net.classifier.parameters()])

        def classify() -> None:
            with self._autocast():
                logits = net.classify(leaf)
            weights, smoothing = self.class_weights, self.settings.label_smoothing
            loss = classification_loss(full_precision(logits), self.labels, weights, smoothing)
            self.loss.copy_(loss.detach())
            grads = torch.autograd.grad(loss, [leaf, *train.parameters])
            self.grads[last].copy_(grads[0])
            train(grads[1:])

        self.head = recording.recorded(classify)
        train.begin()
        if self.sums:
            totals, update = list(self.sums.values()), self._trainer(list(self.sums), at_once=True)

            def update_ends() -> None:
                update(totals)
                torch._foreach_zero_(totals)

            self.update = recording.recorded(update_ends)
            update.begin()

    def _record_block(
        self, block: Any, x: Tensor | None, out: Tensor, grad_out: Tensor, grad_in: Tensor | None, pool: Any
    ) -> tuple[Graph, Graph]:
        """Return a block's graphs: forward, and backward with the update. `x` is None for the stem."""
        leaf = self.images if x is None else x.detach().requires_grad_()
        train = self._trainer(list(block.parameters()))
        wanted = train.parameters if x is None else [leaf, *train.parameters]
        results: list[Tensor] = []

        def forward() -> None:
            with self._autocast(), writing(block, out=out):
                results.append(block(leaf))
            bring(results[0].detach(), out)

        def backward() -> None:
            with nullcontext() if grad_in is None else writing(block, gradient=grad_in):
                grads = torch.autograd.grad(results.pop(), wanted, grad_out)
            if grad_in is not None:
                bring(grads[0], grad_in)
                grads = grads[1:]
            train(grads)

        def both() -> None:
            forward()
            backward()

        recording.warm_up(both)
        pool = recording.new_pool() if pool is None else pool
        graphs = recording.captured(forward, pool), recording.captured(backward, pool)
        train.begin()
        return graphs

    def _autocast(self) -> Any:
        # A cached cast would be recorded in one graph and missing in the others.
        if self.precision == "bf16":
            return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
        return autocast(self.images.device, self.precision)

    def _trainer(self, parameters: list[Tensor], at_once: bool = False) -> "_Trainer":
        from greedynas.gpu.kernels.small import Update

        casts = self.casts.of if self.casts is not None else {}
        update = Update(
            parameters,
            [self.momenta[p] for p in parameters],
            [self.decays[p] for p in parameters],
            [casts.get(p) for p in parameters],
            self.settings.momentum,
            self.lr,
        )
        later = {} if at_once else {p: self.sums[p] for p in parameters if p in self.sums}
        # Kept alive, because the recorded graph reads the table of the update.
        self.trainers.append(_Trainer(parameters, update, later))
        return self.trainers[-1]


class _Trainer:
    """Uses the gradients of some parameters, either for an update or for sums of which a later update is made."""

    def __init__(self, parameters: list[Tensor], update: Any, sums: dict[Tensor, Tensor]):
        self.parameters, self.update, self.sums = parameters, update, sums

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        laid_out = [_laid_out(grad, p) for grad, p in zip(gradients, self.parameters, strict=True)]
        if self.sums:
            torch._foreach_add_([self.sums[p] for p in self.parameters], laid_out)
        else:
            self.update(laid_out)

    def begin(self) -> None:
        """Let replays train from now on. Before this call they change nothing but the sums, which are reset here."""
        if self.sums:
            torch._foreach_zero_(list(self.sums.values()))
        else:
            self.update.begin()


class _unchanged:
    """A context that restores the values of all parameters and buffers in place when it ends."""

    def __init__(self, net: nn.Module):
        self.tensors = list(net.state_dict(keep_vars=True).values())

    def __enter__(self) -> None:
        self.kept = [tensor.detach().clone() for tensor in self.tensors]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for tensor, kept in zip(self.tensors, self.kept, strict=True):
                tensor.copy_(kept)


def _laid_out(grad: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient in the memory layout of its parameter, because the fused update reads both as flat memory."""
    return grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)
