"""The memory and computation that a network needs for one image, measured without running it.

A file of 100 KB can describe a network whose first layer has 30 GB of outputs: few weights do not mean few activations.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from greedynas.models.model_file import Card
from greedynas.runtime.errors import GreedyNASError

MAX_ELEMENTS = 2**27  # elements of the largest tensor for one image; a few of that size are in memory at a time
MAX_MACS = 10**12  # multiply-adds for one image: some ten seconds on a CPU
MODERATE_SIZE = 512  # pixels up to which attention, which grows with the fourth power, stays small


def refuse_oversized(network: nn.Module, card: Card) -> None:
    """Raise a GreedyNASError if a network would take gigabytes, or minutes, for one image."""
    if _is_small(network, card):
        return
    elements, macs = measure(network, card)
    if elements > MAX_ELEMENTS or macs > MAX_MACS:
        raise GreedyNASError(
            f"{card.name!r} needs {elements * 4 / 1e9:.1f} GB for its largest tensor and {macs:,} multiply-adds for an "
            f"image of {card.image_size} px, more than predict accepts from a file; if you trust it, run it with "
            "greedynas.load_network"
        )


def _is_small(network: nn.Module, card: Card) -> bool:
    """Return whether the shapes of the weights already prove that a network is not too large."""
    shapes = [parameter.shape for parameter in network.parameters()]
    pixels = card.image_size**2
    widest = max((shape[0] for shape in shapes if len(shape) == 4), default=1)
    held = sum(math.prod(shape) for shape in shapes)
    # No layer of our spaces or of timm enlarges an image, so its output has at most channels times pixels elements.
    return card.image_size <= MODERATE_SIZE and widest * pixels <= MAX_ELEMENTS and held * pixels <= MAX_MACS


class _Largest(TorchDispatchMode):
    """Records the size of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return result


@torch.no_grad()
def measure(network: nn.Module, card: Card) -> tuple[int, int]:
    """Return the elements of the largest tensor and the multiply-adds for one image, computed from shapes alone."""
    weights = {name: tensor.to("meta") for name, tensor in network.state_dict().items()}
    image = torch.empty(1, card.image_channels, card.image_size, card.image_size, device="meta")
    try:
        with FlopCounterMode(display=False) as counter, _Largest() as largest:
            torch.func.functional_call(network, weights, (image,))
    except Exception as error:  # each architecture rejects a size, or tensors without values, in its own way
        reason = str(error).strip().partition("\n")[0]
        raise GreedyNASError(
            f"the cost of {card.name!r} for images of {card.image_size} px cannot be determined ({reason:.150}); if "
            "you trust it, run it with greedynas.load_network"
        ) from None
    return largest.elements, int(counter.get_total_flops()) // 2
