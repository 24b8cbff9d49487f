import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from greedynas.models.network import build_network
from greedynas.models.nwot import code_agreement, nwot_score
from greedynas.runtime.rng import torch_stream
from greedynas.spaces.space import Fixed, Space, Stage

pytestmark = pytest.mark.usefixtures("one_thread")


def little(activation="relu"):
    """Return a space for images of 6 px: a stem, a layer that halves the resolution, two that keep it, a head."""
    return Space(
        name="little",
        image_size=6,
        num_classes=2,
        activation=activation,
        ops=["ID", "MB2_K3", "MB2_K3_SE"],
        stem=[Fixed(op="CONV_K3", channels=2, stride=1)],
        stages=[Stage(channels=3, repeat=3, stride=2)],
        head=[Fixed(op="CONV_K1", channels=5)],
    )


def pictures(count=4, seed=0):
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normalised(x):
    """Return the output of a BatchNorm with the statistics of the batch and no affine part."""
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
    return (x - mean) / (var + 1e-5).sqrt()


def agreement_by_hand(inputs):
    """Return N − Hamming distance for all pairs, counted bit by bit from the inputs of all activation functions."""
    codes = [[value > 0 for layer in inputs for value in layer[i].flatten().tolist()] for i in range(len(inputs[0]))]
    return np.array([[sum(a == b for a, b in zip(one, two, strict=True)) for two in codes] for one in codes])


@pytest.mark.parametrize(("activation", "act"), [("relu", F.relu), ("hard_swish", F.hardswish)])
def test_the_agreement_equals_a_computation_by_hand(activation, act):
    """The network has a stem, a strided identity (a convolution without a code), a residual block and a head."""
    network = build_network((0, 1, 0), little(activation), generator=torch.Generator().manual_seed(1)).double()
    x, weights = pictures(), {name: value for name, value in network.state_dict().items() if name.endswith("weight")}
    stem = normalised(F.conv2d(x, weights["stem.0.conv.weight"], padding=1))
    shrunk = normalised(F.conv2d(F.relu(stem), weights["stages.0.0.conv.weight"], stride=2))
    block = "stages.0.1."
    expanded = normalised(F.conv2d(shrunk, weights[block + "expand.conv.weight"]))
    filtered = normalised(F.conv2d(act(expanded), weights[block + "depthwise.conv.weight"], padding=1, groups=6))
    out = shrunk + normalised(F.conv2d(act(filtered), weights[block + "project.conv.weight"]))
    head = normalised(F.conv2d(out, weights["head.0.conv.weight"]))
    expected = agreement_by_hand([stem, expanded, filtered, head])
    found = code_agreement(network, x)
    assert found.tolist() == expected.tolist()
    assert found.diagonal().tolist() == [2 * 36 + 6 * 9 + 6 * 9 + 5 * 9] * 4  # every unit agrees with itself
    assert 0 < found.min() < found.max()


def test_the_score_is_the_logarithm_of_the_determinant():
    space, path, images = little(), (1, 2, 0), pictures().float()
    network = build_network(path, space, generator=torch_stream(3, "untrained network", *path))
    determinant = np.linalg.det(code_agreement(network, images).numpy())
    assert nwot_score(path, space, images, seed=3) == pytest.approx(math.log(determinant), rel=1e-9)


def test_equal_networks_have_equal_scores_and_others_do_not():
    space, images = little(), pictures().float()
    assert nwot_score((1, 0, 2), space, images, seed=0) == nwot_score((1, 2, 0), space, images, seed=0)
    scores = [nwot_score(path, space, images, seed=0) for path in itertools.product((0, 1), (1, 2), (1, 2))]
    assert len(set(scores)) == len(scores)
    assert nwot_score((1, 2, 0), space, images, seed=1) != nwot_score((1, 2, 0), space, images, seed=0)
    assert nwot_score((1, 2, 0), space, pictures(seed=5).float(), seed=0) != nwot_score(
        (1, 2, 0), space, images, seed=0
    )


def test_two_images_with_equal_codes_lower_the_score():
    images = pictures().float()
    images[1] = images[0]
    assert nwot_score((1, 1, 1), little(), images, seed=0) < nwot_score((1, 1, 1), little(), pictures().float(), 0) - 20
