"""Networks of timm as bases: what is read from the built modules computes and costs the same."""

import copy

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from greedynas import GreedyNASError, build_network, load_space
from greedynas.models.bases.timm_bases import base_space, load_base, network_of_base
from tests.helpers.bases import PADDED, SMALL, random_images, small_space, timm_network, whole_path

pytestmark = pytest.mark.usefixtures("one_thread")

# Of each family the smallest network, and those that are named most.
NAMES = [
    "tf_efficientnet_lite0",
    "efficientnet_lite0",
    "mobilenetv2_035",
    "mnasnet_small",
    "semnasnet_050",
    "fbnetc_100",
    "spnasnet_100",
    "mobilenetv3_small_050",
    "mobilenetv3_large_075",
    "mobilenetv3_rw",
    "tf_mobilenetv3_small_075",
    "tf_mobilenetv3_small_minimal_100",
    "efficientnet_b0",
    "tf_efficientnet_b0",
    "tinynet_e",
]


def counted(network, size):
    """Return the multiply-adds by torch's own counter and the parameters by numel."""
    network = copy.deepcopy(network).to("meta")
    with FlopCounterMode(display=False) as counter:
        network(torch.empty(1, 3, size, size, device="meta"))
    return counter.get_total_flops() // 2, sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_path_is_timms_network(name):
    space, network = load_space(f"timm:{name}"), timm_network(name)
    whole = network_of_base(network, space).eval()
    for size in (48, 45):  # padding differs between even and odd sizes
        images = random_images(size)
        with torch.no_grad():
            expected, found = network(images), whole(images)
        assert expected.std() > 0.1  # it is not the biases alone that agree
        assert (found - expected).abs().max() < 1e-4
        costs = space.adapt(image_size=size).costs([whole_path(space)])
        assert (costs.macs[0], costs.params[0]) == counted(network, size)
    about = timm.get_pretrained_cfg(name)
    assert (space.image_size, space.mean, space.std) == (about.input_size[-1], about.mean, about.std)


@pytest.mark.parametrize("name", [SMALL, PADDED, "efficientnet_b0", "tf_efficientnet_lite0", "mobilenetv3_rw"])
def test_costs_of_any_path_are_those_of_the_built_network(name):
    import numpy as np

    space = small_space(sizes=(32, 45), base=name)
    for path in space.sample(3, np.random.default_rng(0)):
        costs, size = space.costs([path]), space.sizes[path[0]]
        assert (costs.macs[0], costs.params[0]) == counted(build_network(path, space).eval(), size)


def test_a_base_for_other_classes_and_sizes():
    space = load_base(SMALL, sizes=(64, 96), num_classes=7)
    assert (space.num_classes, space.sizes, space.image_size, space.name) == (7, (64, 96), 96, f"around {SMALL}")
    assert space.cost_tables["params"].range[1] == load_base(SMALL).cost_tables["params"].range[1] - 993 * 1025


@pytest.mark.parametrize(
    ("other", "classes"), [("mobilenetv3_small_075", 5), (SMALL, 6), ("efficientnet_b0", 5), ("resnet18", 5)]
)
def test_weights_of_another_network_are_refused(other, classes):
    network = timm.create_model(other, num_classes=classes)
    with pytest.raises(GreedyNASError, match=f"the weights are not those of {SMALL} with 5 classes") as error:
        network_of_base(network, small_space())
    assert "\n" not in str(error.value)


def test_no_weights_are_allocated_or_drawn_to_read_a_base():
    before = torch.get_rng_state()
    base_space("efficientnet_b0")
    assert torch.equal(torch.get_rng_state(), before)
