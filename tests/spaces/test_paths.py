import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedynas import (
    Fixed,
    GreedyNASError,
    Space,
    Stage,
    canonical,
    compact,
    known_networks,
    load_space,
    op_names,
    parse_path,
)
from greedynas.spaces.paths import pretty
from greedynas.spaces.zoo import resolve
from tests.helpers.figures import FIGURES
from tests.helpers.strategies import paths_of, spaces


@given(st.data())
def test_every_form_is_parsed_back_to_the_path(data):
    space = data.draw(spaces())
    path = data.draw(paths_of(space))
    forms = [
        path,
        list(path),
        np.array(path),
        compact(path, space),
        " ".join(op_names(path, space)),
        pretty(path, space),
    ]
    forms += [
        json.dumps(list(path)),
        json.loads(json.dumps(list(path))),
        ",".join(map(str, path)),
        op_names(path, space),
    ]
    for form in forms:
        assert parse_path(form, space) == path
    assert all(type(op) is int for op in parse_path(np.array(path), space))


def test_the_compact_form_has_commas_if_a_layer_has_more_than_ten_ops():
    assert compact((2, 2, 2, 1, 2, 2, 0, 2), load_space("macro")) == "22212202"
    assert compact((12,) * 21, load_space("mobilenet-se")) == ",".join(["12"] * 21)


def test_known_networks_have_their_published_costs():
    assert set(known_networks()) == set(FIGURES)
    for name, network in known_networks().items():
        costs = load_space(network.space).costs([network.path])
        assert (costs.params[0], costs.macs[0]) == FIGURES[name]
        assert resolve(name) == (load_space(network.space), network.path)


def test_macro_has_3969_networks():
    space = load_space("macro")
    assert len({canonical(path, space) for path in itertools.product(range(3), repeat=8)}) == 3969


def network_of(path, space):
    """Return the ops that are computed, in order, with their shapes: the definition of "the same network"."""
    layers = zip(space.layers, op_names(path, space), strict=True)
    return [
        (op, layer.in_channels, layer.out_channels, layer.stride) for layer, op in layers if not layer.is_nothing(op)
    ]


@given(st.data())
def test_the_canonical_form_is_the_same_network_and_unique(data):
    space = data.draw(spaces())
    path, other = data.draw(paths_of(space)), data.draw(paths_of(space))
    form = canonical(path, space)
    assert network_of(form, space) == network_of(path, space)
    assert canonical(form, space) == form
    assert (canonical(other, space) == form) == (network_of(other, space) == network_of(path, space))
    assert space.costs([form]).macs[0] == space.costs([path]).macs[0]


def test_the_canonical_form_with_different_ops_in_neighbouring_layers():
    space = Space(
        name="uneven",
        stem=[Fixed(op="CONV_K3", channels=8)],
        ops=["MB3_K3", "ID"],
        stages=[
            Stage(channels=8),
            Stage(channels=8, ops=["ID", "MB6_K3"]),
            Stage(channels=8, ops=["MB6_K3", "MB3_K3", "ID"]),
        ],
        image_size=8,
    )
    # MB6_K3 is not offered by the first layer, so it goes to the second and not to the third.
    assert op_names(canonical(parse_path("ID ID MB6_K3", space), space), space) == ["ID", "MB6_K3", "ID"]
    forms = {canonical(path, space) for path in itertools.product(*(range(n) for n in space.num_ops))}
    networks = {tuple(network_of(path, space)) for path in itertools.product(*(range(n) for n in space.num_ops))}
    assert len(forms) == len(networks)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("222", "has 8 ops, got 3"),
        ("22222223", "layer 7 of macro has no op 3"),
        ("ID " * 7 + "MB3_K7", "MB3_K7 is not in layer 7"),
        ("ID " * 7 + "MB3K3", "did you mean 'MB3_K3'"),
        ("", "got 0"),
        ([0] * 9, "got 9"),
        ([True] * 8, "index or a name"),
        ([0.0] * 8, "index or a name"),
        (None, "sequence"),
        ("٢" * 8, "got 1"),
        ("9" * 100_000, "got 100000"),
    ],
)
def test_wrong_paths_are_refused(path, message):
    with pytest.raises(GreedyNASError, match=message):
        parse_path(path, load_space("macro"))


@pytest.mark.parametrize(
    ("path", "space", "message"),
    [
        ("greedynas-d", None, "did you mean 'greedynas-c'"),
        ("greedynas-d", "mobilenet-se", "did you mean 'greedynas-c'"),
        ("greedynas-a", "mobilenet", "network of mobilenet-se"),
        ("22212202", None, "--space"),
    ],
)
def test_wrong_names_of_networks_are_refused(path, space, message):
    with pytest.raises(GreedyNASError, match=message):
        resolve(path, space and load_space(space))
