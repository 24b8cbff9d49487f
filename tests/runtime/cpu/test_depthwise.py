"""Test the quicker gradients of depthwise convolutions against PyTorch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from greedynas.runtime.cpu.depthwise import DepthwiseConvolution, QuickDepthwise
from greedynas.runtime.devices import autocast
from greedynas.runtime.engine_mode import using

CPU = torch.device("cpu")


def gradients(x, weight, quick, **how):
    """Return the output and both gradients of a sum that weighs every output differently."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    if quick:
        with QuickDepthwise():
            out = F.conv2d(x, weight, groups=len(weight), **how)
        assert isinstance(out.grad_fn, DepthwiseConvolution._backward_cls)
    else:
        out = F.conv2d(x, weight, groups=len(weight), **how)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out, x.grad, weight.grad


@settings(max_examples=40, deadline=None)
@given(
    kernel=st.tuples(st.sampled_from([1, 2, 3, 5, 7]), st.sampled_from([2, 3, 5, 7])),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    size=st.tuples(st.integers(7, 12), st.integers(7, 12)),
    last=st.booleans(),
)
def test_gradients_equal_those_of_pytorch_in_float64(kernel, stride, padding, size, last):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, *size, dtype=torch.float64, generator=generator)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    weight = torch.randn(4, 1, *kernel, dtype=torch.float64, generator=generator)
    for ours, theirs in zip(
        gradients(x, weight, True, stride=stride, padding=padding),
        gradients(x, weight, False, stride=stride, padding=padding),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2)])
def test_bf16_gradients_differ_from_float32_by_rounding_only(kernel, stride):
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 16, kernel, stride, kernel // 2, groups=16, bias=False)
    x = torch.randn(8, 16, 14, 14).contiguous(memory_format=torch.channels_last)
    found = []
    for precision in ("bf16", "fp32"):
        leaf = x.clone().requires_grad_()
        conv.zero_grad()
        with autocast(CPU, precision):
            out = conv(leaf)
        assert out.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        out.float().square().mean().backward()
        assert conv.weight.grad.dtype == leaf.grad.dtype == torch.float32
        found.append((leaf.grad, conv.weight.grad.clone()))
    for half, full in zip(*found, strict=True):
        assert (half - full).norm() < 0.01 * full.norm()


def test_only_depthwise_convolutions_in_training_are_replaced():
    x = torch.randn(2, 4, 6, 6)
    layers = [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, groups=4, bias=True),
        nn.Conv2d(4, 8, 3, groups=4, bias=False),
        nn.Conv2d(4, 4, 3, groups=4, bias=False, dilation=2),
        nn.Conv2d(4, 4, 3, groups=4, bias=False, padding="same"),
    ]
    with autocast(CPU, "fp32"):
        for layer in layers:
            assert type(layer(x).grad_fn).__name__ == "ConvolutionBackward0"
        depthwise = nn.Conv2d(4, 4, 3, groups=4, bias=False)
        assert isinstance(depthwise(x).grad_fn, DepthwiseConvolution._backward_cls)
        with torch.no_grad():
            assert depthwise(x).grad_fn is None


def test_engine_off_is_plain_pytorch():
    conv = nn.Conv2d(4, 4, 3, groups=4, bias=False)
    with using("off"), autocast(CPU, "fp32"):
        assert type(conv(torch.randn(2, 4, 6, 6)).grad_fn).__name__ == "ConvolutionBackward0"


def test_frozen_parts_get_no_gradient():
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(4, 1, 3, 3)
    with QuickDepthwise():
        kernel = weight.clone().requires_grad_()
        F.conv2d(x, kernel, padding=1, groups=4).sum().backward()
        image = x.clone().requires_grad_()
        F.conv2d(image, weight, padding=1, groups=4).sum().backward()
    assert kernel.grad is not None
    assert image.grad is not None
    assert x.grad is None
    assert weight.grad is None
