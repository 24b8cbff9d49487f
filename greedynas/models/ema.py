"""Averaged weights of a supernet, so that its last few steps alone do not decide how paths are ranked."""

import torch
from torch import Tensor, nn

from greedynas.rundir.checkpoints import AVERAGED


class AveragedWeights:
    """Exponential moving averages of the weights and BatchNorm statistics of a net that is trained in place.

    Without a decay there is no average and nothing happens. All weights at once in a few kernels: timm's `ModelEmaV3`, made for
    larger steps, copies the counters of every BatchNorm one by one.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        weights = net.state_dict() if decay else {}
        self._live = {name: tensor.detach() for name, tensor in weights.items() if tensor.is_floating_point()}
        self._averages = {name: tensor.clone() for name, tensor in self._live.items()}

    def update(self, step: int) -> None:
        """After so many steps; at first the average follows closely, else it would remember the initial weights."""
        if self._live:
            decay = min(self.decay, step / (step + 10))
            torch._foreach_lerp_(list(self._averages.values()), list(self._live.values()), 1 - decay)

    def replace(self) -> None:
        """The net's own weights by the averaged ones, when its training is over."""
        if self._live:
            torch._foreach_copy_(list(self._live.values()), list(self._averages.values()))

    def tensors(self) -> dict[str, Tensor]:
        return {f"{AVERAGED}{name}": tensor for name, tensor in self._averages.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, average in self._averages.items():
            average.copy_(tensors[f"{AVERAGED}{name}"])
