"""The first screen of the report, remarks on exported files, validation curves, and preliminary searches."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from greedynas.reporting import story, tables, usage
from greedynas.reporting.facts import read_facts
from greedynas.reporting.report import draw_charts, render, write_report
from greedynas.rundir import run_directory
from greedynas.runtime.text import milliseconds
from tests.helpers import report_runs as runs
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    folder = runs.trained(tmp_path_factory.mktemp("usage") / "my run", photos, accuracy_images=6)
    runs.searched(folder, macs=(["60K"], None))
    runs.add_model(folder, "macs-60K", chosen=True)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "my run")


def test_the_first_screen_says_how_good_the_network_is(run):
    assert "Nothing was trained the same way" in usage.how_good(read_facts(run))
    assert f"greedynas retrain '{run}' --arch random" in usage.how_good(read_facts(run))
    runs.add_timm(run, top1=0.5)
    assert usage.how_good(read_facts(run)).startswith("timm-mobilenetv2_100 is worse: 50.0% against 75.0%")
    runs.add_timm(run, top1=0.9)  # the stronger rival is named by the page anyway, and only once
    facts = read_facts(run)
    assert usage.how_good(facts) is None
    assert render(facts, {}).count("timm-mobilenetv2_100 is better") == 2  # the first screen, and the comparison


def test_the_network_can_be_used_as_the_tabs_say(run):
    names = [way.name for way in usage.usages(read_facts(run))]
    assert names == ["Command", "Python", "ONNX"]
    command, python, onnx = usage.usages(read_facts(run))
    assert command.code == f"greedynas predict '{run}' image.jpg"
    for way in (python, onnx):
        compile(way.code, way.name, "exec")
        assert repr(str(run))[1:-1] in way.code
    (run / "models" / "macs-60K" / "export.json").unlink()
    assert [way.name for way in usage.usages(read_facts(run))] == ["Command", "Python"]
    page = write_report(run).read_text()
    assert page.count('name="usage"') == 2
    assert "checked" in page


def test_the_whole_time_is_shown(run):
    test = run / "models" / "macs-60K" / "test.json"
    test.write_text(json.dumps(json.loads(test.read_text()) | {"seconds": 3600.0}))
    facts = read_facts(run)
    training = facts.training.steps[-1].seconds
    assert facts.seconds == pytest.approx(3600 + training + facts.searches[0].seconds)
    assert ("time of all stages", "60 min") in story.tiles(facts)


def test_short_times_are_microseconds():
    times = [milliseconds(value) for value in (0.1, 0.099, 0.0165, 0.00042, 0.0, 12.0)]
    assert times == ["0.1 ms", "99 µs", "16.5 µs", "0.42 µs", "0 ms", "12 ms"]


def test_a_file_that_gains_nothing_has_a_remark(run):
    file = run / "models" / "macs-60K" / "export.json"
    export = runs.export_facts()
    whole, quick = export["files"][:2]
    export["files"] = [whole | {"format": "onnx"}, quick | {"format": "onnx", "latency_ms": 0.3, "bytes": 180_000}]
    file.write_text(json.dumps(export))
    (remark,) = tables.export_remarks(read_facts(run).chosen)
    assert remark.startswith(
        "model.int8.onnx is slower (0.3 ms against 0.21 ms) and larger (180 kB against 170 kB) than model.onnx"
    )
    assert remark.endswith("; int8 gains nothing here.")
    export["files"][1] |= {"latency_ms": 0.3, "bytes": 60_000}
    file.write_text(json.dumps(export))
    (remark,) = tables.export_remarks(read_facts(run).chosen)
    assert remark.endswith("; it only saves space (60 kB against 170 kB).")
    export["files"][1] |= {"latency_ms": 0.215}  # as fast, within the error of a measurement
    file.write_text(json.dumps(export))
    assert tables.export_remarks(read_facts(run).chosen) == []
    export["files"][1] |= {"latency_ms": 0.1, "bytes": 60_000}
    file.write_text(json.dumps(export))
    assert tables.export_remarks(read_facts(run).chosen) == []


def test_accuracies_after_epochs_are_curves(run):
    charts = draw_charts(read_facts(run))
    assert len(charts["supernet_accuracy"].figure.data[0].y) == 4
    assert "retraining_accuracy" not in charts
    assert "no images are left for a validation curve" in render(read_facts(run), charts)
    metrics = run / "models" / "macs-60K" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row | ({"val_accuracy": 0.5 + row["epoch"] / 10} if row["kind"] == "epoch" else {}) for row in rows]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = draw_charts(read_facts(run))
    assert list(charts["retraining_accuracy"].figure.data[0].y) == [0.6, 0.7, 0.8]
    assert "no images are left" not in render(read_facts(run), charts)


def test_a_preliminary_search_is_named_so(run):
    file = run / "searches" / "macs-60K" / "search.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"supernet_step": 6, "unfinished_epochs": 1}))
    lead = story.headline(read_facts(run)).lead
    assert "The supernet was not fully trained then (step 6, 1 epoch): this choice is preliminary." in lead


def test_a_run_on_a_cpu_names_no_cuda(monkeypatch):
    monkeypatch.setattr(run_directory.torch.cuda, "is_available", lambda: False)
    assert run_directory.versions()["cuda"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the run was on a CPU only without a GPU")
def test_versions_that_are_unknown_are_left_out(run):
    facts = read_facts(run)  # of a run on a CPU
    assert "cuda" in facts.versions
    assert "<dt>cuda</dt>" not in render(facts, {})


def test_the_onnx_tab_classifies_like_predict(tmp_path):
    """Run the code of the tab on the file of a real export."""
    import greedynas
    from tests.helpers.pictures import paint

    photos = paint(tmp_path / "photos", {"a": 20, "b": 20, "c": 20}, size=(10, 9))
    changes = {"train.max_epochs": 1, "retrain.epochs": 1, "image_size": 16, "data.workers": 0}
    changes |= {"search.population": 4, "search.generations": 1, "train.filter_images": 6, "train.bn_images": 6}
    changes |= {"data.val_images": 12, "data.test_images": 6, "train.batch_size": 14, "retrain.batch_size": 14}
    run = greedynas.run(
        "fashion", tmp_path / "run", data=photos, flops="2M", changes={**changes, "space": "fashion"}, quiet=True
    )
    code = next(way.code for way in usage.usages(run.facts) if way.name == "ONNX")
    image = sorted((photos / "a").iterdir())[0]
    done = subprocess.run(
        [sys.executable, "-c", code.replace('"image.jpg"', repr(str(image)))], cwd=ROOT, capture_output=True, text=True
    )
    (prediction,) = greedynas.predict(run.folder, [image])
    assert (done.stdout.strip(), done.stderr) == (prediction.classes[0][0], "")


def test_a_short_predicted_latency_is_in_microseconds(run):
    file = run / "models" / "macs-60K" / "arch.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"latency_ms": 0.0042}))
    page = write_report(run).read_text()
    assert "<dt>predicted latency</dt><dd>4.2 µs</dd>" in page
    assert "0.00 ms" not in page
