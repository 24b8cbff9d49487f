import json
import subprocess
import sys
import warnings

import pytest
import timm
import torch

from greedynas import (
    Fixed,
    GreedyNASError,
    Space,
    Stage,
    Supernet,
    build_network,
    load_space,
    register_timm_models,
)
from greedynas.models.network import Network, feature_info
from greedynas.runtime.files import write_json
from tests.helpers.model_files import NAMES, SE, SHUFFLE, make_card, save_trained

register_timm_models()

KNOWN = ("greedynas_a", "greedynas_b", "greedynas_c", "proxyless_r")


def run(code):
    """Run code in a separate process in which every warning is an error."""
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)


def same(first, second, images):
    with torch.no_grad():
        return torch.equal(first.eval()(images), second.eval()(images))


# Registration


def test_importing_greedynas_imports_neither_timm_nor_torch():
    done = run("import sys, greedynas; sys.exit('timm' in sys.modules or 'torch' in sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("imports", ["import greedynas, timm", "import timm, greedynas"])
def test_timm_lists_our_networks_after_registration_in_either_import_order(imports):
    listed = "print(*timm.list_models('greedynas*'), *timm.list_models('proxyless_r'))"
    done = run(f"{imports}; {listed}; greedynas.register_timm_models(); greedynas.register_timm_models(); {listed}")
    assert done.stderr == ""
    names = "greedynas greedynas_a greedynas_b greedynas_c proxyless_r"
    assert done.stdout.splitlines() == ["", names]


def test_importing_greedynas_installs_no_import_hook():
    done = run("import sys; before = list(sys.meta_path); import greedynas; print(sys.meta_path == before)")
    assert done.stdout.strip() == "True"


# The known networks


@pytest.mark.parametrize("name", KNOWN)
def test_timm_creates_known_networks(name):
    network = timm.create_model(name, num_classes=7)
    assert isinstance(network, Network)
    ours = build_network(name.replace("_", "-"), num_classes=7)
    assert {key: value.shape for key, value in network.state_dict().items()} == {
        key: value.shape for key, value in ours.state_dict().items()
    }
    assert (network.num_classes, network.num_features) == (7, 1280)
    assert network.pretrained_cfg["input_size"] == (3, 224, 224)
    assert network.default_cfg is network.pretrained_cfg


@pytest.mark.parametrize("name", ["greedynas_c", "proxyless_r"])
def test_backbones_have_five_feature_maps(name):
    backbone = timm.create_model(name, features_only=True)
    assert backbone.feature_info.reduction() == [2, 4, 8, 16, 32]
    assert backbone.feature_info.channels() == [16, 32, 40, 96, 320]
    with torch.no_grad():
        maps = backbone.eval()(torch.randn(1, 3, 96, 64))
    assert [tuple(one.shape) for one in maps] == [
        (1, channels, 96 // stride, 64 // stride)
        for channels, stride in ((16, 2), (32, 4), (40, 8), (96, 16), (320, 32))
    ]


def test_feature_maps_equal_the_outputs_of_the_stages():
    torch.manual_seed(0)
    whole = timm.create_model("greedynas_c").eval()
    torch.manual_seed(0)
    backbone = timm.create_model("greedynas_c", features_only=True, out_indices=(1, 4)).eval()
    assert backbone.feature_info.reduction() == [4, 32]
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        low, high = backbone(images)
        stem = whole.stem(images)
        assert torch.equal(low, whole.stages[0](stem))
        assert torch.equal(high, whole.stages(stem))


@pytest.mark.parametrize(
    ("space", "strides", "channels"),
    [
        ("macro", [1, 2, 4, 8], [32, 64, 128, 256]),
        ("fashion", [2, 4, 8], [8, 16, 32]),
        ("shufflenet", [2, 4, 8, 16, 32], [16, 64, 160, 320, 640]),
    ],
)
def test_feature_maps_of_other_spaces_have_their_strides(space, strides, channels):
    home = load_space(space)
    arch = [0] * len(home.layers)
    backbone = timm.create_model("greedynas", arch=arch, space=space, features_only=True).eval()
    assert (backbone.feature_info.reduction(), backbone.feature_info.channels()) == (strides, channels)
    with torch.no_grad():
        maps = backbone(torch.randn(1, home.image_channels, 64, 64))
    assert [(one.shape[1], 64 // one.shape[2]) for one in maps] == list(zip(channels, strides, strict=True))


def test_a_stage_without_blocks_still_has_its_features():
    """Identities that change no shape are left out, so the feature map of such a stage is its input."""
    space = Space(
        name="thin",
        ops=["ID", "MB3_K3"],
        stem=[Fixed(op="CONV_K3", channels=8, stride=2)],
        stages=[Stage(channels=8, repeat=2), Stage(channels=16, stride=2)],
    )
    backbone = timm.create_model("greedynas", arch="000", space=space, features_only=True, in_chans=1)
    assert [one["module"] for one in feature_info(space)] == ["stages.0", "stages.1"]
    assert [tuple(one.shape) for one in backbone(torch.randn(1, 1, 16, 16))] == [(1, 8, 8, 8), (1, 16, 4, 4)]


def test_subnets_describe_their_feature_maps():
    net = Supernet(SE)
    assert net.subnet([1, 1, 1, 1]).feature_info == feature_info(SE)


# timm's methods


def test_reset_classifier_and_pooling():
    network = timm.create_model("greedynas", arch="1111", space=SE, num_classes=4, drop_rate=0.5).eval()
    images = torch.randn(2, 3, 8, 8)
    features = network.forward_features(images)
    assert features.shape == (2, 16, 2, 2)
    assert torch.equal(network.forward_head(features), network(images))
    assert torch.equal(network.forward_head(features, pre_logits=True), features.mean((2, 3)))
    assert network.get_classifier() is network.classifier
    assert network.dropout.p == 0.5
    network.reset_classifier(9)
    assert (network(images).shape, network.num_classes) == ((2, 9), 9)
    assert set(network.state_dict()) == set(build_network("1111", SE).state_dict())
    network.reset_classifier(6, "max")
    assert torch.allclose(network.forward_head(features, pre_logits=True), features.amax((2, 3)))
    network.reset_classifier(6, "catavgmax")
    assert network(images).shape == (2, 6)
    network.reset_classifier(0)
    assert torch.equal(network(images), features.mean((2, 3)))
    network.reset_classifier(0, "")
    assert torch.equal(network(images), features)
    assert timm.create_model("greedynas", arch="1111", space=SE, num_classes=0).eval()(images).shape == (2, 16)


def test_a_new_classifier_has_the_precision_and_mode_of_the_network():
    network = timm.create_model("greedynas", arch="1111", space=SE).double().eval()
    network.reset_classifier(5)
    assert network.classifier.weight.dtype == torch.float64
    assert not network.classifier.training


def test_grad_checkpointing_gives_the_same_gradients():
    images = torch.randn(4, 3, 8, 8)
    gradients = []
    for enable in (False, True):
        network = build_network("1212", SE, generator=torch.Generator().manual_seed(0)).train()
        network.set_grad_checkpointing(enable)
        network(images).square().sum().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.allclose(first, second, atol=1e-6) for first, second in zip(*gradients, strict=True))


def test_timm_scales_learning_rates_by_depth():
    from timm.optim import create_optimizer_v2

    optimizer = create_optimizer_v2(build_network("1111", SE), opt="sgd", lr=0.1, layer_decay=0.5)
    scales = sorted({group["lr_scale"] for group in optimizer.param_groups})
    assert len(scales) >= 4
    assert scales[-1] == 1.0


# Trained networks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a run directory with a trained network in `models/best`."""
    home = tmp_path_factory.mktemp("run")
    save_trained(home / "models" / "best" / "model.safetensors", make_card(crop_fraction=0.8))
    card = make_card()
    arch = {"model": "best", "space": "tiny", "path": list(card.path), "num_classes": 3, "image_size": 8}
    write_json(home / "arch.json", arch)
    write_json(home / "models" / "best" / "arch.json", arch)
    return home


@pytest.mark.parametrize("where", ["", "models/best", "models/best/model.safetensors"])
def test_timm_creates_a_trained_network_from_its_folder_or_file(folder, where):
    from greedynas import load_network

    images = torch.randn(2, 3, 8, 8)
    network = timm.create_model("greedynas", arch=str(folder / where), pretrained=True)
    assert same(network, load_network(folder)[0], images)
    about = timm.data.resolve_model_data_config(network)
    assert (about["input_size"], about["crop_pct"], about["interpolation"]) == ((3, 8, 8), 0.8, "bilinear")
    assert network.pretrained_cfg["label_names"] == NAMES


def test_timms_own_loader_reads_the_exported_weights(folder):
    from greedynas import load_network

    file = folder / "models" / "best" / "model.safetensors"
    expected, card = load_network(folder)
    images = torch.randn(2, 3, 8, 8)
    network = timm.create_model("greedynas", arch=card.path, space=SE, num_classes=3, checkpoint_path=str(file))
    assert same(network, expected, images)
    arch = folder / "models" / "best" / "arch.json"
    network = timm.create_model("greedynas", arch=arch, space=SE, checkpoint_path=str(file))
    assert same(network, expected, images)


def test_an_arch_json_gives_the_canonical_path(tmp_path):
    """Retraining builds the canonical path, whose blocks may be in other stages than those of the evaluated path."""
    stem = [Fixed(op="CONV_K3", channels=8, stride=2)]
    space = Space(name="flat", ops=["ID", "MB3_K3"], stem=stem, stages=[Stage(channels=8), Stage(channels=8)])
    write_json(tmp_path / "arch.json", {"space": "flat", "path": [0, 1], "canonical_path": [1, 0]})
    network = timm.create_model("greedynas", arch=tmp_path / "arch.json", space=space)
    assert set(network.state_dict()) == set(build_network([1, 0], space).state_dict())
    assert set(network.state_dict()) != set(build_network([0, 1], space).state_dict())


def test_a_changed_number_of_classes_or_channels_keeps_all_other_weights(folder):
    from greedynas import load_network

    expected, _ = load_network(folder)
    network = timm.create_model("greedynas", arch=folder, pretrained=True, num_classes=11).eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert network(images).shape == (2, 11)
        assert torch.equal(network.forward_features(images), expected.forward_features(images))
        backbone = timm.create_model("greedynas", arch=folder, pretrained=True, features_only=True).eval()
        assert torch.equal(backbone(images)[-1], expected.stages(expected.stem(images)))
    for channels in (1, 4):
        network = timm.create_model("greedynas", arch=folder, pretrained=True, in_chans=channels)
        assert torch.equal(network.stages[0][0].project.conv.weight, expected.stages[0][0].project.conv.weight)
        assert network.stem[0].conv.weight.shape[1] == channels


def test_a_network_for_grey_images_works_on_coloured_ones(tmp_path):
    card = make_card(load_space("fashion"), class_names=tuple("abcdefghij"))
    grey = save_trained(tmp_path / "model.safetensors", card)
    network = timm.create_model("greedynas", arch=tmp_path, pretrained=True, in_chans=3).eval()
    images = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert torch.allclose(network(images.repeat(1, 3, 1, 1)), grey(images), atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name the network with arch="),
        ({"arch": "greedynas-z"}, "unknown network 'greedynas-z'"),
        ({"arch": "1111"}, "name the space"),
        ({"arch": "12", "space": "macro"}, "a path of macro has 8 ops"),
        ({"arch": "greedynas-a", "space": "macro"}, "is a network of mobilenet-se, not of macro"),
        ({"arch": "nowhere/model.safetensors"}, "no such model"),
        ({"arch": "2" * 8, "space": "macro", "in_chans": 1000}, "image_channels"),
    ],
)
def test_invalid_architectures_are_refused(arguments, message):
    with pytest.raises(GreedyNASError, match=message):
        timm.create_model("greedynas", **arguments)


def test_invalid_files_are_refused(tmp_path, folder):
    def refused(file, content=None):
        if content is not None:
            file.write_text(content)
        with pytest.raises(GreedyNASError) as error:
            timm.create_model("greedynas", arch=file)
        return str(error.value)

    assert "the space 'tiny' of" in refused(folder / "models" / "best" / "arch.json")
    assert "cannot be read" in refused(tmp_path / "arch.json", "{")
    assert "cannot be read" in refused(tmp_path / "arch.json", "[1, 2]")
    assert "does not describe a path" in refused(tmp_path / "arch.json", json.dumps({"timm": "mobilenetv2_100"}))
    assert "does not describe a path" in refused(tmp_path / "arch.json", json.dumps({"path": [1], "space": {"a": 1}}))
    assert "neither" in refused(tmp_path / "model.pt", "x")
    save_trained(tmp_path / "model.safetensors", make_card("mobilenetv3_small_050"))
    assert "is timm's own mobilenetv3_small_050" in refused(tmp_path)
    with pytest.raises(RuntimeError, match="No pretrained weights exist for greedynas_a"):
        timm.create_model("greedynas_a", pretrained=True)


def test_the_card_beside_the_weights_is_an_architecture(tmp_path):
    (tmp_path / "model.json").write_text(make_card(SHUFFLE).model_dump_json())
    network = timm.create_model("greedynas", arch=tmp_path / "model.json").eval()
    assert network(torch.randn(1, 3, 8, 8)).shape == (1, 3)


def test_timm_creates_networks_without_warnings(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timm.create_model("greedynas", arch=folder, pretrained=True, features_only=True)
