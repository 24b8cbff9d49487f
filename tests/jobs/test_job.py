import io
import json
import os
import pickle
import subprocess
import sys
from itertools import product

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

import greedynas
from greedynas.data.datasets import open_data
from greedynas.jobs.demo import FLOPS, run_demo
from greedynas.jobs.resolving import load_config
from greedynas.reporting.facts import read_facts
from greedynas.reporting.worth import worth
from greedynas.spaces.budget import parse_count
from greedynas.spaces.paths import canonical
from greedynas.stages import run as run_module
from tests.helpers.paths import ROOT
from tests.helpers.pictures import paint, spoil
from tests.helpers.search import DATA
from tests.helpers.training import SETTINGS, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    """Write photographs of mixed sizes, one of which is broken."""
    folder = tmp_path_factory.mktemp("album")
    paint(folder, {"cat": 20, "<b>dog": 20, "鳥": 20}, size=(10, 9))
    for number, file in enumerate(sorted(folder.rglob("*.png"))):
        with Image.open(file) as image:
            image.resize((8 + 5 * (number % 4), 9 + 3 * (number % 5))).save(file)
    spoil(sorted((folder / "cat").iterdir())[3])
    return folder


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, album):
    file = tmp_path_factory.mktemp("config") / "tiny.yaml"
    settings = {
        "space": tiny_space(repeat=1).model_dump(mode="json"),
        "data": {**DATA, "source": str(album)},
        "train": {**SETTINGS, "max_epochs": 2},
        "search": {"population": 6, "generations": 3},
        "retrain": {"epochs": 2, "batch_size": 16},
    }
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.fixture(scope="module")
def finished(config_file, tmp_path_factory):
    """Run a job from the command line, and return the run directory and the output."""
    run = tmp_path_factory.mktemp("job") / "run"
    command = [sys.executable, "-m", "greedynas", "run", config_file, "--flops", "60K", "--out", run]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return run, done.stdout


def test_one_command_runs_the_whole_job_and_names_the_broken_file(finished, album):
    run, out = finished
    arch = json.loads((run / "arch.json").read_text())
    assert arch["macs"] <= 60_000
    assert 0 <= arch["test_top1"] <= 1
    assert {"space", "path", "ops", "params", "supernet_accuracy"} <= arch.keys()
    for name in ("model.onnx", "model.safetensors", "report.html", "config.yaml"):
        assert (run / name).stat().st_size > 0
    broken = sorted((album / "cat").iterdir())[3].name
    assert broken in out
    assert out.count("Plan: tiny") == 1  # before it starts
    assert f"{arch['test_top1']:.2%} top-1" in out
    assert f"greedynas predict {run}" in out
    assert f"greedynas retrain {run} --arch random && greedynas report {run}" in out  # the gain by the search


def test_the_exported_network_is_the_retrained_one(finished, album):
    run, _ = finished
    network, card = greedynas.load_network(run)
    images = np.random.default_rng(0).normal(size=(5, 3, 8, 8)).astype(np.float32)
    with torch.no_grad():
        expected = network(torch.from_numpy(images)).numpy()
    session = onnxruntime.InferenceSession(run / "model.onnx")
    np.testing.assert_allclose(session.run(None, {"images": images})[0], expected, atol=1e-4)
    assert card.class_names == ("<b>dog", "cat", "鳥")


def test_predictions_from_the_command_line(run_cli, finished, album):
    run, _ = finished
    image = sorted((album / "鳥").iterdir())[0]
    code, out, _ = run_cli("predict", run, image, "--json")
    assert code == 0
    message = json.loads(out)["predictions"][0]
    assert sorted(one["name"] for one in message["classes"]) == ["<b>dog", "cat", "鳥"]
    assert sum(one["probability"] for one in message["classes"]) == pytest.approx(1, abs=1e-4)
    code, out, _ = run_cli("predict", run / "model.onnx", image, "--top", 1)
    assert code == 0
    assert message["classes"][0]["name"] in out


