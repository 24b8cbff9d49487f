import json
import pickle
import resource
import socket
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import greedynas
from greedynas import GreedyNASError, load_space
from greedynas.models.model_file import find_model, load_network, make_network, read_card, save_network
from greedynas.runtime.files import write_json
from tests.helpers.model_files import NAMES, SE, SHUFFLE, make_card, save_trained


def forge(file, header, body=b"", length=None):
    """Write a safetensors file with this header and return it."""
    data = json.dumps(header).encode() if isinstance(header, dict) else header
    file.write_bytes(struct.pack("<Q", len(data) if length is None else length) + data + body)
    return file


def forge_card(file, **changes):
    """Save a network, change entries of its card, and return the file."""
    save_trained(file)
    size = struct.unpack("<Q", file.read_bytes()[:8])[0]
    header, body = json.loads(file.read_bytes()[8 : 8 + size]), file.read_bytes()[8 + size :]
    card = json.loads(header["__metadata__"]["greedynas"])
    for key, value in changes.items():
        card.pop(key, None) if value is None else card.update({key: value})
    header["__metadata__"]["greedynas"] = json.dumps(card)
    return forge(file, header, body)


def refusal(where):
    with pytest.raises(GreedyNASError) as error:
        load_network(where)
    assert "\n" not in str(error.value).strip()
    return str(error.value)


# Saving and loading


@pytest.mark.parametrize("space", [SE, SHUFFLE, load_space("fashion"), "mobilenetv3_small_050"])
def test_a_loaded_network_equals_the_saved_one(tmp_path, space):
    classes = tuple("abcdefghij") if space is not SE and not isinstance(space, str) else NAMES
    card = make_card(space, class_names=classes)
    network = save_trained(tmp_path / "model.safetensors", card)
    before = torch.random.get_rng_state()
    loaded, found = load_network(tmp_path / "model.safetensors")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert found == card == read_card(tmp_path / "model.safetensors")
    assert not loaded.training
    images = torch.randn(2, card.image_channels, card.image_size, card.image_size)
    with torch.no_grad():
        assert torch.equal(loaded(images), network(images))


def test_load_network_finds_models_of_runs_folders_and_files(tmp_path):
    run = tmp_path / "run"
    for seed, name in enumerate(("first", "second")):
        save_trained(run / "models" / name / "model.safetensors", make_card(name=name), seed)
    save_trained(run / "model.safetensors", make_card(name="old"))
    write_json(run / "arch.json", {"model": "second"})
    assert greedynas.load_network(run)[1].name == "second"
    assert greedynas.load_network(str(run / "models" / "first"))[1].name == "first"
    assert greedynas.load_network(run / "model.safetensors")[1].name == "old"
    (run / "models" / "second" / "model.safetensors").unlink()
    assert greedynas.load_network(run)[1].name == "old"  # the file that export has written to the run directory
    write_json(run / "arch.json", {"model": "../../elsewhere"})
    assert "does not describe a network" in refusal(run)
    assert "no such model" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no trained network (model.safetensors)" in refusal(tmp_path / "empty")
    assert find_model(run / "models" / "first").name == "model.safetensors"


def test_loading_a_network_imports_neither_the_supernet_nor_timm(tmp_path):
    save_trained(tmp_path / "model.safetensors")
    code = (
        "import sys, greedynas, torch; network, card = greedynas.load_network(sys.argv[1]); "
        "assert network(torch.zeros(1, 3, 8, 8)).shape == (1, 3); "
        "sys.exit(any(f'greedynas.{name}' in sys.modules for name in ('supernet', 'training')) or 'timm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], timeout=120).returncode == 0


# Malicious and damaged files


class Payload:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.safetensors", "model.bin"])
@pytest.mark.parametrize("how", ["torch", "old torch", "pickle", "protocol 0"])
def test_loading_executes_no_code_of_a_pickle(tmp_path, name, how):
    marker, file = tmp_path / "executed", tmp_path / name
    if how.endswith("torch"):
        torch.save({"state_dict": Payload(marker)}, file, _use_new_zipfile_serialization=how == "torch")
    else:
        file.write_bytes(pickle.dumps(Payload(marker), protocol=0 if how == "protocol 0" else 4))
    message = refusal(file)
    assert not marker.exists()
    assert str(file) in message
    expected = "not a complete safetensors file" if how == "protocol 0" else "is a pickle, which can execute code"
    assert expected in message


def test_every_truncated_file_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    save_trained(file)
    data = file.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, *range(200, len(data), len(data) // 20), len(data) - 1]:
        file.write_bytes(data[:length])
        assert "not a complete safetensors file" in refusal(file)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    file = tmp_path_factory.mktemp("good") / "model.safetensors"
    save_trained(file)
    return file.read_bytes()


@given(changes=st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=60)
def test_a_damaged_file_is_refused_or_still_loads(good, tmp_path_factory, changes):
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    data = bytearray(good)
    for place, value in changes:
        data[place] = value
    file.write_bytes(data)
    message = ""
    try:
        load_network(file)
    except GreedyNASError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}},
        {"w": {"dtype": "F32", "shape": [2**63, 2**63], "data_offsets": [0, 0]}},
        {"w": {"dtype": "F32", "shape": [0, 2**60], "data_offsets": [0, 0]}},
        {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"w": {"dtype": "PY", "shape": [1], "data_offsets": [0, 4]}},
        {"__metadata__": {"greedynas": "[" * 100_000}},
        {"__metadata__": {"greedynas": "{}"}},
        {"__metadata__": {"greedynas": "null"}},
        {"__metadata__": {"greedynas": '{"image_size": ' + "9" * 5000 + "}"}},
        {},
        b"not JSON at all",
        b"\xff\xfe",
    ],
)
def test_forged_headers_are_refused_with_a_short_message(tmp_path, header):
    message = refusal(forge(tmp_path / "model.safetensors", header))
    assert len(message) < 500


