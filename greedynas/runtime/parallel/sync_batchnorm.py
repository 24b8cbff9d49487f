"""Synchronised BatchNorm: its statistics are those of the whole batch, not of one rank's share of it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from greedynas.runtime.parallel import ranks


class SyncedBatchNorm(nn.BatchNorm2d):
    """BatchNorm that is synchronised over all ranks in training; in evaluation, ranks run different paths."""

    def forward(self, x: Tensor) -> Tensor:
        if ranks.size() == 1 or not (self.training and torch.is_grad_enabled()):
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        running = (self.running_mean, self.running_var)
        if self.track_running_stats:
            self.num_batches_tracked.add_(1)
        else:  # copies, which are discarded
            running = (self.running_mean.clone(), self.running_var.clone())
        if x.is_cuda:
            from torch.nn.modules._functions import SyncBatchNorm  # faster, but for GPUs only

            more = (self.eps, self.momentum, dist.group.WORLD, ranks.size())
            return SyncBatchNorm.apply(x, self.weight, self.bias, *running, *more)  # type: ignore[no-any-return]
        return _SyncedNorm.apply(x, self.weight, self.bias, *running, self.eps, self.momentum)  # type: ignore[no-any-return]


def synchronise(net: nn.Module) -> None:
    """Synchronise every BatchNorm of a network in place, so that optimizers and hooks keep their references."""
    if ranks.size() == 1:
        return
    for module in net.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncedBatchNorm


class _SyncedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        eps: float,
        momentum: float,
    ) -> Tensor:
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        count = torch.full_like(mean, x.numel() / x.shape[1])
        parts = [torch.empty_like(count.expand(3, -1).contiguous()) for _ in range(ranks.size())]
        dist.all_gather(parts, torch.stack((count, mean, var)))
        counts, means, variances = torch.stack(parts, 1)  # (ranks, channels) each
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total
        var = (counts * (variances + (means - mean) ** 2)).sum(0) / total
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * total / (total - 1), momentum)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), total)
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, total = ctx.saved_tensors
        normalised = (x - _per_channel(mean)) * _per_channel(scale)
        sums = torch.stack((grad.sum((0, 2, 3)), (grad * normalised).sum((0, 2, 3))))
        grad_bias, grad_weight = sums.clone()  # over this rank's images, like all gradients before their reduction
        dist.all_reduce(sums)
        of_mean, of_deviation = (_per_channel(part) for part in sums / total)
        grad_x = (grad - of_mean - normalised * of_deviation) * _per_channel(weight * scale)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _per_channel(values: Tensor) -> Tensor:
    return values[None, :, None, None]
