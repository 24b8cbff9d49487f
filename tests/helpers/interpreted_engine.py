"""Compare whole blocks in the engine with float64 PyTorch; `test_engine.py` runs this file in Triton's interpreter."""

import os
from copy import deepcopy

import pytest
import torch
from torch import nn

from greedynas.gpu import engine
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.models.blocks import ConvNorm, MBConv, initialise
from greedynas.models.supernet import Supernet
from greedynas.spaces.space import Fixed, Space, Stage

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter", allow_module_level=True)


@pytest.fixture(autouse=True)
def _engine_on():
    torch.manual_seed(0)
    with engine.using("on"):
        yield


def randomised(block):
    initialise(block)
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
        elif isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.normal_(module.bias)
    return block.to(memory_format=torch.channels_last)


def picture(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


def compare(block, x, mode):
    """Compare output, all gradients and all buffers, in float32 with the engine and in float64 without it."""
    results = []
    for copy, images, switch in ((deepcopy(block), x, "on"), (deepcopy(block).double(), x.double(), "off")):
        copy.train(mode != "eval")
        if mode == "batch":
            for module in copy.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.track_running_stats = False
        images = images.clone(memory_format=torch.preserve_format).requires_grad_()
        with engine.using(switch):
            y = copy(images)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
        results.append(
            {"y": y, "x": images.grad} | {n: p.grad for n, p in copy.named_parameters()} | dict(copy.named_buffers())
        )
    ours, wanted = results
    assert ours["y"].is_contiguous(memory_format=torch.channels_last)
    for name, reference in wanted.items():
        torch.testing.assert_close(ours[name].double(), reference.double(), rtol=1e-4, atol=1e-4 * (1 + reference.abs().max().item()))  # fmt: skip


@pytest.mark.parametrize(
    ("block", "size", "mode"),
    [
        (MBConv(8, 8, 1, 3, 3, False, "relu"), 5, "train"),
        (MBConv(8, 8, 1, 3, 3, False, "relu"), 5, "eval"),
        (MBConv(8, 12, 2, 3, 5, True, "hard_swish"), 5, "batch"),
        (MBConv(6, 6, 1, 3, 7, True, "relu"), 4, "train"),
        (MBConv(6, 6, 1, 1, 3, False, "relu"), 4, "train"),  # nothing to expand
        (MBConv(6, 6, 1, 3, 9, False, "relu"), 4, "train"),  # no kernel for it: plain convolutions, fused BatchNorms
        (ConvNorm(3, 10, 3, 2, activation="relu"), 7, "train"),
        (ConvNorm(5, 9, 1, 2), 5, "eval"),
    ],
)
def test_block(block, size, mode):
    block = randomised(block)
    compare(block, picture(2, block.conv.in_channels if isinstance(block, ConvNorm) else block.depthwise.conv.in_channels // (1 if block.expand is None else 3), size, size), mode)  # fmt: skip


def test_without_gradients_nothing_changes():
    block, x = randomised(MBConv(8, 8, 1, 3, 3, True, "hard_swish")), picture(2, 8, 5, 5)
    with torch.no_grad():
        alone = deepcopy(block)(x)
    torch.testing.assert_close(alone, deepcopy(block)(x).detach())


def test_evaluation_modes():
    """Compare the losses of all three BatchNorm modes with plain PyTorch, and check that the supernet is unchanged."""
    space = Space(
        name="tiny", image_size=8, num_classes=3, ops=["ID", "MB3_K3"], stem=[Fixed(op="CONV_K3", channels=6, stride=2)],
        stages=[Stage(channels=8, repeat=1, stride=2)], head=[Fixed(op="CONV_K1", channels=10)],
    )  # fmt: skip
    net = randomised(Supernet(space))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    images, labels, calibration = picture(6, 3, 8, 8), torch.arange(6) % 3, picture(6, 3, 8, 8)
    for bn in ("batch", "recalibrate", "running"):
        found = []
        for mode in ("on", "off"):
            with engine.using(mode):
                found.append(evaluate_paths(net, [(0,), (1,)], images, labels, bn, calibration=calibration).losses)
        torch.testing.assert_close(*map(torch.as_tensor, found), rtol=1e-4, atol=1e-4)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_training_gives_the_same_weights():
    """Compare weights and running statistics after a few updates with the engine and without it."""
    start = randomised(
        nn.Sequential(ConvNorm(3, 6, 3, 2, activation="relu"), MBConv(6, 6, 1, 3, 3, True, "hard_swish"))
    )
    x, ends = picture(4, 3, 7, 7), []
    for mode in ("on", "off"):
        net = deepcopy(start).train()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
        with engine.using(mode):
            for _ in range(3):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        ends.append(net.state_dict())
    for name, value in ends[1].items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-3, atol=1e-4)