def test_the_same_command_again_changes_nothing(run_cli, finished, config_file):
    run, _ = finished
    files = [file for file in run.rglob("*") if file.is_file() and file.name not in ("log.txt", "report.html", ".lock")]
    before = {file: file.read_bytes() for file in files}
    code, out, err = run_cli("run", config_file, "--flops", "60K", "--out", run)
    assert (code, err) == (0, "")
    assert "top-1" in out
    changed = {file.name for file in files if file.read_bytes() != before[file]}
    assert changed <= {"search.json", "config.yaml"}  # how long the search took; the versions


def test_another_budget_adds_a_model(run_cli, finished, config_file):
    run, _ = finished
    code, _, _ = run_cli("run", config_file, "--params", "6K", "--out", run)
    assert code == 0
    assert {folder.name for folder in (run / "models").iterdir()} == {"macs-60K", "params-6K"}
    assert json.loads((run / "arch.json").read_text())["model"] == "params-6K"


def test_a_job_without_the_packages_of_the_report_finishes_and_says_how_to_get_it(
    run_cli, finished, config_file, monkeypatch
):
    from greedynas.runtime import packages

    run, _ = finished
    page = (run / "report.html").read_bytes()
    monkeypatch.setattr(packages, "_is_installed", lambda name: name != "plotly")
    message = "the report needs plotly, which is not installed: pip install plotly"
    code, out, _ = run_cli("run", config_file, "--flops", "60K", "--out", run)
    assert code == 0
    assert f"No report was written: {message} && greedynas report" in " ".join(out.split())
    assert "Look at" not in out
    assert "Found:" in out
    assert run_cli("report", run) == (2, "", f"error: {message}\n")
    with pytest.raises(greedynas.GreedyNASError, match=message):
        greedynas.report(run, quiet=True)
    assert (run / "report.html").read_bytes() == page


