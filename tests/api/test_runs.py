"""Tests of run directories as objects, including damaged ones."""

import shutil

import pytest

import greedynas
from tests.helpers.report_runs import add_model, change, searched, trained


def test_a_damaged_run_does_not_hide_the_others(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "runs" / "whole")
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "config.yaml").write_text("schema_version: 1\n")
    (tmp_path / "runs" / "damaged" / "log.txt").touch()
    damaged, whole = greedynas.runs(tmp_path / "runs")
    assert whole.stage == "searched"  # this run has no test results
    assert damaged.summary()["stage"] == "unreadable"
    assert "another version" in damaged.summary()["problem"]
    assert "unreadable" in repr(damaged)
    compared = greedynas.runs(tmp_path / "runs").compare()
    assert {row["run"] for row in compared} == {str(whole.folder), str(damaged.folder)}


CAVEAT = "60 of 60 test images are exact copies of training images"


@pytest.fixture(scope="module")
def tested(photos, tmp_path_factory, one_thread):
    """A run with a finished search, whose chosen network has a result on the test set."""
    folder = trained(tmp_path_factory.mktemp("tested") / "run", photos)
    model = searched(folder, macs=(["60K"], None))["chosen"]["model"]
    add_model(folder, model, chosen=True, top1=0.5)
    return folder


def test_an_accuracy_that_is_withheld_is_not_a_result_of_the_run(tested, tmp_path):
    """It stands neither in `top1` nor in the line that shows the run, and the run is not the best one."""
    good, bad = (greedynas.open_run(shutil.copytree(tested, tmp_path / name)) for name in ("good", "bad"))
    home = bad.folder / "models" / bad.best.name
    bad = greedynas.open_run(bad.folder)
    change(home / "test.json", top1=1.0, macro=1.0, caveats=[CAVEAT], withheld=True)
    assert (good.top1, good.caveats) == (0.5, ())
    assert (bad.top1, bad.caveats) == (None, (CAVEAT,))
    assert repr(good).endswith(", 50.0% top-1)")
    assert repr(good.best).endswith(", 50.0%)")
    assert "%" not in repr(bad) + repr(bad.best)
    compared = greedynas.runs(tmp_path).compare()
    assert [(row["run"], row["caveats"]) for row in compared] == [(str(good.folder), []), (str(bad.folder), [CAVEAT])]


def test_searches_and_models_are_shown_in_a_short_line_without_control_characters(tested, tmp_path):
    run = greedynas.open_run(shutil.copytree(tested, tmp_path / "run"))
    ((name, search),) = run.searches.items()
    chosen = " ".join(search.chosen.ops)
    assert repr(search) == f"Search({name!r}, {len(search.found)} paths of {search.space}, chose {chosen})"
    file = run.folder / "models" / run.best.name / "arch.json"
    change(file, ops=["\x1b[2Jgone"])
    best = greedynas.open_run(run.folder).models[run.best.name]
    assert repr(best) == f"Model({best.name!r}, \\x1b[2Jgone, 50.0%)"
