"""The supernet whose ops are slices of one set of weights."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greedynas import evaluate_paths, load_space, parse_path
from greedynas.models.base_blocks import Resize
from greedynas.models.batchnorm import BN_MODES
from greedynas.models.shared_supernet import SharedLayer, SharedSupernet, SlicedBottleneck
from greedynas.spaces.describe import supernet_params
from tests.helpers.bases import PADDED, random_images, small_space, whole_path
from tests.helpers.evaluation import one_at_a_time
from tests.helpers.strategies import paths_of, spaces
from tests.helpers.supernet import with_lively_biases, with_lively_statistics

pytestmark = pytest.mark.usefixtures("one_thread")

AROUND = small_space(sizes=(32, 48))
SPACES = {
    "around": AROUND,
    "around, one size": small_space(sizes=(), base=PADDED).adapt(image_size=33),
    "macro": load_space("macro").adapt(image_size=8),
    "mobilenet-se": load_space("mobilenet-se").adapt(image_size=33, num_classes=7),
}
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def lively(space, seed=0):
    return with_lively_biases(
        with_lively_statistics(SharedSupernet(space, generator=torch.Generator().manual_seed(seed)))
    )


def some_paths(space, count, seed=0):
    return [tuple(path) for path in space.sample(count, np.random.default_rng(seed)).tolist()]


def resized(images, path, space):
    return Resize(space.sizes[path[0]])(images) if space.sizes else images


def assert_subnet_agrees(net, path, images):
    subnet = net.subnet(path)
    with torch.no_grad():
        expected = net(images, path)
        assert expected.std() > 0
        torch.testing.assert_close(subnet(resized(images, path, net.space)), expected, rtol=1e-4, atol=1e-5)
    own = {parameter.data_ptr() for parameter in net.parameters()}
    assert not own & {parameter.data_ptr() for parameter in subnet.parameters()}
    return subnet


@every_space
def test_a_subnet_computes_what_the_path_computes(space):
    net = lively(space).eval()
    images = random_images(space.image_size)
    for path in (*some_paths(space, 6), (0,) * len(space.layers), whole_path(space)):
        subnet = assert_subnet_agrees(net, path, images)
        costs = space.costs([path])
        assert sum(parameter.numel() for parameter in subnet.parameters()) == costs.params[0]


@given(st.data())
@settings(max_examples=15)
def test_a_subnet_computes_what_the_path_computes_in_random_spaces(data):
    space = data.draw(spaces())
    net = lively(space).eval()
    shape = (2, space.image_channels, space.image_size, space.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert_subnet_agrees(net, data.draw(paths_of(space)), images)


def test_the_image_size_of_a_path_changes_what_it_computes():
    net, images = lively(AROUND).eval(), random_images(48)
    small, large = (0, *whole_path(AROUND)[1:]), whole_path(AROUND)
    with torch.no_grad():
        assert not torch.allclose(net(images, small), net(images, large), atol=1e-3)
        torch.testing.assert_close(net(Resize(32)(images), small), net(images, small))
        torch.testing.assert_close(net.subnet(large)(images), net(images, large))


@every_space
def test_no_tensor_is_stored_twice(space):
    state = SharedSupernet(space).state_dict()
    places = [tensor.data_ptr() for tensor in state.values() if tensor.numel()]
    assert len(set(places)) == len(places)
    net = SharedSupernet(space)
    if space.base is not None:
        assert sum(parameter.numel() for parameter in net.parameters()) == supernet_params(space)
    for number, layer in enumerate(net.layers):
        kernels = [name for name in state if name.startswith(f"layers.{number}.") and name.endswith("depthwise.weight")]
        sliced = isinstance(layer, SharedLayer) and any(isinstance(op, SlicedBottleneck) for op in layer.ops)
        assert len(kernels) == sliced  # one for all ops


def test_an_op_is_the_first_channels_and_the_centre_of_the_largest_block():
    net = lively(AROUND)
    layer = net.layers[-1]
    op = AROUND.layers[-1].ops.index("MB3_K3_SE")
    block = net.plain_block(len(AROUND.layers) - 1, op)
    torch.testing.assert_close(block.depthwise.conv.weight, layer.shared.depthwise.weight[:144, :, 1:-1, 1:-1])
    torch.testing.assert_close(block.expand.conv.weight, layer.shared.expand.weight[:144])
    torch.testing.assert_close(block.se.reduce.weight, layer.shared.reduce.weight[:, :144])
    torch.testing.assert_close(block.se.expand.bias, layer.shared.excite.bias[:144])
    torch.testing.assert_close(block.project.conv.weight, layer.ops[op].project.weight)  # of its own


def test_the_gradients_of_an_op_are_those_of_the_block_alone():
    net, number = lively(AROUND), len(AROUND.layers) - 1
    layer, shape = net.layers[number], AROUND.layers[number]
    place = shape.ops.index("MB3_K3_SE")
    block, images = net.plain_block(number, place), random_images(6, 4)[:, :1].repeat(1, shape.in_channels, 1, 1)
    for one in (layer[place], block):
        one(images).square().sum().backward()
    shared, grads = layer.shared, {name: value.grad for name, value in block.named_parameters()}
    for found, name in (
        (shared.expand.weight.grad[:144], "expand.conv.weight"),
        (shared.depthwise.weight.grad[:144, :, 1:-1, 1:-1], "depthwise.conv.weight"),
        (shared.reduce.weight.grad[:, :144], "se.reduce.weight"),
        (shared.reduce.bias.grad, "se.reduce.bias"),
        (shared.excite.weight.grad[:144], "se.expand.weight"),
        (shared.excite.bias.grad[:144], "se.expand.bias"),
        (layer[place].project.weight.grad, "project.conv.weight"),
        (layer[place].project_norm.bias.grad, "project.norm.bias"),
    ):
        assert grads[name].any(), name
        torch.testing.assert_close(found, grads[name])


def used_slice(net, layer, path):
    """Return masks of the shared weights of a layer that its op on this path uses, by name."""
    masks = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in layer.shared.named_parameters()}
    op = layer.ops[path[list(net.layers).index(layer)]]
    if isinstance(op, SlicedBottleneck):
        hidden, squeezed = op.hidden, op.squeeze
        margin = (layer.shared.depthwise.weight.shape[-1] - op.kernel) // 2
        centre = slice(margin, margin + op.kernel)
        masks["depthwise.weight"][:hidden, :, centre, centre] = True
        if "expand.weight" in masks:
            masks["expand.weight"][:hidden] = True
        if squeezed:
            masks["reduce.weight"][:squeezed, :hidden] = True
            masks["reduce.bias"][:squeezed] = True
            masks["excite.weight"][:hidden, :squeezed] = True
            masks["excite.bias"][:hidden] = True
        masks["project.weight"][:, :hidden] = op.project is None
    return masks


@every_space
def test_a_step_on_one_path_changes_only_its_slices(space):
    net = lively(space)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for path in some_paths(space, 2, seed=3):
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        optimizer.zero_grad()
        net(random_images(space.image_size, 4), path).square().sum().backward()
        optimizer.step()
        changed = {name: tensor != before[name] for name, tensor in net.state_dict().items()}
        shared = {}
        for number, layer in enumerate(net.layers):
            if isinstance(layer, SharedLayer) and layer.shared is not None:
                masks = used_slice(net, layer, path)
                shared |= {f"layers.{number}.shared.{name}": mask for name, mask in masks.items()}
        for name, mask in shared.items():
            assert not changed[name][~mask].any(), name
        for part in ("depthwise.weight", "expand.weight"):
            assert all(changed[name].any() == mask.any() for name, mask in shared.items() if name.endswith(part))
        modules = net.path_modules(path)
        own = {id(value) for module in modules for value in module.state_dict(keep_vars=True).values()}
        for name, tensor in net.state_dict(keep_vars=True).items():
            if name not in shared and id(tensor) not in own:
                assert not changed[name].any(), name
        trained = set(map(id, net.path_parameters(path)))
        assert {id(p) for p in net.parameters() if p.grad is not None} <= trained


@pytest.mark.parametrize(
    ("name", "bn"),
    [*((name, bn) for name in list(SPACES)[:3] for bn in BN_MODES.names()), ("mobilenet-se", "recalibrate")],
)
def test_paths_are_evaluated_together_as_one_by_one(name, bn):
    space = SPACES[name]
    net = lively(space).double()
    paths = some_paths(space, 2)
    paths += [(*paths[0][:-1], 1 - min(paths[0][-1], 1)), paths[0]]  # a shared prefix, and one path twice
    images, calibration = (random_images(space.image_size, n, seed=n).double() for n in (6, 4))
    labels = torch.arange(6) % space.num_classes
    result = evaluate_paths(net, paths, images, labels, bn, bn_images=3, calibration=calibration)
    for path, loss, accuracy in zip(paths, result.losses, result.accuracies, strict=True):
        seen = [resized(batch, path, space) for batch in (images, calibration)]
        expected = one_at_a_time(net, path, seen[0], labels, bn, 2, seen[1])
        assert (loss, accuracy) == pytest.approx(expected, rel=1e-6)
    assert result.layers_run < result.layers_plain
    assert len(set(result.losses)) == len(set(paths))


@pytest.mark.parametrize("space", list(SPACES.values())[:3], ids=list(SPACES)[:3])
def test_copies_and_checkpoints_compute_the_same(space):
    net = lively(space)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    loaded = SharedSupernet(space, generator=torch.Generator().manual_seed(1))
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(net)
    images, paths = random_images(space.image_size), some_paths(space, 2)
    with torch.no_grad():
        for other in (loaded.eval(), copied.eval()):
            for path in paths:
                assert torch.equal(other(images, path), net.eval()(images, path))
    # The slices of a copy are those of its own weights, and not of the original.
    for parameter in net.parameters():
        parameter.data.zero_()
    with torch.no_grad():
        for path in paths:
            assert torch.equal(copied(images, path), loaded(images, path))
            assert not torch.equal(copied(images, path), net(images, path))


def test_weights_come_from_one_generator_and_no_global_state_is_used():
    before = torch.get_rng_state()
    first, second = (SharedSupernet(AROUND, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    for (name, one), two in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def test_a_plain_space_shares_weights_among_its_widths_and_kernels():
    net = SharedSupernet("macro", num_classes=4)
    small, large = parse_path("1" * 8, net.space), parse_path("2" * 8, net.space)
    images = random_images(32, 4)
    before = net.layers[0].shared.expand.weight.clone()
    net(images, small).square().sum().backward()
    gradient = net.layers[0].shared.expand.weight.grad
    width = net.layers[0][1].hidden
    assert gradient[:width].any()
    assert not gradient[width:].any()
    assert net.layers[0][2].hidden == 2 * width == len(before)
    assert not torch.equal(net(images, small), net(images, large))
    assert net.layers[0][2].project is None  # one last convolution for all ops
