"""One update of a supernet, by the plain loop or by replay of CUDA graphs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from greedynas.gpu.recording import worth_recording
from greedynas.greedy.graphs.training import GraphedTraining
from greedynas.greedy.settings import TrainSettings
from greedynas.models.losses import classification_loss
from greedynas.models.supernet import Supernet
from greedynas.runtime.devices import autocast, full_precision
from greedynas.runtime.parallel import ranks
from greedynas.runtime.parallel.reduction import added_up, gradients_added_up, my_part
from greedynas.spaces.paths import OpPath


class TrainingStep:
    """`train_step`, or where that would be slower than its kernels (small images on a GPU) the same by replay."""

    def __init__(
        self,
        net: Supernet,
        optimizer: torch.optim.Optimizer,
        settings: TrainSettings,
        class_weights: Tensor | None,
        precision: str,
    ):
        self.net, self.optimizer, self.settings = net, optimizer, settings
        self.class_weights, self.precision = class_weights, precision
        self.recorded: GraphedTraining | None = None

    def __call__(self, images: Tensor, labels: Tensor, paths: Sequence[OpPath], lr: float) -> Tensor:
        # What is recorded updates each op after its path: for several paths of an update that is right where they share none.
        apart = len(paths) == 1 or self.settings.sampler == "fair"
        small = apart and worth_recording(images) and self.settings.clip_grad is None and ranks.size() == 1
        how = (self.settings, self.class_weights, self.precision)
        if small and self.recorded is None:
            self.recorded = GraphedTraining(self.net, self.optimizer, images, labels, *how)
        if small and self.recorded is not None and self.recorded.images.shape == images.shape:
            return self.recorded(images, labels, paths, lr)
        loss = train_step(self.net, self.optimizer, images, labels, paths, lr, *how)
        if self.recorded is not None:
            self.recorded.refresh()  # its copies of the weights are old now
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
) -> Tensor:
    """One update. Gradients of several paths on the same batch (`fair`) add up before it, and those of all ranks, each with
    its share of the batch. Returns the mean loss."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)  # paths that are not trained have no gradient, not a zero one
    total = torch.zeros((), device=images.device)
    with gradients_added_up(net.path_modules(path) for path in paths):
        for path in paths:
            with autocast(images.device, precision):
                logits = net(images, path)
            loss = classification_loss(full_precision(logits), labels, class_weights, settings.label_smoothing)
            loss = my_part(loss, len(labels))
            loss.backward()
            total += loss.detach()
    if settings.clip_grad is not None:
        nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], settings.clip_grad)
    optimizer.step()
    return added_up(total) / len(paths)


def supernet_optimizer(net: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum; no weight decay on BatchNorm and biases, or on everything."""
    from timm.optim import param_groups_weight_decay  # type: ignore[attr-defined]

    decay, nesterov = settings.weight_decay, settings.momentum > 0
    groups = net.parameters() if settings.decay_all else param_groups_weight_decay(net, decay)
    return torch.optim.SGD(groups, settings.lr, settings.momentum, weight_decay=decay, nesterov=nesterov)
