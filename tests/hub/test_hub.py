"""Publishing and fetching networks, on a local stand-in of the hub, and the round trip through timm."""

import html
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml

import greedynas
from greedynas import GreedyNASError
from greedynas.hub.model_card import Statements, model_card
from greedynas.hub.publishing import check_repository, push
from greedynas.models.model_file import load_network, save_network
from greedynas.models.timm_models import describe_arch
from greedynas.reporting.facts import read_facts
from tests.helpers import report_runs as runs
from tests.helpers.hub_server import Hub
from tests.helpers.model_files import make_card, trained_network
from tests.helpers.paths import ROOT
from tests.helpers.training import tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")
TOKEN = "hf_" + "s" * 34
CLASSES = ["<script>alert(1)</script>", "bee|[x](javascript:alert(2))", "猫"]


@pytest.fixture(scope="module")
def hub():
    server = Hub(TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory, one_thread):
    """Make a run with a found network that has weights and hostile class names."""
    folder = runs.trained(tmp_path_factory.mktemp("hub") / "run", photos)
    runs.searched(folder, macs=(["60K"], None))
    home = runs.add_model(folder, "macs-60K", chosen=True, class_names=CLASSES)
    arch = json.loads((home / "arch.json").read_text())
    card = make_card(tiny_space(), tuple(arch["canonical_path"]), CLASSES)
    network = trained_network(card)
    save_network(home / "model.safetensors", network, card)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def command(hub, folder, *arguments, token=TOKEN, code=None):
    """Call the command line, or Python code, in a process with its own home on the stand-in."""
    secret = {} if token is None else {"HF_TOKEN": token}
    home = {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", **home, **secret}
    start = ["-c", code] if code else ["-m", "greedynas", *map(str, arguments)]
    return subprocess.run(
        [sys.executable, *start], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


IN_TIMM = """
import sys, json, torch, timm, greedynas
greedynas.register_timm_models()
model = timm.create_model(sys.argv[1] if len(sys.argv) > 1 else "hf-hub:ada/photos", pretrained=True).eval()
x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
print(json.dumps({"logits": model(x).tolist(), "mean": model.pretrained_cfg["mean"], "classes": model.pretrained_cfg.get("label_names")}))
"""
PLAIN = """
import sys, json, torch
from huggingface_hub import hf_hub_download
model = torch.export.load(hf_hub_download("ada/photos", "model.pt2")).module()
x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
print(json.dumps({"logits": model(x).tolist(), "greedynas": "greedynas" in sys.modules}))
"""


def logits_of(network):
    x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
    with torch.no_grad():
        return network(x).numpy()


def test_push_pull_and_timm_on_another_machine(run, hub, tmp_path):
    expected = logits_of(load_network(run)[0])
    done = command(hub, tmp_path, "push", run, "ada/photos", "--license", "mit", "--data-license", "own", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert facts["address"] == f"{hub.address}/ada/photos"
    assert set(hub.repositories["ada/photos"]) == {
        "README.md",
        "config.json",
        "model.safetensors",
        "model.pt2",
        "network.svg",
    }
    shutil.rmtree(run)  # the machines that follow have no run directory
    there = tmp_path / "there"
    there.mkdir()
    timm_there = command(hub, there, code=IN_TIMM, token=None)
    assert timm_there.returncode == 0, timm_there.stderr
    found = json.loads(timm_there.stdout.splitlines()[-1])
    np.testing.assert_allclose(found["logits"], expected, atol=1e-5)
    assert found["classes"] == CLASSES
    plain = command(hub, there, code=PLAIN, token=None)
    assert plain.returncode == 0, plain.stderr
    found = json.loads(plain.stdout.splitlines()[-1])
    np.testing.assert_allclose(found["logits"], expected, atol=1e-4)
    assert found["greedynas"] is False
    pulled = command(hub, there, "pull", "ada/photos", "--out", "photos", "--json", token=None)
    assert (pulled.returncode, pulled.stderr.count("\n")) == (0, 0), pulled.stderr
    assert json.loads(pulled.stdout)["classes"] == CLASSES
    assert not (there / "photos" / "model.pt2").exists()  # a program is not fetched
    np.testing.assert_allclose(logits_of(load_network(there / "photos")[0]), expected)
    # The token is in no output and in no file.
    texts = [one.stdout + one.stderr for one in (done, timm_there, plain, pulled)]
    assert not any(TOKEN in text for text in texts)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(TOKEN.encode() in file.read_bytes() for file in files)
    assert any(header == f"Bearer {TOKEN}" for _, _, header in hub.seen)


def test_refusals_are_one_line_without_the_token(run, hub, tmp_path):
    for arguments, token, words in (
        (("push", run, "ada/refused"), "hf_wrong", "HTTP 401): log in"),
        (("pull", "ada/missing"), None, "no repository ada/missing"),
    ):
        done = command(hub, tmp_path, *arguments, token=token)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: the hub ")
        assert done.stderr.count("\n") == 1
        assert words in done.stderr
        assert "hf_wrong" not in done.stderr


@pytest.mark.parametrize("name", ["photos", "a/b/c", "../x", "a/..", "hf-hub:a/b", "a b/c", "", "a/b\n", "a--b/c"])
def test_other_names_are_not_repositories(name):
    with pytest.raises(GreedyNASError, match="is not a repository"):
        check_repository(name)


def test_only_trained_networks_are_published(run):
    with pytest.raises(GreedyNASError, match="has no network nosuch"):
        push(run, "ada/photos", model="nosuch", upload=False)
    (run / "models" / "macs-60K" / "test.json").unlink()
    with pytest.raises(GreedyNASError, match="is not trained yet"):
        push(run, "ada/photos", upload=False)


def test_the_card_renders_and_executes_nothing(run):
    facts = read_facts(run)
    card = load_network(run)[1]
    text = model_card(facts, facts.chosen, card, "ada/photos", Statements("mit", "own *photographs*"))
    _, head, body = text.split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert (metadata["license"], metadata["library_name"]) == ("mit", "timm")
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.75
    assert "75.0%" in body
    assert "own \\*photographs\\*" in body
    assert "<script" not in body
    markdown = pytest.importorskip("markdown")
    page = markdown.markdown(body, extensions=["tables", "fenced_code"])
    assert page.count("<table>") >= 1
    assert "<script" not in page
    assert 'href="javascript' not in page


def test_the_users_words_are_shown_as_they_are(run):
    """Characters were escaped twice, and renderers make links of bare addresses."""
    facts = read_facts(run)
    words = "<b>mine</b> & #1 from https://example.org, www.example.org, @ada"
    text = model_card(facts, facts.chosen, load_network(run)[1], "ada/photos", Statements("mit", words))
    (line,) = [one for one in text.splitlines() if "stated by the publisher" in one]
    assert "https://" not in line
    assert "www." not in line
    assert "@" not in line
    markdown = pytest.importorskip("markdown")
    shown = html.unescape(re.sub(r"</?(p|ul|li)>", "", markdown.markdown(line))).strip()
    assert shown.endswith(f"{words}.")


def test_the_program_names_no_folder_of_this_machine(run):
    push(run, "ada/photos", upload=False)
    with zipfile.ZipFile(run / "hub" / "macs-60K" / "model.pt2") as archive:
        texts = [archive.read(name) for name in archive.namelist()]
    for place in (str(ROOT), str(Path(torch.__file__).parent)):
        assert not any(place.encode() in text for text in texts)


def test_a_hub_that_cannot_be_reached_is_one_line(run, hub, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    for arguments in (("push", run, "ada/photos"), ("pull", "ada/photos", "--out", tmp_path / "there")):
        done = command(SimpleNamespace(address=address), tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: the hub cannot be reached")
        assert done.stderr.count("\n") == 1


def test_a_withheld_accuracy_stays_withheld(run):
    file = run / "models" / "macs-60K" / "test.json"
    test = json.loads(file.read_text()) | {"withheld": True, "caveats": ["half of the test images are copies"]}
    file.write_text(json.dumps(test))
    facts = read_facts(run)
    text = model_card(facts, facts.chosen, load_network(run)[1], "ada/photos", Statements())
    assert "75" not in text.partition("## How to use")[0].replace("model-index", "")
    assert "half of the test images are copies" in text


def test_save_for_hf_round_trip_without_the_original_folder(run, tmp_path):
    """timm wrote the local path as `arch`, which no other machine has."""
    greedynas.register_timm_models()
    model = timm.create_model("greedynas", arch=str(run), pretrained=True).eval()
    expected = logits_of(model)
    timm.models.save_for_hf(model, tmp_path / "saved", safe_serialization=True)
    text = (tmp_path / "saved" / "config.json").read_text()
    assert str(run) not in text
    shutil.rmtree(run)
    again = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    np.testing.assert_array_equal(logits_of(again), expected)
    fewer = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True, num_classes=5)
    assert fewer.num_classes == 5
    timm.models.save_for_hf(fewer, tmp_path / "fewer", safe_serialization=True)  # a saved model can be saved again
    assert timm.create_model(f"local-dir:{tmp_path / 'fewer'}", pretrained=True).num_classes == 5


def test_an_architecture_as_data_is_checked():
    greedynas.register_timm_models()
    space = greedynas.load_space("macro")
    arch = describe_arch(space, (2, 2, 2, 1, 2, 2, 0, 2))
    assert timm.create_model("greedynas", arch=arch).num_classes == space.num_classes
    for wrong in (
        {},
        {"space": "/etc/passwd", "path": []},
        {**arch, "path": [9] * 8},
        {**arch, "space": {"name": "x"}},
    ):
        with pytest.raises(GreedyNASError):
            timm.create_model("greedynas", arch=wrong)
