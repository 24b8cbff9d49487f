import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from greedynas import Supernet, build_network, known_networks, load_space, parse_path, space_names
from tests.helpers.strategies import paths_of, spaces
from tests.helpers.supernet import with_lively_statistics


def images(space, batch=2):
    return torch.randn(
        batch, space.image_channels, space.image_size, space.image_size, generator=torch.Generator().manual_seed(0)
    )


def counted(network, space) -> tuple[int, int]:
    """Return the multiply-adds by torch's own counter and the parameters by numel."""
    with torch.device("meta"):
        x = torch.empty(1, space.image_channels, space.image_size, space.image_size)
    with FlopCounterMode(display=False) as counter:
        network.to("meta").eval()(x)
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2, sum(parameter.numel() for parameter in network.parameters())


def priced(path, space) -> tuple[int, int]:
    costs = space.costs([path])
    return int(costs.macs[0]), int(costs.params[0])


@given(st.data())
def test_costs_equal_those_of_the_built_network_in_random_spaces(data):
    space = data.draw(spaces())
    path = data.draw(paths_of(space))
    assert priced(path, space) == counted(build_network(path, space), space)


@pytest.mark.parametrize("name", space_names())
@given(data=st.data())
@settings(max_examples=10)
def test_costs_equal_those_of_the_built_network_in_shipped_spaces(name, data):
    space = load_space(name)
    size = data.draw(st.just(space.image_size) | st.integers(space.total_stride, 2 * space.image_size))
    space = space.adapt(num_classes=data.draw(st.integers(1, 2000)), image_size=size)
    path = data.draw(paths_of(space))
    assert priced(path, space) == counted(build_network(path, space), space)


@pytest.mark.parametrize(("name", "params"), [("mobilenet", 16_252_744), ("mobilenet-se", 45_671_740)])
def test_size_of_the_papers_supernets(name, params):
    assert sum(parameter.numel() for parameter in Supernet(name).parameters()) == params


@given(st.data())
def test_subnet_computes_the_same_function(data):
    space = data.draw(spaces())
    path = data.draw(paths_of(space))
    net = with_lively_statistics(Supernet(space)).eval()
    subnet, x = net.subnet(path), images(space)
    with torch.no_grad():
        torch.testing.assert_close(subnet(x), net(x, path))
    assert not subnet.training
    # The weights are copies: training one network does not change the other.
    storages = {parameter.data_ptr() for parameter in net.parameters()}
    assert not storages & {parameter.data_ptr() for parameter in subnet.parameters()}


@pytest.mark.parametrize("name", ["mobilenet-se", "shufflenet"])
def test_subnets_of_large_spaces_at_another_image_size(name):
    space = load_space(name).adapt(num_classes=7, image_size=65)
    net = with_lively_statistics(Supernet(space)).eval()
    for path in space.sample(3, np.random.default_rng(0)):
        with torch.no_grad():
            torch.testing.assert_close(net.subnet(path)(images(space)), net(images(space), path))


def test_subnet_carries_nothing_of_the_supernet():
    net = Supernet("mobilenet", num_classes=10)
    path = parse_path("ID " * 21, net.space)
    subnet = net.subnet(path)
    assert len(pickle.dumps(subnet)) < 2 * 4 * sum(tensor.numel() for tensor in subnet.state_dict().values())
    assert not any(isinstance(module, (Supernet, torch.nn.Identity)) for module in subnet.modules())
    # Its weights fit strictly into the same network built without a supernet.
    fresh = build_network(path, "mobilenet", num_classes=10).eval()
    fresh.load_state_dict(subnet.state_dict())
    x = images(net.space.adapt(image_size=64))
    with torch.no_grad():
        torch.testing.assert_close(fresh(x), subnet.eval()(x))


@given(st.data())
@settings(max_examples=10)
def test_a_training_step_changes_only_its_path(data):
    space = data.draw(spaces())
    path = data.draw(paths_of(space))
    net = Supernet(space)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
    # The momentum of earlier steps must not change other paths either.
    for other in data.draw(st.lists(paths_of(space), max_size=2)):
        optimizer.zero_grad()
        net(images(space), other).square().sum().backward()
        optimizer.step()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    optimizer.zero_grad()
    net(images(space), path).square().sum().backward()
    optimizer.step()
    active = {id(parameter) for parameter in net.path_parameters(path)}
    for name, parameter in net.named_parameters():
        if id(parameter) not in active:
            assert parameter.grad is None
            assert torch.equal(parameter, before[name])
        else:
            assert parameter.grad is not None
    used = {id(buffer) for block in (net.stem, *net.blocks(path), net.head) for buffer in block.buffers()}
    for name, buffer in net.named_buffers():
        if id(buffer) not in used:
            assert torch.equal(buffer, before[name])


def test_all_weights_come_from_one_generator_and_no_global_state_is_used():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second = (Supernet("macro", generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    for (name, one), two in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("name", list(known_networks()))
def test_known_networks_run(name):
    network = build_network(name, num_classes=10)
    with torch.no_grad():
        logits = network(torch.randn(8, 3, 64, 64))
    assert logits.shape == (8, 10)
    assert 1e-3 < logits.std() < 10  # with BatchNorm at work, signals neither vanish nor explode at initialisation


def test_strided_identities_over_few_channels_write_within_their_memory():
    """PyTorch's own strided 1x1 convolution writes out of bounds here (uxlfoundation/oneDNN#6035), on some CPUs."""
    code = (
        "import torch; from greedynas.models.blocks import ConvNorm\n"
        "block = ConvNorm(8, 16, stride=2).to(memory_format=torch.channels_last)\n"
        "x = torch.randn(64, 8, 96, 96).to(memory_format=torch.channels_last).requires_grad_()\n"
        "for _ in range(5): block(x).square().sum().backward()\n"
        "torch.testing.assert_close(block.conv(x), torch.nn.functional.conv2d(x[:, :, ::2, ::2], block.conv.weight))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
