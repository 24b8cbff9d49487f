"""One update of a supernet, by the plain loop or by replaying CUDA graphs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from greedynas.gpu.recording import worth_recording
from greedynas.greedy.graphs.training import GraphedTraining
from greedynas.greedy.settings import TrainSettings
from greedynas.models.losses import classification_loss, distillation_loss, teacher_logits
from greedynas.models.supernet import Mixture, Supernet
from greedynas.runtime.devices import autocast, full_precision, prepare
from greedynas.runtime.parallel import ranks
from greedynas.runtime.parallel.reduction import share_of_batch_loss, sum_over_ranks, summed_gradients
from greedynas.spaces.paths import OpPath


class TrainingStep:
    """A training step: `train_step`, or a replay of CUDA graphs for small images on a GPU, where launches dominate."""

    def __init__(
        self,
        net: Supernet,
        optimizer: torch.optim.Optimizer,
        settings: TrainSettings,
        class_weights: Tensor | None,
        precision: str,
        teacher: nn.Module | None = None,
        teacher_precision: str | None = None,  # None: the precision of the training
    ):
        self.net, self.optimizer, self.settings = net, optimizer, settings
        self.teacher, self.teacher_precision = teacher, teacher_precision or precision
        self.class_weights, self.precision = class_weights, precision
        self.recorded: GraphedTraining | None = None

    def __call__(self, images: Tensor, labels: Tensor, paths: Sequence[OpPath], lr: float) -> Tensor:
        prepare(images.device)
        # A recording updates each op right after its path, which is correct for several paths only if they share no op.
        apart = len(paths) == 1 or self.settings.sampler == "fair"
        small = (
            apart
            and self.net.recordable
            and not isinstance(paths[0], Mixture)
            and self.teacher is None
            and worth_recording(images)
            and self.settings.clip_grad is None
            and ranks.size() == 1
        )
        how = (self.settings, self.class_weights, self.precision)
        if small and self.recorded is None:
            self.recorded = GraphedTraining(self.net, self.optimizer, images, labels, *how)
        if small and self.recorded is not None and self.recorded.images.shape == images.shape:
            return self.recorded(images, labels, paths, lr)
        wanted = None
        if self.teacher is not None:
            wanted = teacher_logits(self.teacher, images, self.teacher_precision)
        loss = train_step(self.net, self.optimizer, images, labels, paths, lr, *how, wanted)
        if self.recorded is not None:
            self.recorded.refresh()  # its copies of the weights are outdated now
        return loss


def train_step(
    net: Supernet,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    paths: Sequence[OpPath],
    lr: float,
    settings: TrainSettings,
    class_weights: Tensor | None,
    precision: str,
    wanted: Tensor | None = None,
) -> Tensor:
    """Train paths on a batch with one update and return the mean loss.

    The gradients of several paths on the same batch (`fair`) are added up before the update. So are those of all ranks,
    each of which has its share of the batch. With the logits `wanted` by a teacher, `settings.teacher_weight` of the loss is
    the distance to them.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)  # untrained paths must have no gradient rather than a zero one
    total = torch.zeros((), device=images.device)
    with summed_gradients(net.path_modules(path) for path in paths):
        for path in paths:
            with autocast(images.device, precision):
                logits = net(images, path)
            logits = full_precision(logits)
            loss = classification_loss(logits, labels, class_weights, settings.label_smoothing)
            if wanted is not None:
                weight, taught = settings.teacher_weight, distillation_loss(logits, wanted, settings.temperature)
                loss = (1 - weight) * loss + weight * taught
            loss = share_of_batch_loss(loss, len(labels))
            loss.backward()
            total += loss.detach()
    if settings.clip_grad is not None:
        nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], settings.clip_grad)
    optimizer.step()
    return sum_over_ranks(total) / len(paths)


def supernet_optimizer(net: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Return SGD with Nesterov momentum, with weight decay on everything or on all but BatchNorm and biases."""
    from timm.optim import param_groups_weight_decay  # type: ignore[attr-defined]

    decay, nesterov = settings.weight_decay, settings.momentum > 0
    groups = net.parameters() if settings.decay_all else param_groups_weight_decay(net, decay)
    return torch.optim.SGD(groups, settings.lr, settings.momentum, weight_decay=decay, nesterov=nesterov)
