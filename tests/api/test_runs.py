"""Run directories as objects: damaged ones among others."""

import shutil

import greedynas


def test_a_damaged_run_does_not_hide_the_others(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "runs" / "whole")
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "config.yaml").write_text("schema_version: 1\n")
    damaged, whole = greedynas.runs(tmp_path / "runs")
    assert whole.stage == "searched"  # this run has no test results
    assert damaged.summary()["stage"] == "unreadable"
    assert "another version" in damaged.summary()["problem"]
    assert "unreadable" in repr(damaged)
    compared = greedynas.runs(tmp_path / "runs").compare()
    assert {row["run"] for row in compared} == {str(whole.folder), str(damaged.folder)}
