"""Plain float64 references for methods with architecture parameters, written without the package's methods.

They use the modules of a supernet (stem, ops, head, classifier) and autograd, and nothing else.
"""

import copy

import numpy as np
import torch
from torch.nn import functional as F

from greedynas import CandidatePool, Supernet
from greedynas.greedy.samplers.learning import Learning
from greedynas.greedy.samplers.sampler import Draw
from greedynas.greedy.settings import TrainSettings
from greedynas.models.shared_supernet import SharedSupernet
from greedynas.runtime.rng import torch_stream
from tests.helpers.training import SETTINGS, tiny_space

OPS = ("ID", "MB2_K3", "MB4_K5")


def space_of(ops=OPS, **changes):
    return tiny_space(ops, **changes)


def double_net(space=None, shared=False, seed=0):
    """Return a supernet in float64, which takes float32 images, with weights that are not all alike."""
    net = (SharedSupernet if shared else Supernet)(space or space_of(), generator=torch_stream(seed, "init"))
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    net.double()
    net.stem.register_forward_pre_hook(lambda _, images: (images[0].double(),))
    return net


def draw_of(net, data, method="darts", *, seed=0, memory=None, progress=0.5, warm=True, updates=100, **settings):
    """Return a draw as a training gives it to a method, in the middle of the training."""
    chosen = TrainSettings(**{**SETTINGS, "sampler": method, **settings})
    memory = {} if memory is None else memory
    learning = Learning(net, data, chosen, 0, 3, memory, warm=warm, progress=progress, updates=updates)
    rng = np.random.default_rng(seed)
    return Draw(net.space, chosen, rng, 7, False, 0.0, CandidatePool(3), losses=None, learning=learning)


def prepared(method, draw, alpha):
    """Return a method that has begun with these architecture parameters."""
    method._begin(draw, draw.learning)
    for layer, values in zip(method.alpha, alpha, strict=True):
        layer.data.copy_(torch.as_tensor(values))
    return method


def some_alpha(space, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=count) for count in space.num_ops]


def mixed_logits(net, images, shares):
    """Return the logits of a network that adds up all ops of every layer, each times its share."""
    net = copy.deepcopy(net).train()
    x = net.stem(images)
    for layer, weights in zip(net.layers, shares, strict=True):
        outputs = [op(x) for op in layer]
        x = sum(weights[i] * output for i, output in enumerate(outputs))
    return net.classifier(net.head(x).mean((2, 3)))


def expected_cost(space, shares, cost="macs"):
    """Return the cost of the fixed layers and the shares of the others, op by op."""
    base = space.costs([[0] * len(space.layers)])
    total = float(getattr(base, cost)[0])
    for layer, weights in enumerate(shares):
        for op in range(space.num_ops[layer]):
            path = [0] * len(space.layers)
            path[layer] = op
            more = float(getattr(space.costs([path]), cost)[0] - getattr(base, cost)[0])
            total = total + weights[op] * more
    return total


def entropy(logits, labels):
    return F.cross_entropy(logits, labels)


def adam_step(values, gradient, rate, betas=(0.9, 0.999), decay=0.0, eps=1e-8):
    """Return the values after the first step of Adam."""
    gradient = gradient + decay * values
    mean, square = (1 - betas[0]) * gradient, (1 - betas[1]) * gradient**2
    return values - rate * (mean / (1 - betas[0])) / (np.sqrt(square / (1 - betas[1])) + eps)
