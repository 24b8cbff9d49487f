"""Trackers: what they get, that a resumed training continues their record, and that a failing one stops nothing."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from greedynas import GreedyNASError
from greedynas.rundir.callbacks import make_callbacks
from greedynas.rundir.run_directory import refuse_links
from greedynas.rundir.trackers import tracker as module
from greedynas.rundir.trackers.tracker import IDENTITIES, Tracker, check_tracker
from tests.helpers import report_runs as runs
from tests.helpers.training import new_run, recorded, rows_of, same_tensors, train

pytestmark = pytest.mark.usefixtures("one_thread")


class Recording(Tracker):
    """A tracker that keeps what it gets."""

    name = "recording"

    def __init__(self, failing="", delay=0.0):
        super().__init__()
        self.failing, self.delay, self.calls = failing, delay, []

    def _did(self, name, *values):
        time.sleep(self.delay)
        self.calls.append((name, *values))
        if self.failing == name:
            raise SystemExit("the server\nsays no")

    def open(self, folder, step):
        self._did("open", self.identity(), step)
        self.remember("abc123")

    def write(self, kind, step, epoch, values):
        self._did("write", kind, step, values)

    def histogram(self, name, step, values):
        self._did("histogram", name, step, values)

    def attach(self, file, images):
        self._did("attach", file, len(images))

    def close(self):
        self._did("close")


def test_a_tracker_gets_every_number_and_the_losses_of_filterings(data, tmp_path):
    found = Recording()
    _, _, rows = recorded(tmp_path / "run", data, callbacks=[found])
    names = [call[0] for call in found.calls]
    assert (names[0], names[-1], names.count("open")) == ("open", "close", 1)
    losses = [(step, values["step/loss"]) for name, kind, step, values in _of(found, "write") if kind == "step"]
    assert losses == [(row["step"], row["loss"]) for row in rows["step"]]
    kept = [values for _, name, _, values in _of(found, "histogram") if name == "filter/kept"]
    assert kept == [[loss for loss in row["kept"] if loss is not None] for row in rows["filter"]]
    # A resumed training continues the record.
    again = Recording()
    recorded(tmp_path / "run", data, callbacks=[again], max_epochs=3)
    assert again.calls == []  # it was finished
    json.loads((tmp_path / "run" / IDENTITIES).read_text())["recording"]
    with new_run(tmp_path / "other") as run:
        (tmp_path / "other" / IDENTITIES).write_text('{"recording": "abc123"}')
        train(data, run=run, callbacks=[again])
    assert again.calls[0] == ("open", "abc123", 0)


def _of(found, name):
    return [call for call in found.calls if call[0] == name]


def test_a_relative_folder_has_a_title_and_settings(data, tmp_path, monkeypatch):
    """A run directory without a parent in its name, as `--out photos`."""
    monkeypatch.chdir(tmp_path)
    found = Recording()
    found.begin(Path("photos"), 0)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "config.yaml").write_text("name: tiny\n")
    assert (found.title, found.settings()) == ("photos", {"name": "tiny"})
    (tmp_path / "photos" / "models" / "a").mkdir(parents=True)
    found.begin(Path("photos/models/a"), 0)
    assert (found.title, found.settings()) == ("photos/a", {"name": "tiny"})
    found.end()


@pytest.mark.parametrize("failing", ["open", "write", "histogram", "close"])
def test_a_tracker_that_fails_never_stops_a_training(data, tmp_path, failing, caplog):
    found = Recording(failing)
    net, state, _ = recorded(tmp_path / "run", data, callbacks=[found])
    alone, _ = train(data)
    assert state.stopped == "max_epochs reached"
    assert same_tensors(net.state_dict(), alone.state_dict())
    assert len(_of(found, failing)) == 1  # nothing is tried again
    # The thread of an earlier test, whose tracker hangs, may still end with a warning of its own.
    (warning,) = [one for record in caplog.records if "the server says no" in (one := record.getMessage())]
    assert warning == "recording records nothing any more (SystemExit: the server says no); the training goes on"


def test_a_tracker_that_hangs_delays_a_training_only_at_its_end(data, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    found = Recording(delay=3600.0)
    start = time.monotonic()
    _, state, _ = recorded(tmp_path / "run", data, callbacks=[found])
    assert state.stopped == "max_epochs reached"
    assert time.monotonic() - start < 60
    assert "recording is slow" in caplog.text


def test_the_report_and_the_test_images_are_attached(photos, tmp_path):
    run = runs.trained(tmp_path / "run", photos)
    runs.searched(run, macs=(["60K"], None))
    runs.add_model(run, "macs-60K", chosen=True)
    (run / IDENTITIES).write_text('{"recording": "abc123"}')
    found = Recording()
    found.report(run, run / "report.html")
    assert _of(found, "attach") == [("attach", run / "report.html", 6)]
    assert found.calls[0] == ("open", "abc123", 0)
    assert found.calls[-1] == ("close",)


def test_an_identity_from_another_person_is_not_trusted(data, tmp_path):
    found = Recording()
    for wrong in (
        '{"recording": "../../x"}',
        '{"recording": 5}',
        "[]",
        "[" * 10**5,
        '{"recording": "' + "a" * 99 + '"}',
    ):
        found.folder = tmp_path
        (tmp_path / IDENTITIES).write_text(wrong)
        assert found.identity() is None


def test_trackers_that_do_not_exist_or_are_missing_are_refused_at_once(run_cli, monkeypatch, tmp_path):
    code, out, err = run_cli("train", "fashion", "--out", tmp_path / "run", "--track", "neptune")
    assert (code, out, err) == (2, "", "error: --track takes wandb, mlflow, tensorboard, got 'neptune'\n")
    monkeypatch.setattr("greedynas.runtime.packages.find_spec", lambda name: None)
    with pytest.raises(GreedyNASError, match="--track wandb needs wandb, which is not installed: pip install wandb"):
        check_tracker("wandb")
    assert not (tmp_path / "run").exists()


# The real packages


def test_wandb_offline_holds_the_metrics(data, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = tmp_path / "run"
    recorded(run, data, callbacks=make_callbacks(["wandb"]))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    losses = _wandb_history(file)
    assert losses == pytest.approx([row["loss"] for row in rows_of(run)["step"]])
    assert json.loads((run / IDENTITIES).read_text())["wandb"] in file.name
    refuse_links(run)  # wandb's own files have links, with which a run directory would be refused


def test_wandb_says_once_that_nobody_is_logged_in(tmp_path, monkeypatch, caplog, capfd):
    wandb = pytest.importorskip("wandb")
    from greedynas.rundir.trackers import wandb_tracker

    wandb_tracker._say_that_records_stay_here.cache_clear()
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [wandb_tracker._mode(wandb) for _ in range(2)] == ["offline", "offline"]
    assert caplog.text.count("nobody is logged in to wandb") == 1
    assert "deprecated" not in capfd.readouterr().err


def _wandb_history(file):
    """Return the values of `step/loss` in an offline file: a leveldb log of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, records, parts, at = file.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(parts))
            parts = b""
    items = [item for record in records if record.HasField("history") for item in record.history.item]
    return [json.loads(item.value_json) for item in items if "step/loss" in (item.key, *item.nested_key)]


