"""Tests of a whole job around a pretrained network, whose found network has smaller images than the run."""

import json
import shutil

import pytest
import torch
import yaml
from PIL import Image

import greedynas
from greedynas.data.datasets import open_data
from greedynas.jobs.resolving import load_config
from greedynas.models.model_file import load_network
from greedynas.models.shared_supernet import SharedSupernet
from greedynas.stages.run import read_data
from greedynas.stages.testing import predict_logits, top_accuracy
from tests.helpers.base_runs import FOUND, NAME

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture
def copied(base_job, tmp_path):
    shutil.copytree(base_job[1], tmp_path / "run")
    return tmp_path / "run"


def read(file):
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", [FOUND, "random"])
def test_a_network_of_another_size_says_so_everywhere(base_job, name):
    """The limit of 60K multiply-adds leaves only the smaller images."""
    file, run = base_job
    space = load_config(file).space
    network, card = load_network(run / "models" / name)
    arch = read(run / "models" / name / "arch.json")
    assert (space.image_size, card.image_size, card.space.image_size, arch["image_size"]) == (24, 16, 16, 16)
    assert (card.mean, card.std) == (space.mean, space.std)
    assert arch["ops"][0] == "PX16"
    assert len(arch["path"]) == len(arch["ops"]) == len(space.layers)
    assert arch["path"][0] == 0
    assert tuple(arch["canonical_path"][1:]) == card.path  # the card's has no image size
    assert not card.space.sizes
    assert arch["macs"] == int(card.space.costs([card.path]).macs[0]) <= 60_000
    assert network(torch.zeros(1, 3, 16, 16)).shape == (1, 3)


@pytest.mark.parametrize("name", [FOUND, "random", "base"])
def test_the_test_accuracy_is_that_of_predictions_on_the_files(base_job, name):
    """Each network is tested on images that are opened at its own size, as predict opens them."""
    file, run = base_job
    data = read_data(load_config(file), CPU, run)
    names = [data._splits.train.name(row) for row in data._rows["test"].tolist()]
    found = list(greedynas.predict(run / "models" / name, names, top=3))
    hits = sum(prediction.classes[0][0] == prediction.file.parent.name for prediction in found)
    record = read(run / "models" / name / "test.json")
    assert record["images"] == len(found) == 6
    assert record["top1"] == pytest.approx(hits / 6)
    network, card = load_network(run / "models" / name)
    own = open_data(load_config(file).data, image_size=card.image_size, normalised=(card.mean, card.std), folder=run)
    logits, labels = predict_logits(network, own.test())
    assert record["top1"] == top_accuracy(logits, labels)
    assert record["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)


def test_exported_files_take_images_of_the_networks_size(base_job):
    _, run = base_job
    export = read(run / "models" / FOUND / "export.json")
    card = read(run / "models" / FOUND / "model.json")
    assert card["image_size"] == 16
    assert "model.onnx" in json.dumps(export)
    photo = sorted((run.parent / "photos" / "a").iterdir())[0]
    [weights] = greedynas.predict(run / "models" / FOUND / "model.safetensors", photo)
    [onnx] = greedynas.predict(run / "model.onnx", photo)
    assert dict(onnx.classes) == pytest.approx(dict(weights.classes), abs=1e-4)


def test_predictions_of_the_run_come_from_the_found_network(run_cli, base_job):
    _, run = base_job
    photo = sorted((run.parent / "photos" / "b").iterdir())[0]
    code, out, errors = run_cli("predict", run, photo, "--json")
    assert (code, errors) == (0, "")
    [expected] = greedynas.predict(run / "models" / FOUND, photo)
    assert expected.classes[0][0] in out


def test_a_run_around_a_base_is_read_back(base_job):
    _, run = base_job
    net = greedynas.load_supernet(run)
    assert isinstance(net, SharedSupernet)
    assert (net.space.base, net.space.sizes, net.space.num_classes) == (NAME, (16, 24), 3)
    record = greedynas.open_run(run)
    assert record.stage == "exported"
    assert {"base", FOUND, "random"} <= set(record.models)
    path = read(run / "models" / FOUND / "arch.json")["path"]
    with torch.no_grad():
        assert net.eval()(torch.randn(2, 3, 24, 24), tuple(path)).shape == (2, 3)


def test_the_report_names_the_networks_and_their_sizes(base_job):
    _, run = base_job
    text = (run / "report.html").read_text()
    for wanted in ("base", FOUND, "random", "PX16", NAME):
        assert wanted in text, wanted
    for file in run.rglob("*.tmp"):
        pytest.fail(f"left over: {file}")


def test_the_same_job_again_changes_nothing(run_cli, base_job, copied):
    file, _ = base_job
    before = {
        path: path.read_bytes() for path in copied.rglob("*") if path.suffix in (".safetensors", ".json", ".onnx")
    }
    code, _, errors = run_cli("run", file, "--flops", "60K", "--out", copied)
    assert (code, errors) == (0, "")
    changed = {path.name for path in before if path.read_bytes() != before[path]}
    assert changed <= {"search.json"}  # how long the search took


def test_another_search_random_and_top_on_the_same_run(run_cli, copied):
    """A wider budget, whose networks may have any size, each of which gets a short training at its own."""
    code, _out, errors = run_cli("search", copied, "--flops", "250K", "--json")
    assert (code, errors) == (0, "")
    base = (copied / "models/base/model.safetensors").read_bytes()
    found = read(copied / "searches/macs-250K/search.json")["found"]
    assert {entry["path"][0] for entry in found} == {0, 1}
    top = ("--set", "top=3", "--set", "top_epochs=1")
    code, _, errors = run_cli("retrain", copied, "--model", "macs-250K", *top)
    assert (code, errors) == (0, "")
    tried = read(copied / "models/macs-250K/top.json")["candidates"]
    assert len(tried) == 3
    assert all(one["image_size"] == (16, 24)[one["path"][0]] for one in tried)
    _, card = load_network(copied / "models/macs-250K")
    arch = read(copied / "models/macs-250K/arch.json")
    assert card.image_size == arch["image_size"] == (16, 24)[arch["path"][0]]
    best = max(tried, key=lambda one: (one["val_top1"], -one["val_loss"]))
    assert best["path"] == arch["path"]
    code, _, errors = run_cli("retrain", copied, "--model", "macs-250K", "--arch", "random", "--name", "other")
    assert (code, errors) == (0, "")
    assert read(copied / "models/other/arch.json")["macs"] <= 250_000
    assert (copied / "models/base/model.safetensors").read_bytes() == base


def test_a_size_below_the_strides_is_one_line(run_cli, base_job, tmp_path):
    file, _ = base_job
    settings = yaml.safe_load(file.read_text())
    space = tmp_path / "space.yaml"
    space.write_text(yaml.safe_dump({"name": "small", "base": NAME, "sizes": [4, 16]}))
    code, _, errors = run_cli("run", file, "--set", f"space={space}", "--flops", "60K", "--out", tmp_path / "run")
    [line] = errors.splitlines()
    assert code == 2
    assert "image_size 4 is too small" in line
    assert "use at least 8" in line
    assert settings["weights"]
    assert not (tmp_path / "run").exists()


def test_predictions_on_a_photograph_that_is_smaller_than_the_network(base_job, tmp_path):
    Image.new("RGB", (9, 5), (20, 200, 30)).save(tmp_path / "small.png")
    [prediction] = greedynas.predict(base_job[1], tmp_path / "small.png")
    assert prediction.error is None
    assert len(prediction.classes) == 3
