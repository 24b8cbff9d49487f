"""Blocks of pretrained networks: their exact costs, and what is no smaller version of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from greedynas import GreedyNASError
from greedynas.models.base_blocks import make_base_block
from greedynas.models.shared_supernet import SharedLayer
from greedynas.spaces.base_block import BaseBlock, expansion_name, op_name
from greedynas.spaces.ops import parse_op
from greedynas.spaces.space import Layer


@st.composite
def bottlenecks(draw):
    """Draw a layer around a bottleneck of a pretrained network, whose ops are the block and smaller versions of it."""
    in_channels, out_channels = draw(st.integers(3, 40)), draw(st.integers(3, 40))
    stride, expands = draw(st.integers(1, 2)), draw(st.booleans())
    hidden = draw(st.integers(in_channels, 6 * in_channels)) if expands else in_channels
    kernel = draw(st.sampled_from([3, 5, 7]))
    block = BaseBlock(
        kernel=kernel,
        hidden=hidden,
        expands=expands,
        squeeze=draw(st.sampled_from([0, 1, 5, 16])),
        residual=stride == 1 and in_channels == out_channels,
        activation=draw(st.sampled_from(["relu", "relu6", "silu", "hard_swish", "gelu"])),
        squeeze_activation=draw(st.sampled_from(["relu", "silu"])),
        gate=draw(st.sampled_from(["sigmoid", "hard_sigmoid"])),
        same_padding=draw(st.booleans()),
    )
    narrow = draw(st.integers(max(1, hidden // 4), hidden)) if expands else hidden
    ops = [op_name(hidden, in_channels, kernel, block.squeeze > 0)]
    ops += [op_name(narrow, in_channels, draw(st.sampled_from([3, kernel])), block.squeeze > 0 and draw(st.booleans()))]
    names = tuple(dict.fromkeys([*(["ID"] if block.residual else []), *ops]))
    return Layer("stage 1", names, in_channels, out_channels, stride, draw(st.integers(1, 15)), block)


@given(bottlenecks())
def test_costs_and_shapes_are_those_of_the_built_blocks(layer):
    for op in layer.ops:
        layer.block.check(op, layer.in_channels)
        if layer.is_nothing(op):
            assert layer.cost(op) == (0, 0)
            continue
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            block = make_base_block(op, layer).eval()
            out = block(torch.empty(1, layer.in_channels, layer.in_size, layer.in_size))
        assert out.shape == (1, layer.out_channels, layer.out_size, layer.out_size)
        counted = counter.get_total_flops() // 2, sum(parameter.numel() for parameter in block.parameters())
        assert layer.cost(op) == counted


@given(bottlenecks())
def test_parameters_of_a_shared_layer_are_those_of_the_built_layer(layer):
    with torch.device("meta"):
        built = SharedLayer(layer, "relu", own_projections=True)
    count = layer.block.shared_params(layer.ops, layer.in_channels, layer.out_channels)
    assert count == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(("normalised", "biased"), [(True, True), (False, True), (False, False)])
def test_costs_of_plain_convolutions(normalised, biased):
    block = BaseBlock(kernel=3, normalised=normalised, biased=biased)
    layer = Layer("stem", ("CONV_K3",), 3, 8, 2, 9, block)
    built = make_base_block("CONV_K3", layer)
    assert layer.cost("CONV_K3") == (25 * 27 * 8, sum(parameter.numel() for parameter in built.parameters()))
    assert layer.cost("CONV_K3").params == 27 * 8 + (16 if normalised else 8 * biased)


@given(st.integers(1, 500), st.data())
def test_the_name_of_an_op_gives_back_its_channels(in_channels, data):
    hidden = data.draw(st.integers(-(-in_channels // 10), 16 * in_channels))
    assert parse_op(op_name(hidden, in_channels, 5, False)).hidden(in_channels) == hidden
    short = data.draw(st.integers(1, 9))
    assert expansion_name(short * in_channels, in_channels) == str(short)


BLOCK = {"kernel": 5, "hidden": 48, "squeeze": 12, "residual": False}


@pytest.mark.parametrize(
    ("changes", "op", "message"),
    [
        ({}, "ID", "ID cannot replace a block without a residual"),
        ({}, "MB3_K7", "MB3_K7 is no smaller version of a MB block with kernel 5"),
        ({}, "CONV_K3", "CONV_K3 is no smaller version"),
        ({}, "SHUFFLE_K3", "SHUFFLE_K3 is no smaller version"),
        ({}, "MB4_K5", "MB4_K5 is wider than the block of 48 channels"),
        ({"squeeze": 0}, "MB3_K5_SE", "MB3_K5_SE has SE, which its block does not have"),
        ({"expands": False, "hidden": 16}, "MB0.5_K3", "MB0.5_K3 would need an expansion"),
        ({"hidden": None}, "MB3_K3", "MB3_K3 is no smaller version of a CONV block"),
    ],
)
def test_an_op_that_is_no_smaller_version_is_refused(changes, op, message):
    block = BaseBlock(**{**BLOCK, **changes})
    with pytest.raises(GreedyNASError, match=message):
        block.check(op, 16)
    BaseBlock(**BLOCK).check("MB3_K5_SE", 16)
    BaseBlock(**{**BLOCK, "residual": True}).check("ID", 16)
