"""`runs`, `status`, `compare`, `rm` and `doctor`: on real runs, and on damaged, foreign and hostile folders."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib

import pytest

from greedynas import GreedyNASError
from greedynas.monitoring import doctor
from greedynas.monitoring.comparison import charts_of, comparison_table, read_compared, remarks
from greedynas.monitoring.status import newest_progress, status_of
from greedynas.rundir.locks import Lock, is_locked
from greedynas.rundir.progress import FILE
from tests.helpers import report_runs as made
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
STATE = {
    "stage": "supernet",
    "unit": "step",
    "done": 30,
    "total": 120,
    "seconds_left": 90.0,
    "line": "supernet: step 30",
}


@pytest.fixture(scope="module")
def two(photos, tmp_path_factory):
    """Make a folder with a run that was searched and tested, and one that was only trained."""
    home = tmp_path_factory.mktemp("runs")
    first = made.trained(home / "first", photos)
    made.searched(first, macs=(["60K"], None))
    made.add_model(first, "macs-60K", chosen=True)
    made.trained(home / "deep" / "second", photos, sampler="uniform", stopping=False)
    return home


@pytest.fixture
def copied(two, tmp_path):
    shutil.copytree(two, tmp_path / "runs")
    return tmp_path / "runs"


def asked(run_cli, *arguments):
    """Return the JSON that a command prints."""
    code, out, err = run_cli(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def refused(run_cli, *arguments):
    """Return the one line that a command prints instead of working."""
    code, out, err = run_cli(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    return err


def test_runs_are_listed_with_stage_budget_accuracy_and_size(run_cli, two):
    second, first = asked(run_cli, "runs", two)["runs"]
    assert (first["stage"], first["top1"], first["model"]) == ("exported", 0.75, "macs-60K")
    assert first["searches"] == {"macs-60K": "at most 60k multiply-adds"}
    assert first["bytes"] == sum(file.stat().st_size for file in (two / "first").rglob("*") if file.is_file())
    assert (second["stage"], second["sampler"], second["epochs"], second["top1"]) == ("trained", "uniform", 4, None)
    code, out, _ = run_cli("runs", two)
    assert code == 0
    assert all(text in out for text in ("75.0% test", "at most 60k", "trained", "4/4"))
    assert run_cli("runs", two / "first")[1].count("exported") == 1  # a run itself


def test_runs_in_an_empty_and_in_a_missing_folder(run_cli, tmp_path):
    assert run_cli("runs", tmp_path)[:2] == (0, f"there are no runs in {tmp_path}\n")
    assert "there is no folder" in refused(run_cli, "runs", tmp_path / "missing")


def test_other_folders_with_a_config_yaml_are_no_runs(run_cli, copied):
    """Trackers keep copies of the settings of a run, and other programs have a config.yaml too."""
    for name, text in (
        ("mlruns/1/abc/artifacts", (copied / "first" / "config.yaml").read_text()),
        ("wandb/run-1/files", "epochs:\n  value: 3\n"),
        ("website", "title: My page\n"),
    ):
        (copied / name).mkdir(parents=True)
        (copied / name / "config.yaml").write_text(text)
    (copied / "mlruns/1/abc/artifacts/report.html").write_text("")
    names = [one["run"].rpartition("/")[2] for one in asked(run_cli, "runs", copied)["runs"]]
    assert names == ["second", "first"]


def test_a_damaged_run_is_listed_with_the_reason(run_cli, copied):
    (copied / "first" / "metrics.jsonl").write_text('{"kind": "step"}\n')
    (copied / "foreign").mkdir()
    (copied / "foreign" / "config.yaml").write_text("model: resnet\n")
    (copied / "foreign" / "log.txt").write_text("")
    found = {row["run"].rsplit("/", 1)[1]: row for row in asked(run_cli, "runs", copied)["runs"]}
    assert [found[name]["stage"] for name in ("first", "foreign", "second")] == ["unreadable", "unreadable", "trained"]
    assert "metrics.jsonl, line 1 is malformed" in found["first"]["problem"]
    assert "not that of a greedynas run" in found["foreign"]["problem"]
    assert "metrics.jsonl, line 1" in refused(run_cli, "status", copied / "first")
    assert "metrics.jsonl, line 1" in refused(run_cli, "compare", copied / "first", copied / "deep" / "second")


def test_hostile_folders_lead_to_one_line(run_cli, copied, tmp_path):
    run = copied / "first"
    (run / "models" / "link").symlink_to(tmp_path.parent)
    assert "link out of the run directory" in refused(run_cli, "status", run)
    (run / "models" / "link").unlink()
    os.mkfifo(run / "searches" / "pipe")
    assert "neither a file nor a folder" in refused(run_cli, "status", run)
    (run / "searches" / "pipe").unlink()
    (run / "log.txt").write_bytes(b"\x1b[2Jcleared\n" + b"\xff" * 20)
    (run / FILE).write_text(json.dumps({**STATE, "line": "\x1b]0;title\x07", "updated": time.time()}))
    code, out, _ = run_cli("status", run)
    assert code == 0
    assert "\x1b" not in out
    metrics = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_text("{\n" * 3)
    assert "line 1 is malformed: Invalid JSON" in refused(run_cli, "status", run)
    (run / "metrics.jsonl").write_bytes(metrics)
    (run / FILE).write_text("[" * 100_000)
    assert newest_progress(run) is None
    assert asked(run_cli, "status", run)["progress"] is None


def test_status_tells_what_is_running(run_cli, copied):
    run = copied / "deep" / "second"
    (run / FILE).write_text(json.dumps({**STATE, "updated": time.time() - 310}))
    stopped = asked(run_cli, "status", run)
    assert (stopped["running"], stopped["progress"]["done"]) == (False, 30)
    assert "interrupted 5 min ago" in run_cli("status", run)[1]
    lock = Lock(run)
    try:
        assert asked(run_cli, "status", run)["running"] is True
        out = run_cli("runs", run)[1]
        assert "supernet 25%" in out
        assert is_locked(run)
    finally:
        lock.close()
    assert not is_locked(run)


def test_looking_at_a_run_does_not_keep_others_from_it(two):
    """Start a lock while another process asks for the state again and again."""
    code = "import sys, pathlib; from greedynas.rundir.locks import is_locked\nwhile True: is_locked(pathlib.Path(sys.argv[1]))"
    run = two / "first"
    looking = subprocess.Popen([sys.executable, "-c", code, str(run)], cwd=ROOT)
    try:
        time.sleep(1)
        taken = 0
        for _ in range(30):
            try:
                Lock(run).close()
                taken += 1
            except GreedyNASError:
                pass
        assert taken >= 15  # this process never pauses between two looks; a person's does
    finally:
        looking.kill()
        looking.wait()


def test_compare_shows_a_table_and_writes_a_page(run_cli, two, tmp_path):
    page = tmp_path / "page.html"
    runs = (two / "first", two / "deep" / "second")
    found = asked(run_cli, "compare", *runs, "--out", page)
    assert [row["stage"] for row in found["runs"]] == ["exported", "trained"]
    assert len(found["runs"][0]["front"]) > 0
    text = page.read_text()
    assert "2 runs side by side" in text
    assert "<script src" not in text
    code, out, _ = run_cli("compare", *runs, "--no-page")
    assert code == 0
    assert all(word in out for word in ("first", "second", "greedy", "uniform", "75.0%"))
    assert not (tmp_path / "comparison.html").exists()
    assert "named twice" in refused(run_cli, "compare", runs[0], runs[0])
    assert "not a run directory" in refused(run_cli, "compare", runs[0], tmp_path)


def test_the_picture_has_the_front_of_every_run(two, photos, tmp_path):
    other = shutil.copytree(two / "first", tmp_path / "<b>other")
    made.add_model(other, "macs-60K", chosen=True, top1=0.82)
    found = read_compared([two / "first", other])
    chart = charts_of(found)["front_macs"]
    assert [trace.name for trace in chart.figure.data] == ["first", "&lt;b&gt;other"]
    for trace, run in zip(chart.figure.data, found, strict=True):
        assert sorted(trace.x) == sorted(entry.macs for entry in run.search.front)
    assert "<b>other is ahead of first by 7.0 points; the standard error" in " ".join(remarks(found))
    assert comparison_table(found).rows[1][:2] == ["<b>other", "exported"]


def test_rm_asks_first(copied):
    run = copied / "first"
    command = [sys.executable, "-m", "greedynas", "rm", str(run)]
    quiet = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, input="y\n")
    assert (quiet.returncode, quiet.stdout) == (2, "")
    assert "add --yes" in quiet.stderr
    for answer, there in (("n\n", True), ("\n", True), ("y\n", False)):
        leader, follower = os.openpty()
        try:
            os.write(leader, answer.encode())
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=follower)
        finally:
            os.close(leader)
            os.close(follower)
        assert done.returncode == 0
        assert re.search(r"Remove .*first \([\d.]+ kB\)\? \[y/N\]", done.stderr)
        assert run.exists() == there


def test_rm_removes_only_runs(run_cli, copied, tmp_path):
    run = copied / "first"
    lock = Lock(run)
    assert "in use" in refused(run_cli, "rm", run, "--yes")
    lock.close()
    (run / "thesis.docx").write_text("the only copy")
    assert "thesis.docx, which greedynas has not written" in refused(run_cli, "rm", run, "--yes")
    (run / "thesis.docx").unlink()
    (tmp_path / "link").symlink_to(run)
    assert "is a link" in refused(run_cli, "rm", tmp_path / "link", "--yes")
    assert "not a run directory" in refused(run_cli, "rm", copied, "--yes")
    assert "there is no folder" in refused(run_cli, "rm", tmp_path / "missing", "--yes")
    # Nothing is removed if one of several must not be.
    refused(run_cli, "rm", run, copied, "--yes")
    outside = tmp_path / "outside.txt"
    outside.write_text("kept")
    (run / "models" / "link").symlink_to(outside)
    (run / "metrics.jsonl").write_text("damaged")
    size = status_size(run)
    assert asked(run_cli, "rm", run, "--yes") == {"removed": [{"run": str(run), "bytes": size}]}
    assert not run.exists()
    assert outside.read_text() == "kept"


def test_rm_of_the_current_folder_removes_it(run_cli, copied, monkeypatch):
    monkeypatch.chdir(copied / "first")
    code, out, err = run_cli("rm", ".", "--yes")
    monkeypatch.chdir(copied)
    assert (code, err) == (0, "")
    assert out.startswith("removed .")
    assert not (copied / "first").exists()


def test_rm_does_not_follow_the_link_of_a_lock(run_cli, copied, tmp_path):
    (copied / "first" / ".lock").unlink(missing_ok=True)
    (copied / "first" / ".lock").symlink_to(tmp_path / "outside")
    assert "cannot write to" in refused(run_cli, "rm", copied / "first", "--yes")
    assert not (tmp_path / "outside").exists()


def status_size(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def test_doctor_tells_versions_and_the_pip_line_of_what_is_missing(run_cli, monkeypatch, tmp_path):
    missing = lambda name: None if name == "mlflow" else object()  # noqa: E731
    monkeypatch.setattr(doctor, "find_spec", missing)
    found = {one["name"]: one for one in asked(run_cli, "doctor", "--out", tmp_path)["findings"]}
    assert {"torch", "threads", "processor", "bf16 on the CPU", "free disk", "system"} <= found.keys()
    assert found["extra mlflow"]["advice"] == "pip install 'greedynas[mlflow]'"
    assert found["extra wandb"]["advice"] == ""
    code, out, _ = run_cli("doctor", "--out", tmp_path)
    assert code == 0
    assert "pip install 'greedynas[mlflow]'" in out


def test_the_extras_of_the_doctor_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(extras) - {"all", "dev", "docs", "examples"}


def test_a_status_is_the_same_as_that_of_the_api(two):
    import greedynas

    run = greedynas.open_run(two / "first")
    assert (run.stage, run.bytes) == (status_of(two / "first").stage, status_of(two / "first").bytes)
