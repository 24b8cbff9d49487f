"""Tests of jobs from scratch that a pretrained network teaches (`run --teacher`)."""

import json

import pytest
import yaml
from safetensors.torch import load_file

from greedynas.jobs.auto import auto_config
from greedynas.rundir.checkpoints import net_weights, read_checkpoint
from tests.helpers.base_runs import NAME, SECTIONS, write_weights
from tests.helpers.pictures import paint
from tests.helpers.training import tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = "60K"
FOUND = "macs-60K"


@pytest.fixture
def scratch(tmp_path):
    """The settings of a small job from scratch, and weights for its teacher."""
    paint(tmp_path / "photos", {"a": 14, "b": 14, "c": 14}, size=(30, 28))
    weights = write_weights(tmp_path / "weights.safetensors")
    space = tiny_space().adapt(image_size=16).model_dump(mode="json")
    train = {**SECTIONS["train"], "limits": None, "whole_every": None}
    retrain = {"epochs": 2, "batch_size": 12}
    sections = {**SECTIONS, "train": train, "retrain": retrain, "data": {**SECTIONS["data"]}}
    sections["data"]["source"] = str(tmp_path / "photos")
    file = tmp_path / "scratch.yaml"
    file.write_text(yaml.safe_dump({**sections, "space": space, "device": "cpu"}))
    return file, weights


def supernet(run):
    *_, newest = sorted((run / "supernet").glob("*.safetensors"))
    return net_weights(read_checkpoint(newest)[0])


def read(file):
    return json.loads(file.read_text())


def test_a_teacher_is_fine_tuned_and_teaches_supernet_and_network(run_cli, scratch, tmp_path):
    """Where it has no part in the loss, the supernet is that of a run without it; else it is another one."""
    file, weights = scratch
    taught = ("--teacher", NAME, "--weights", weights)
    code, _, errors = run_cli("run", file, "--flops", LIMIT, "--out", tmp_path / "taught", *taught)
    assert (code, errors) == (0, "")
    named = ("--set", f"taught_by={NAME}", "--set", f"weights={weights}", "--set", "train.teacher_weight=0")
    for name, options in (("silent", named), ("alone", ())):
        code, _, errors = run_cli("train", file, "--out", tmp_path / name, *options)
        assert (code, errors) == (0, "")
    teacher, found = (read(tmp_path / "taught/models" / name / "arch.json") for name in ("teacher", FOUND))
    assert (teacher["timm"], teacher["pretrained"]) == (NAME, str(weights))
    assert found["teacher"] == "teacher"
    assert not (tmp_path / "alone/models").exists()
    nets = {name: supernet(tmp_path / name) for name in ("taught", "silent", "alone")}
    assert all(nets["silent"][key].equal(value) for key, value in nets["alone"].items())
    assert any(not nets["taught"][key].equal(value) for key, value in nets["alone"].items())
    text = (tmp_path / "taught/report.html").read_text()
    assert "taught by teacher" in text
    assert NAME in text
    code, _, errors = run_cli("retrain", tmp_path / "taught", "--name", "free", "--set", "teacher_weight=0")
    assert (code, errors) == (0, "")
    networks = [load_file(tmp_path / "taught/models" / name / "model.safetensors") for name in (FOUND, "free")]
    assert any(not networks[0][key].equal(value) for key, value in networks[1].items())


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--teacher", "nosuch_net"), "nosuch_net"),
        (("--teacher", NAME, "--weights", "missing.safetensors"), "missing.safetensors"),
        (("--teacher", NAME, "--base", NAME), "leave out either"),
        (("--scratch", "--weights", "package"), "or add --teacher"),
    ],
)
def test_a_wrong_teacher_is_one_line_before_anything_is_trained(run_cli, scratch, tmp_path, options, wanted):
    code, _, errors = run_cli("run", scratch[0], "--flops", LIMIT, "--out", tmp_path / "run", *options)
    assert code == 2
    [line] = errors.splitlines()
    assert wanted in line
    assert not (tmp_path / "run/supernet").exists()


def test_networks_around_a_base_have_no_other_teacher(run_cli, scratch, tmp_path):
    settings = ("--set", f"space=timm:{NAME}", "--set", f"taught_by={NAME}")
    code, _, errors = run_cli("train", scratch[0], "--out", tmp_path / "run", *settings)
    assert code == 2
    assert "are taught by it" in errors


def test_auto_trains_from_scratch_with_a_teacher(scratch, tmp_path):
    _, weights = scratch
    photos = paint(tmp_path / "large", {"a": 14, "b": 14, "c": 14}, size=(140, 130))
    changes = {"data.source": str(photos), "weights": str(weights), "taught_by": NAME}
    config, reasons = auto_config(changes)
    assert config.space.base is None
    assert config.pretrained == ("teacher", NAME)
    assert config.retrain.teacher == "teacher"
    assert any(reason.startswith("adapt.epochs") for reason in reasons)
