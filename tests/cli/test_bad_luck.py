"""Tests of faults and malformed values of many kinds, each of which is reported in one line."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from greedynas import GreedyNASError, load_space
from greedynas.jobs.resolving import load_config
from greedynas.models.model_file import load_network, save_network
from greedynas.rundir.checkpoints import read_checkpoint
from greedynas.rundir.locks import Lock
from greedynas.runtime import files
from greedynas.runtime.files import write_atomically
from greedynas.runtime.yaml_files import parse_value, parse_yaml
from greedynas.settings.loading import parse_assignments
from greedynas.stages.run import Run
from greedynas.studies import study as studies
from tests.fuzz.kinds import NAME, _lay_checkpoint, make_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(photos, tmp_path_factory):
    from tests.fuzz.make_corpus import call

    def run_cli(*command):
        code, message = call([str(part) for part in command])
        return code, "", message

    return make_run(tmp_path_factory.mktemp("low"), photos, run_cli)


# YAML


@pytest.mark.parametrize("text", ['!!int ""', '!!float ""', "!!bool x", "!!timestamp x", "!!binary '!'", "!!set x", "!!omap x", "!!int x", "!!null", "=", "<<: 1"])  # fmt: skip
def test_unusual_scalars_are_read_or_refused_in_one_line(text):
    message = ""
    try:
        parse_value(text)
    except ValueError as error:
        message = str(error) or "nothing\n"
    assert "\n" not in message
    with pytest.raises(GreedyNASError, match=r"x.yaml"):
        parse_yaml(f"a: [{text}", Path("x.yaml"), "config file")


def test_dates_are_read_as_text():
    for text in ("2024-31-12", "2024-12-31", "2024-12-31 10:00:00"):
        assert parse_value(text) == text
    assert load_config("fashion", parse_assignments(["data.source=2024-31-12"])).data.source == "2024-31-12"


@pytest.mark.parametrize("text", ["lr: 1\nlr: 2", "a: {b: 1, c: 2, b: 1}", "'x': 1\nx: 2"])
def test_a_key_that_is_given_twice_is_refused(text):
    with pytest.raises(GreedyNASError, match=r"is given twice"):
        parse_yaml(text, Path("x.yaml"), "config file")


def test_a_setting_that_is_given_twice_is_refused(run_cli):
    for settings in (["lr=1", "lr=2"], ["lr=1", "train.lr=2"]):
        code, _, message = run_cli("train", "fashion", "--plan", *(part for one in settings for part in ("--set", one)))
        assert (code, message.count("\n")) == (2, 1)
        assert "twice: 1 and 2" in message
    assert parse_assignments(["lr=1", "lr=1"]) == {"lr": 1}


@pytest.mark.parametrize("setting", ["weight_decay=1e300", "clip_grad=1e300", "lr=1e39", "retrain.weight_decay=1e300", "retrain.mixup=1e300", "retrain.temperature=1e-300", "retrain.eps=1e300", "warmup=" + "9" * 50])  # fmt: skip
def test_numbers_that_no_weight_can_hold_are_refused(run_cli, setting):
    code, _, message = run_cli("train", "fashion", "--plan", "--set", setting)
    assert (code, message.count("\n")) == (2, 1)
    assert setting.split("=")[0].rpartition(".")[2] in message


# Files of a run


@pytest.mark.parametrize("place", ["pool", "previous_pool", "waiting"])
@pytest.mark.parametrize("path", [[99, 0], [0], [0] * 50])
def test_paths_of_a_checkpoint_are_paths_of_the_space(base, run_cli, tmp_path, place, path):
    run = shutil.copytree(base, tmp_path / "run")
    state = read_checkpoint(next((run / "supernet").glob("step-*")))[1]
    wrong = {
        "pool": {**state["pool"], "entries": [[path, 0.5, 1]]},
        "previous_pool": [path],
        "waiting": [[path]],
    }
    _lay_checkpoint(run / "supernet", json.dumps({**state, place: wrong[place]}).encode(), run)
    code, _, message = run_cli("search", run, "--flops", "50K")
    assert (code, message.count("\n")) == (2, 1), message
    assert "the checkpoint in" in message
    assert "does not fit this run" in message


def test_a_foreign_export_record_is_overwritten(base, run_cli, tmp_path):
    run = shutil.copytree(base, tmp_path / "run")
    assert run_cli("export", run, "--format", "safetensors")[0] == 0
    file = run / "models" / NAME / "export.json"
    whole = json.loads(file.read_text())
    for changes in (
        {"machine": 5},
        {"threads": "many"},
        {"skipped": [{"file": "x"}]},
        {"skipped": "x"},
        {"images": None},
        {"files": [{key: value for key, value in whole["files"][0].items() if key != "bytes"}]},
        {"files": [{**whole["files"][0], "top1": "high"}]},
        {"files": [{**whole["files"][0], "latency_ms": [1]}]},
    ):
        file.write_text(json.dumps({**whole, **changes}))
        code, _, message = run_cli("export", run, "--format", "safetensors")
        assert code == 0, (changes, message)
        assert json.loads(file.read_text()).keys() == whole.keys()
        assert json.loads(file.read_text())["machine"] == whole["machine"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(base, photos, run_cli, tmp_path, value):
    network, card = load_network(base)
    with torch.no_grad():
        next(network.parameters()).fill_(value)
    save_network(tmp_path / "model.safetensors", network, card)
    image = next(photos.rglob("*.png"))
    for more in ((), ("--json",)):
        code, out, message = run_cli("predict", tmp_path / "model.safetensors", image, *more)
        assert (code, out, message.count("\n")) == (2, "", 1), message
        assert "not all finite numbers" in message


def test_json_output_has_no_nan(capsys):
    from greedynas.cli.options import print_json

    print_json({"a": [float("nan"), (1.5, float("inf"))], "b": {"c": -float("inf")}, "ü": "ü"})
    message = capsys.readouterr().out
    assert json.loads(message, parse_constant=pytest.fail) == {"a": [None, [1.5, None]], "b": {"c": None}, "ü": "ü"}


def test_an_unknown_teacher_is_refused_before_training(base, run_cli, tmp_path):
    config = base.parent / "tiny.yaml"
    code, _, message = run_cli("run", config, "--out", tmp_path / "run", "--set", "retrain.teacher=nosuch")
    assert (code, message.count("\n")) == (2, 1), message
    assert "the teacher 'nosuch' is not trained in this run" in message
    assert not (tmp_path / "run").exists()


# The machine


def test_a_folder_that_cannot_be_flushed_is_named(tmp_path, monkeypatch):
    flush = os.fsync

    def failing(code):
        def fsync(handle):
            if os.path.isdir(f"/proc/self/fd/{handle}"):  # noqa: PTH112
                raise OSError(code, os.strerror(code))
            flush(handle)

        return fsync

    monkeypatch.setattr(files.os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error") as error:
        write_atomically(tmp_path / "a", b"x")
    assert error.value.filename == str(tmp_path)
    monkeypatch.setattr(files.os, "fsync", failing(errno.EINVAL))  # on file systems that cannot do it
    write_atomically(tmp_path / "a", b"y")
    assert (tmp_path / "a").read_bytes() == b"y"


def test_a_clock_without_progress_is_no_error(base, run_cli, tmp_path, monkeypatch):
    for name in ("monotonic", "perf_counter", "perf_counter_ns", "time"):
        monkeypatch.setattr(time, name, partial(int, getattr(time, name)()))
    config = base.parent / "tiny.yaml"
    code, _, message = run_cli("run", config, "--flops", "60K", "--out", tmp_path / "run")
    assert code == 0, message
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_lock_holds_even_if_its_file_is_removed(tmp_path, base):
    run = shutil.copytree(base, tmp_path / "run")
    with Run.open(run):
        (run / ".lock").unlink()
        with pytest.raises(GreedyNASError, match="is in use by another greedynas process"):
            Run.open(run)
    with Run.open(run):
        pass
    with studies._locked(tmp_path / "study"):
        (tmp_path / "study" / "parts" / ".lock").unlink()
        with pytest.raises(GreedyNASError, match="is in use"), studies._locked(tmp_path / "study"):
            pass


def test_a_lock_does_not_outlive_its_process_in_a_worker(tmp_path):
    lock = Lock(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"x")
        time.sleep(20)
        os._exit(0)
    os.read(read, 1)
    lock.close()
    try:
        Lock(tmp_path).close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_zipped_package_is_refused_with_advice(tmp_path):
    archive = tmp_path / "greedynas.zip"
    package = Path(load_space.__code__.co_filename).parents[1]
    with zipfile.ZipFile(archive, "w") as made:
        for file in package.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                made.write(file, file.relative_to(package.parent))
    environment = {**os.environ, "PYTHONPATH": str(archive)}
    command = [sys.executable, "-P", "-m", "greedynas", "describe"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "greedynas cannot be used from inside of a zip file" in done.stderr
