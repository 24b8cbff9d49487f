"""The start of a supernet from a pretrained network: order of channels, least squares, and what an unchanged network keeps."""

import copy

import pytest
import torch
from torch.nn import functional as F

from greedynas.models.bases.start import (
    hidden_channels,
    least_squares,
    order_channels,
    share_weights,
    start_from_base,
    start_layer,
)
from greedynas.models.shared_supernet import SharedSupernet, SlicedBottleneck, slice_norm
from tests.helpers.bases import PADDED, SMALL, random_images, small_space, whole_network, whole_path

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS = range(1, 11)  # of SMALL, those with an expansion


def started(space, images, seed=0):
    """Return the started supernet and the network that it started from."""
    whole = whole_network(space, seed)
    net = SharedSupernet(space, generator=torch.Generator().manual_seed(1)).eval()
    start_from_base(net, copy.deepcopy(whole), images)
    return net, whole


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(SMALL, ()), (SMALL, (32, 45)), (PADDED, (32, 45)), ("tinynet_e", ())],
)
def test_the_whole_path_computes_what_the_base_computes(name, sizes):
    space = small_space(sizes=sizes, base=name)
    net, whole = started(space, random_images(45, 4, seed=1))
    images = random_images(sizes[-1] if sizes else 64, 4, seed=2)
    with torch.no_grad():
        expected = whole(images)
        assert (net(images, whole_path(space)) - expected).abs().max() < 1e-4
        assert (net.subnet(whole_path(space))(images) - expected).abs().max() < 1e-4
    assert expected.std() > 0.1


def blocks_of(network):
    return [block for stage in network.stages.children() for block in stage.children()]


def importance(block, x):
    """Return by how much the variance of a block's output, before its last normalisation, falls without each channel."""
    hidden = hidden_channels(block, x)
    weight = block.project.conv.weight
    lost = [F.conv2d(hidden[:, [i]], weight[:, [i]]).var(dim=(0, 2, 3)).sum() for i in range(hidden.shape[1])]
    return torch.stack(lost)


@torch.no_grad()
def test_channels_come_in_the_order_of_their_importance():
    whole = whole_network(small_space())
    x = whole.stem(random_images(48, 8))
    shuffled = 0
    for block in blocks_of(whole):
        if block.expand is not None:
            before, unordered = block(x), importance(block, x)
            order_channels(block, x)
            ordered = importance(block, x)
            torch.testing.assert_close(ordered, unordered.sort(descending=True).values, rtol=1e-3, atol=1e-7)
            torch.testing.assert_close(block(x), before, rtol=1e-4, atol=1e-5)  # the block itself computes the same
            shuffled += not torch.equal(unordered, ordered)
        x = block(x)
    assert shuffled == len(BLOCKS)


def test_the_network_that_it_starts_from_computes_the_same_afterwards():
    space, images = small_space(), random_images(64)
    whole = whole_network(space)
    with torch.no_grad():
        before = whole(images)
        start_from_base(SharedSupernet(space), whole, random_images(48, 4))
        torch.testing.assert_close(whole(images), before, rtol=1e-4, atol=1e-4)


def test_the_same_images_give_the_same_start():
    first, second = (started(small_space(), random_images(48, 4, seed=1))[0].state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


# The fit


def test_least_squares_finds_the_convolution_that_made_the_target():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 12, 9, 9, generator=generator) * torch.linspace(0.5, 2, 12)[:, None, None] + 3
    weight, bias = torch.randn(5, 12, generator=generator), torch.randn(5, generator=generator)
    target = F.conv2d(hidden, weight[:, :, None, None], bias)
    fitted, shift = least_squares(hidden, target)
    torch.testing.assert_close(fitted, weight, rtol=0.01, atol=0.01)
    found = F.conv2d(hidden, fitted[:, :, None, None]) - shift[:, None, None]
    assert (found - target).square().mean() < 1e-5 * target.var()
    torch.testing.assert_close(found.mean((0, 2, 3)), target.mean((0, 2, 3)))


