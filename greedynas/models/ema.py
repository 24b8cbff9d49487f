"""Averaged weights of a supernet, so that the ranking of paths does not depend on the last few steps alone."""

import torch
from torch import Tensor, nn

from greedynas.rundir.checkpoints import AVERAGED


class AveragedWeights:
    """Exponential moving averages of the weights and BatchNorm statistics of a network that is trained in place.

    With a decay of 0 nothing is averaged. All weights are updated at once, in a few kernels; timm's `ModelEmaV3`, which
    is made for larger steps, copies the counters of every BatchNorm one by one.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        weights = net.state_dict() if decay else {}
        self._live = {name: tensor.detach() for name, tensor in weights.items() if tensor.is_floating_point()}
        self._averages = {name: tensor.clone() for name, tensor in self._live.items()}

    def update(self, step: int) -> None:
        """Update the averages after a step. The decay is smaller at first, so that the initial weights fade soon."""
        if self._live:
            decay = min(self.decay, step / (step + 10))
            torch._foreach_lerp_(list(self._averages.values()), list(self._live.values()), 1 - decay)

    def replace(self) -> None:
        """Replace the weights of the network by the averaged ones, at the end of training."""
        if self._live:
            torch._foreach_copy_(list(self._live.values()), list(self._averages.values()))

    def tensors(self) -> dict[str, Tensor]:
        return {f"{AVERAGED}{name}": tensor for name, tensor in self._averages.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, average in self._averages.items():
            average.copy_(tensors[f"{AVERAGED}{name}"])