def test_mlflows_server_holds_the_metrics(data, tmp_path, monkeypatch, capfd):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    places = ["--backend-store-uri", f"sqlite:///{tmp_path}/db", "--artifacts-destination", str(tmp_path / "artifacts")]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen([*command, *places], stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(f"{address}/health", server)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        run = tmp_path / "run"
        recorded(run, data, callbacks=make_callbacks(["mlflow"]))
        assert capfd.readouterr().out == ""  # it belongs to --json
        identity = json.loads((run / IDENTITIES).read_text())["mlflow"]
        client = mlflow.MlflowClient(address)
        history = sorted(client.get_metric_history(identity, "step/loss"), key=lambda one: one.step)
        rows = rows_of(run)["step"]
        assert [(one.step, one.value) for one in history] == [(row["step"], pytest.approx(row["loss"])) for row in rows]
        assert client.get_run(identity).info.status == "FINISHED"
        assert [one.path for one in client.list_artifacts(identity)] == ["config.yaml"]
    finally:
        os.killpg(server.pid, 15)
        server.wait()


def _wait_for(address, server):
    for _ in range(600):
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            assert server.poll() is None
            time.sleep(0.2)
    raise AssertionError("the server does not answer")


def test_tensorboard_files_hold_the_metrics(data, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    recorded(run, data, callbacks=make_callbacks(["tensorboard"]))
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [(one.step, one.value) for one in board.Scalars("step/loss")] == [
        (row["step"], pytest.approx(row["loss"])) for row in rows_of(run)["step"]
    ]
    assert "filter/kept" in board.Tags()["histograms"]