def test_least_squares_is_the_best_of_all_linear_fits():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 4, 8, 8, generator=generator) - 1
    target = torch.randn(6, 3, 8, 8, generator=generator) + hidden[:, :3].square()
    weight, shift = least_squares(hidden, target)
    error = (F.conv2d(hidden, weight[:, :, None, None]) - shift[:, None, None] - target).square().mean()
    columns = torch.cat((hidden, torch.ones(6, 1, 8, 8)), 1).movedim(1, 3).flatten(0, 2)
    wanted = target.movedim(1, 3).flatten(0, 2)
    best = (columns @ torch.linalg.lstsq(columns, wanted).solution - wanted).square().mean()
    assert error == pytest.approx(best.item(), rel=1e-4)


def test_channels_without_any_variance_can_be_fitted():
    weight, shift = least_squares(torch.zeros(2, 4, 3, 3), torch.full((2, 3, 3, 3), 5.0))
    assert torch.equal(weight, torch.zeros(3, 4))
    torch.testing.assert_close(shift, torch.full((3,), -5.0))


def unfitted(op, block):
    """Return an op with the plain slices of a block: its normalisations and its last convolution as they are."""
    cut = copy.deepcopy(op)
    for norm, source in (
        (cut.expand_norm, block.expand.norm),
        (cut.depthwise_norm, block.depthwise.norm),
        (cut.project_norm, block.project.norm),
    ):
        slice_norm(norm, source)
    if cut.project is not None:
        cut.project.weight.copy_(block.project.conv.weight[:, : cut.hidden])
    return cut


@torch.no_grad()
def test_a_fitted_smaller_op_is_nearer_to_its_block_than_a_plain_slice():
    """Compare on images that the fit has not seen."""
    space = small_space(sizes=())
    whole, net = whole_network(space), SharedSupernet(space).eval()
    x, unseen = (whole.stem(random_images(64, 16, seed=seed)) for seed in (1, 2))
    better, worse = 0, []
    for layer, block in zip(net.layers, blocks_of(whole), strict=True):
        start_layer(layer, block, x)
        wanted = block(unseen)
        for op in layer.ops if block.expand is not None else ():
            if not isinstance(op, SlicedBottleneck):
                continue
            fitted, cut = ((one(unseen) - wanted).square().mean() for one in (op, unfitted(op, block)))
            if op.project is None:
                assert fitted < 1e-6 * wanted.square().mean()  # the whole block
            elif fitted < cut:
                better += 1
            else:
                worse.append((op.op, float(fitted), float(cut)))
        x, unseen = block(x), wanted
    assert better > 100
    assert len(worse) <= 0.02 * better, worse


@torch.no_grad()
def test_a_smaller_op_has_the_mean_output_of_its_block():
    space = small_space(sizes=())
    whole, net = whole_network(space), SharedSupernet(space).eval()
    x = whole.stem(random_images(64, 16, seed=1))
    for layer, block in zip(net.layers, blocks_of(whole), strict=True):
        start_layer(layer, block, x)
        wanted = block(x)
        for op in layer.ops:
            if isinstance(op, SlicedBottleneck):
                assert (op(x).mean((0, 2, 3)) - wanted.mean((0, 2, 3))).abs().max() < 1e-3 * wanted.std(), op.op
        x = wanted


@torch.no_grad()
def test_a_fitted_op_can_be_exact():
    """Check a narrow op of a block whose other channels do nothing."""
    space = small_space(sizes=(), widths=(0.5,), without_se=False, kernels=False)
    whole, net = whole_network(space), SharedSupernet(space).eval()
    block, layer = blocks_of(whole)[2], net.layers[2]  # 56 of 3.5 x 16 channels
    idle = torch.arange(block.project.conv.in_channels) % 2 == 1
    block.project.conv.weight[:, idle] = 0
    x = torch.randn(16, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    wanted = block(x)
    start_layer(layer, block, x)
    narrow = min((op for op in layer.ops if isinstance(op, SlicedBottleneck)), key=lambda op: op.hidden)
    assert narrow.hidden == 32
    assert (narrow(x) - wanted).square().mean() < 1e-4 * (wanted - x).var()


@torch.no_grad()
def test_shared_weights_are_those_of_the_block():
    space = small_space()
    whole, net = whole_network(space), SharedSupernet(space)
    block, shared = blocks_of(whole)[-1], net.layers[-1].shared
    share_weights(shared, block)
    assert torch.equal(shared.depthwise.weight, block.depthwise.conv.weight)
    assert torch.equal(shared.excite.bias, block.se.expand.bias)
