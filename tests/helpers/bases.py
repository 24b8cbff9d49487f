"""Test helpers: spaces around small networks of timm, and their weights."""

import timm
import torch

from greedynas import load_space
from greedynas.models.bases.elastic import Elastic
from greedynas.models.bases.timm_bases import load_base, network_of_base
from tests.helpers.supernet import with_lively_biases, with_lively_statistics

SMALL = "mobilenetv3_small_050"  # hard swish, squeeze-and-excitation, a neck behind the pooling
PADDED = "tf_mobilenetv3_small_minimal_100"  # ReLU, padding as TensorFlow's, strides at even sizes


def small_space(sizes=(32, 48, 64), num_classes=5, base=SMALL, **elastic):
    """Return the space around a small network."""
    return load_base(base, sizes=sizes, elastic=Elastic(**elastic), num_classes=num_classes)


def random_images(size, count=2, seed=0):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def timm_network(name, num_classes=1000, seed=0):
    """Return a network of timm as after training: lively statistics and logits of the size of 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = timm.create_model(name, num_classes=num_classes)
    network = with_lively_biases(with_lively_statistics(network)).eval()
    with torch.no_grad():
        logits = network(random_images(48, 4))
        network.get_classifier().weight /= logits.std()
    return network


def whole_path(space):
    return tuple(count - 1 for count in space.num_ops)


def whole_network(space, seed=0):
    """Return the whole network of a space around a base, with random weights."""
    return network_of_base(timm_network(space.base, space.num_classes, seed), space).eval()


def space_from(file, text):
    file.write_text(text)
    return load_space(file)
