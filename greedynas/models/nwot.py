"""Scores of untrained networks: NWOT (Mellor et al., Neural Architecture Search without Training, ICML 2021).

A batch of images is sent through a network with fresh weights. The code of an image has one bit for every unit with an
activation function: whether its input is positive. K counts, for each pair of images, the bits in which their codes
agree: the number of units minus the Hamming distance. The score is log |det K|, which is high where the codes of
different images differ. No label is used and nothing is trained, so a supernet should rank paths better than this.

The paper defines the code for ReLU. Here it is the same for every activation function (hard-swish: input > 0). Layers
without an activation function, such as identities, have no code, and neither do the few units inside
squeeze-and-excitation. BatchNorm uses the statistics of the batch, as in the authors' code.
"""

import torch
from torch import Tensor, nn

from greedynas.models.blocks import ACTIVATIONS
from greedynas.models.network import build_network
from greedynas.runtime.rng import torch_stream
from greedynas.spaces.paths import OpPath, canonical
from greedynas.spaces.space import Space

BATCH = 32  # images


def nwot_score(path: OpPath, space: Space, images: Tensor, seed: int) -> float:
    """Return the score of a path as a freshly initialised network, on float32 images on the CPU.

    The weights depend only on the seed and on the network, so paths that are the same network have the same score. The
    score tends to minus infinity if two images have the same code.
    """
    form = canonical(path, space)
    network = build_network(form, space, generator=torch_stream(seed, "untrained network", *form))
    agreement = code_agreement(network.to(memory_format=torch.channels_last), images)
    return float(torch.linalg.slogdet(agreement).logabsdet)


@torch.inference_mode()
def code_agreement(network: nn.Module, images: Tensor) -> Tensor:
    """Return K: for each pair of images, the number of units in which their codes agree (n × n, float64)."""
    total = torch.zeros(len(images), len(images), dtype=torch.float64)

    def count(_: nn.Module, inputs: tuple[Tensor]) -> None:
        code = (inputs[0] > 0).flatten(1).float()  # float32 counts exactly: a layer has fewer than 2^24 units
        ones = code.sum(1)
        distance = ones[:, None] + ones - 2 * (code @ code.T)
        total.add_(code.shape[1] - distance)

    modules = [module for module in network.modules() if isinstance(module, tuple(ACTIVATIONS.values()))]
    hooks = [module.register_forward_pre_hook(count) for module in modules]
    try:
        network.train()(images)
    finally:
        for hook in hooks:
            hook.remove()
    return total
