"""Gradient reduction: each rank works on its share of the batch, and the gradients of the trained path are summed.

Only the parameters of the active path have gradients, and every rank knows which ones: no search for unused parameters
is needed, and nothing of the rest of the supernet is sent. They are sent in a few buckets, the last layers first, while
the backward pass still works on earlier layers. With one process, nothing here has any effect.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from greedynas.runtime.parallel import ranks
from greedynas.runtime.parallel.sync_batchnorm import SyncedBatchNorm

BUCKET = 8 * 2**20  # bytes: large enough to be fast, small enough that the first ones are sent early

traffic: Counter[str] = Counter()  # bytes that this process has reduced, by kind; `buckets` counts the buckets


def share_of_batch_loss(loss: Tensor, images: int) -> Tensor:
    """Return the share of this rank's mean loss in the mean over the whole batch."""
    if ranks.size() == 1:
        return loss
    count = torch.full_like(loss, images, requires_grad=False)
    return loss * (count / sum_over_ranks(count))


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of a small tensor over all ranks."""
    if ranks.size() == 1:
        return value
    value = value.clone()
    traffic["other"] += value.nbytes
    dist.all_reduce(value)
    return value


def broadcast_weights(net: nn.Module) -> None:
    """Copy rank 0's weights to every rank."""
    if ranks.size() > 1:
        net.load_state_dict(ranks.broadcast_tensors(net.state_dict()))


@contextmanager
def summed_gradients(passes: Iterable[Sequence[nn.Module]]) -> Iterator[None]:
    """Sum the gradients of these modules over all ranks, and average their running statistics.

    The context surrounds the backward passes of an update. The modules of each pass come in the order of its forward
    pass.
    """
    if ranks.size() == 1:
        yield
        return
    passes = list(passes)
    buckets = _Buckets(passes)
    try:
        yield
        statistics = _start_averaging([module for modules in passes for module in modules])
        buckets.finish()
        _finish_averaging(*statistics)
    finally:
        buckets.close()


class _Buckets:
    """The gradients that are being reduced. All ranks send the same buckets in the same order."""

    def __init__(self, passes: Sequence[Sequence[nn.Module]]):
        times: Counter[Tensor] = Counter()  # how often the backward passes add to each gradient
        order: dict[nn.Parameter, None] = {}  # the order in which gradients become complete
        for modules in passes:
            for parameter in reversed([one for module in modules for one in module.parameters() if one.requires_grad]):
                times[parameter] += 1
                order.pop(parameter, None)
                order[parameter] = None
        self._buckets = list(_in_buckets(order))
        self._place: dict[Tensor, int] = {one: i for i, bucket in enumerate(self._buckets) for one in bucket}
        self._missing = [sum(times[one] for one in bucket) for bucket in self._buckets]
        self._next = 0  # the bucket to be sent next
        self._sent: list[tuple[list[Tensor], Tensor, Any]] = []
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._added_to) for parameter in order]

    def _added_to(self, parameter: Tensor) -> None:
        self._missing[self._place[parameter]] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: list[nn.Parameter]) -> None:
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        traffic["gradients"] += flat.nbytes
        traffic["buckets"] += 1
        self._sent.append((gradients, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self) -> None:
        """Send the remaining buckets and wait for all of them."""
        for bucket in self._buckets[self._next :]:  # they have a parameter that no pass used, on any rank
            self._send(bucket)
        for gradients, flat, work in self._sent:
            work.wait()
            _scatter(flat, gradients)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _in_buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and (bucket[-1].dtype != parameter.dtype or sum(one.nbytes for one in bucket) >= BUCKET):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


# Running statistics: each rank's follow its own images, and are averaged so that all ranks have the same supernet


def _start_averaging(modules: Sequence[nn.Module]) -> tuple[list[Tensor], Tensor | None, Any]:
    norms = {norm: None for module in modules for norm in module.modules() if isinstance(norm, nn.BatchNorm2d)}
    own = [norm for norm in norms if norm.training and not isinstance(norm, SyncedBatchNorm)]
    statistics = [buffer for norm in own for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
    if not statistics:
        return [], None, None
    flat = torch.cat(statistics)
    traffic["statistics"] += flat.nbytes
    return statistics, flat, dist.all_reduce(flat, async_op=True)


def _finish_averaging(statistics: list[Tensor], flat: Tensor | None, work: Any) -> None:
    if flat is not None:
        work.wait()
        _scatter(flat / ranks.size(), statistics)