def test_a_verb_whose_package_is_missing_says_which(finished, tmp_path):
    run, _ = finished
    (tmp_path / "pymoo.py").write_text("raise ModuleNotFoundError(\"No module named 'pymoo'\", name='pymoo')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "greedynas", "search", run, "--flops", "60K"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    message = "error: greedynas needs pymoo, which is not installed: pip install pymoo\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_job_that_fits_a_time_reads_its_images_once(run_cli, config_file, tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(run_module, "open_data", lambda *a, **k: reads.append(a) or open_data(*a, **k))
    job = ("run", config_file, "--flops", "60K", "--hours", 1, "--out", tmp_path / "run")
    code, out, _ = run_cli(*job)
    assert code == 0
    assert "train.max_epochs 6 instead of 2, as the time allows" in out
    assert len(reads) == 1
    code, again, _ = run_cli(*job)
    assert code == 0
    assert again.splitlines()[-4:] == out.splitlines()[-4:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--flops", "1"], "no path"),
        (["--baseline", "mobilenetv2_100"], "cache"),
        (["--baseline", "nonsense_net"], "nonsense_net"),
        (["--hours", "-1"], "--hours"),
        (["--set", "retrain.recipe=adam"], "recipe"),
        (["--flops", "many"], "many"),
    ],
)
def test_impossible_jobs_are_refused_before_any_training(run_cli, config_file, tmp_path, arguments, message):
    code, _, err = run_cli("run", config_file, "--out", tmp_path / "run", *arguments)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_run_of_an_older_version_is_refused_before_anything_is_measured(run_cli, config_file, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("schema_version: 1\nversions: {greedynas: 0.1.0}\n")
    monkeypatch.setattr("greedynas.jobs.job.show_plan", lambda *_: pytest.fail("the machine is measured"))
    code, out, err = run_cli("run", config_file, "--flops", "60K", "--out", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path} was made by greedynas 0.1.0")


def test_a_kill_in_each_stage_changes_nothing(config_file, tmp_path):
    command = [sys.executable, "-m", "tests.helpers.kill_job", config_file, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["deaths"] == 9


def test_the_demo_searches_some_of_the_paths_within_its_budget():
    """Check that the demo shows a search, whose network can be compared with a random one."""
    config, limit = load_config("fashion"), parse_count(FLOPS)
    paths = np.array(list(product(*(range(ops) for ops in config.space.num_ops))))
    within = paths[config.space.costs(paths).macs <= limit]
    networks = {canonical(path, config.space) for path in within.tolist()}
    assert (len(within), len(networks)) == (885, 297)  # as demo.py and its record say
    evaluated = config.search.population * config.search.generations
    assert evaluated == 160
    assert evaluated < len(within) / 5


def test_the_demo_is_the_whole_job(tmp_path):
    console = Console(record=True, width=200, file=io.StringIO())
    settings = {"max_epochs": 2, "batch_size": 256, "search.population": 10, "search.generations": 2}
    run_demo(tmp_path / "demo", console, {**settings, "retrain.epochs": 1, "retrain.batch_size": 256})
    out = console.export_text()
    assert "Trained for 2 epochs" in out
    arch = json.loads((tmp_path / "demo" / "arch.json").read_text())
    assert arch["macs"] <= 800_000
    assert f"{arch['test_top1']:.2%} top-1" in out
    search = json.loads((tmp_path / "demo" / "searches" / "macs-800K" / "search.json").read_text())
    assert search["from_pool"] > 0
    random = json.loads((tmp_path / "demo" / "models" / "random" / "arch.json").read_text())
    assert random["macs"] <= 800_000
    assert random["canonical_path"] != arch["canonical_path"]
    assert [random[key] for key in ("recipe", "epochs", "inherit")] == [
        arch[key] for key in ("recipe", "epochs", "inherit")
    ]
    assert f"{random['test_top1']:.2%} top-1 with {random['macs']:,} multiply-adds" in out
    sentence = worth(read_facts(tmp_path / "demo"))
    accuracies = [f"{one['test_top1']:.1%}" for one in (arch, random)]
    assert sentence.startswith(f"The found network has {accuracies[0]} on the test set; a random network ")
    assert f"trained the same way, has {accuracies[1]}: " in sentence
    assert sentence in " ".join(out.partition("Found:")[2].split())  # at the end
    assert sentence in (tmp_path / "demo" / "report.html").read_text()
    assert "2 times 1 epochs of 8,000 images" in out  # the plan counts both trainings
    assert load_config(tmp_path / "demo" / "config.yaml").retrain.epochs == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["retrain", "RUN", "--recipe", "adam"], "error: unknown recipe 'adam'"),
        (["retrain", "RUN", "--arch", "greedynas-a"], "image_size 8 is too small"),
        (["retrain", "RUN", "--arch", "1200"], "ops"),
        (["retrain", "RUN", "--arch", "timm:nonsense"], "timm has no model 'nonsense'"),
        (["retrain", "RUN", "--name", "other", "--teacher", "resnet18"], "resnet18"),
        (["export", "RUN", "--format", "tflite"], "unknown format 'tflite'"),
        (["export", "RUN", "--model", "../../etc"], "no trained network '../../etc'"),
        (["predict", "RUN", "NOT_AN_IMAGE"], "no image in a known format"),
        (["predict", "PICKLE", "NOT_AN_IMAGE"], "is a pickle"),
        (["predict", "OTHER_CLASSES", "NOT_AN_IMAGE"], "outputs cannot have 2 class names"),
        (["report", "NOT_A_RUN"], "not a run directory"),
    ],
)
def test_wrong_inputs_are_one_clear_line(run_cli, finished, tmp_path, arguments, message):
    run, _ = finished
    (tmp_path / "picture.jpg").write_text("no picture")
    trap = tmp_path / "sprung"
    (tmp_path / "weights.safetensors").write_bytes(pickle.dumps(Trap(str(trap))))
    with safe_open(run / "model.safetensors", framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no dict)
        card = json.loads(handle.metadata()["greedynas"])
    forged = {"greedynas": json.dumps({**card, "class_names": ["a", "b"]})}
    save_file(tensors, tmp_path / "forged.safetensors", forged)
    names = {
        "RUN": run,
        "NOT_AN_IMAGE": tmp_path / "picture.jpg",
        "PICKLE": tmp_path / "weights.safetensors",
        "OTHER_CLASSES": tmp_path / "forged.safetensors",
        "NOT_A_RUN": tmp_path,
    }
    code, _, err = run_cli(*(names.get(argument, argument) for argument in arguments))
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert not trap.exists()
    assert not (run / "models" / "other").exists()


class Trap:
    """An object whose unpickling is noticed."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)
