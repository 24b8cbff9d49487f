import pytest

from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.ops import Op, check_shape, is_nothing, parse_op


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ID", Op("ID")),
        ("CONV_K3", Op("CONV", kernel=3)),
        ("MB1_K3", Op("MB", kernel=3, expansion=1)),
        ("MB6_K5_SE", Op("MB", kernel=5, expansion=6, se=True)),
        ("SHUFFLE_K7", Op("SHUFFLE", kernel=7)),
        ("XCEPTION_K3", Op("XCEPTION", kernel=3)),
    ],
)
def test_op_names_are_parsed(name, op):
    assert parse_op(name) == op


@pytest.mark.parametrize(
    "name",
    [
        "",
        "id",
        "MB3",
        "MB_K3",
        "MB3_K4",
        "MB0_K3",
        "MB99_K3",
        "MB3_K99",
        "ID_K3",
        "CONV",
        "SHUFFLE_K3_SE",
        "CONV_K3_SE",
        "MB3_K3 ",
    ],
)
def test_malformed_op_names_are_refused(name):
    with pytest.raises(GreedyNASError, match="op"):
        parse_op(name)


def test_an_identity_does_nothing_only_if_the_shape_stays_the_same():
    assert is_nothing("ID", 8, 8, 1)
    assert not is_nothing("ID", 8, 8, 2)
    assert not is_nothing("ID", 8, 16, 1)
    assert not is_nothing("MB3_K3", 8, 8, 1)


@pytest.mark.parametrize(
    ("op", "shape"),
    [("SHUFFLE_K3", (16, 32, 1)), ("SHUFFLE_K3", (15, 15, 1)), ("XCEPTION_K3", (32, 16, 2)), ("MB3_K3_SE", (1, 8, 1))],
)
def test_impossible_channels_are_refused(op, shape):
    with pytest.raises(GreedyNASError, match=op):
        check_shape(op, *shape)
