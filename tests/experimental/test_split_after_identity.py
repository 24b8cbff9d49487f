"""Tests of `experimental.split_after_identity`: a layer has separate weights behind an identity."""

import json

import pytest
import torch
from rich.console import Console

from greedynas.experimental.split_after_identity import SplitSupernet
from greedynas.models.model_file import load_network
from greedynas.models.supernet import Supernet
from greedynas.settings.schema import Config, RetrainSettings
from greedynas.spaces.paths import parse_path
from greedynas.spaces.space import load_space
from greedynas.stages.retrain import retrain_stage
from greedynas.stages.search import make_requests, search_stage
from greedynas.stages.train import train_stage
from greedynas.studies.supernets import load_trained, rank_paths
from tests.helpers.retraining import DATA
from tests.helpers.training import SETTINGS, tiny_space


def parameters(net, layer, path):
    return {id(parameter) for parameter in net.blocks(path)[layer].parameters()}


def test_an_identity_changes_the_weights_of_the_next_layer_only():
    net = SplitSupernet(tiny_space())
    assert [len(layer) for layer in net.layers] == [3, 6, 6, 6]
    behind = parameters(net, 1, (0, 1, 1, 1))
    assert behind
    assert not behind & parameters(net, 1, (1, 1, 1, 1))
    assert parameters(net, 1, (2, 1, 1, 1)) == parameters(net, 1, (1, 1, 1, 1))
    assert parameters(net, 2, (0, 1, 1, 1)) == parameters(net, 2, (1, 1, 1, 1))
    assert parameters(net, 3, (0, 1, 0, 1)) == parameters(net, 3, (1, 2, 0, 1))
    images = torch.randn(2, 3, 8, 8)
    before = {path: net(images, path) for path in ((0, 1, 1, 1), (1, 1, 1, 1))}
    with torch.no_grad():
        for parameter in net.blocks((0, 1, 1, 1))[1].parameters():
            parameter.add_(1)
    assert not torch.equal(net(images, (0, 1, 1, 1)), before[0, 1, 1, 1])
    assert torch.equal(net(images, (1, 1, 1, 1)), before[1, 1, 1, 1])


def test_layers_behind_other_ops_are_unchanged():
    net, plain = (kind(tiny_space(["MB2_K3", "MB3_K3_SE"])) for kind in (SplitSupernet, Supernet))
    assert net.state_dict().keys() == plain.state_dict().keys()
    assert net.places((1, 0, 0, 1)) == (1, 0, 0, 1)
    space = load_space("mobilenet")
    path = parse_path("ID " * 21, space)
    assert Supernet(space).places(path) == path
    doubled = SplitSupernet(space)
    assert all(
        len(layer) == len(space.layers[i].ops) * (2 if i and "ID" in space.layers[i - 1].ops else 1)
        for i, layer in enumerate(doubled.layers)
    )


@pytest.mark.usefixtures("one_thread")
def test_a_run_with_inherited_weights(photos, tmp_path):
    folder, quiet = tmp_path / "run", Console(quiet=True)
    data = {**DATA, "source": str(photos)}
    experimental = {"split_after_identity": True, "snapshots": 2}
    config = Config(name="tiny", space=tiny_space(), data=data, train=SETTINGS, experimental=experimental)
    train_stage(config, folder, quiet)
    limits = {"macs": (["60K"], None), "params": (None, None), "latency_ms": (None, None)}
    requests = make_requests(folder, limits, "evolution", (), True, None, ["population=6", "generations=4"], None)
    search_stage(folder, requests, None, quiet)
    found = json.loads((folder / "searches" / "macs-60K" / "search.json").read_text())["found"]
    trained = load_trained(folder, config)
    assert [len(layer) for layer in trained.net.layers] == [3, 6, 6, 6]
    again, _ = rank_paths(trained, [tuple(entry["path"]) for entry in found])
    assert [entry["accuracy"] for entry in found] == pytest.approx(again.accuracies.tolist())
    recipe = RetrainSettings(epochs=1, lr=1e-12, dropout=0, weight_decay=0, inherit=True, batch_size=10)
    retrain_stage(folder, quiet, settings=recipe, arch="1011", name="inherited")
    network, _ = load_network(folder / "models" / "inherited" / "model.safetensors")
    for mine, theirs in zip(network.parameters(), trained.net.subnet((1, 0, 1, 1)).parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.cpu(), rtol=0, atol=1e-9)