def test_forged_lengths_are_refused(tmp_path):
    for length in (2**63, 2**40, 10**9):
        refusal(forge(tmp_path / "model.safetensors", {}, length=length))
    card = {"__metadata__": {"greedynas": json.dumps({"name": "x" * (17 * 2**20)})}}
    assert "is too long" in refusal(forge(tmp_path / "model.safetensors", card))


@pytest.mark.parametrize("name", ["hf-hub:someone/model", "local-dir:x", "hf_hub:x", "../x", "https://x", "a b", ""])
def test_timm_names_that_would_download_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a connection"))
    file = forge_card(tmp_path / "model.safetensors", timm=name, space=None, path=None)
    assert "timm" in refusal(file)


def test_unknown_timm_names_are_refused(tmp_path):
    file = forge_card(tmp_path / "model.safetensors", timm="mobilenetv9", space=None, path=None)
    assert "has no model 'mobilenetv9'" in refusal(file)
    forge_card(file, timm="mobilenetv2_100.not_a_tag", space=None, path=None)
    assert "timm cannot build" in refusal(file)


def test_a_forged_network_takes_no_memory(tmp_path):
    """A card may describe as many parameters as a space can have, or more, while the file has few weights."""
    own = json.loads(SE.model_dump_json(exclude_none=True))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large = {**own, "ops": ["MB12_K7"], "stages": [{"channels": 1024, "repeat": 40}]}
    file = forge_card(tmp_path / "model.safetensors", space=large, path=[0] * 40)
    assert "has fewer weights than its network needs" in refusal(file)
    forge_card(file, space={**large, "stages": [{"channels": 8192, "repeat": 64}] * 64}, path=[0] * 4096)
    assert "has more than 256 layers" in refusal(file)
    forge_card(file, timm="eva_giant_patch14_224", space=None, path=None)
    assert "do not fit its network" in refusal(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class_names": list("abcde")}, "a network with 3 outputs cannot have 5 class names"),
        (
            {
                "class_names": list("abcde"),
                "space": json.loads(SE.adapt(num_classes=5).model_dump_json(exclude_none=True)),
            },
            "are for 3 classes, but its card names 5",
        ),
        ({"path": [0, 0, 0, 0]}, "do not fit its network|fewer weights"),
        ({"path": [1, 2, 3]}, "a path of tiny has 4 ops"),
        ({"crop_fraction": 1e-9}, "crop_fraction 1e-09 is too small"),
        ({"std": [1, 0, 1]}, "std.1"),
        ({"mean": [0, float("nan"), 0]}, "mean.1"),
        ({"mean": [0]}, "must have 3 values"),
        ({"image_size": 16}, "the image size or channels of the card are not those of its space"),
        ({"timm": "mobilenetv2_100"}, "a space and a path, or a timm model"),
        ({"extra": 1}, "extra"),
    ],
)
def test_cards_that_do_not_match_the_weights_are_refused(tmp_path, changes, message):
    with pytest.raises(GreedyNASError, match=message):
        load_network(forge_card(tmp_path / "model.safetensors", **changes))


def test_timm_weights_for_another_number_of_classes_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    card = make_card("mobilenetv3_small_050")
    save_network(file, make_network(card), card.model_copy(update={"class_names": tuple("abcde")}))
    assert "are for 3 classes, but its card names 5" in refusal(file)
