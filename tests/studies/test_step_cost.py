"""The memory of an update, by counting the tensors that autograd saves."""

import numpy as np
import pytest
import torch
from torch import nn

from greedynas import Supernet, load_space
from greedynas.models.supernet import Mixture
from greedynas.studies.step_cost import SavedTensors, path_memory

pytestmark = pytest.mark.usefixtures("one_thread")


def test_saved_tensors_are_counted_once_and_released():
    net = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Tanh(), nn.Linear(20, 5, bias=False))
    images = torch.zeros(8, 10)
    with SavedTensors(net) as saved:
        loss = net(images).square().sum()
        # The input, the output of tanh (which both its own and the next layer's backward pass need), and the logits.
        assert saved.now == saved.peak == 4 * 8 * (10 + 20 + 5)
        loss.backward()
    assert saved.now == 0
    with SavedTensors(net) as saved:
        for _ in range(3):  # one after the other, as the fair sampler does
            net(images).square().sum().backward()
    assert saved.peak == 4 * 8 * (10 + 20 + 5)


def test_mobilenet_two_paths_need_twice_and_all_ops_seven_times_the_memory_of_a_path():
    """The paper's Table 2: single-path methods 1×, ProxylessNAS two paths, DARTS and FBNet all of a layer's ops."""
    space = load_space("mobilenet").adapt(image_size=64, num_classes=10)
    net, images = Supernet(space), torch.randn(2, 3, 64, 64)
    rng = np.random.default_rng(0)
    share = torch.tensor(0.5, requires_grad=True)
    single = np.mean([path_memory(net, images, tuple(path)) for path in space.sample(12, rng)])
    pairs = [[rng.choice(count, 2, replace=False).tolist() for count in space.num_ops] for _ in range(6)]
    mixtures = [
        Mixture([pair[0] for pair in layers], [dict.fromkeys(pair, share) for pair in layers]) for layers in pairs
    ]
    two = np.mean([path_memory(net, images, mixture) for mixture in mixtures])
    everything = Mixture([0] * 21, [dict.fromkeys(range(count), share) for count in space.num_ops])
    all_ops = path_memory(net, images, everything)
    assert len(space.layers) == 21
    assert 1.7 < two / single < 2.3
    assert 6 < all_ops / single < 8
