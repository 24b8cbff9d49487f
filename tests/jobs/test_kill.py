"""Tests of kill -9: the repeated command ends with the same results, bit for bit."""

import json
import random
import subprocess
import sys
import time

import pytest
import yaml

from tests.helpers.kill_points import differences, outcome
from tests.helpers.killing import ENVIRONMENT
from tests.helpers.paths import ROOT
from tests.helpers.pictures import paint
from tests.helpers.training import SETTINGS, tiny_space


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    """Write a config with these settings."""
    folder = tmp_path_factory.mktemp("kill")
    paint(folder / "photos", {"a": 20, "b": 20, "c": 20}, size=(10, 9))

    def write(name, data, **train):
        space = tiny_space(repeat=1).model_dump(mode="json")
        source = {"source": str(folder / "photos"), "val_images": 12, "test_images": 6, **data}
        (folder / name).write_text(yaml.safe_dump({"space": space, "data": source, "train": {**SETTINGS, **train}}))
        return folder / name

    return write


def test_death_at_every_write_flush_and_rename(config_file, tmp_path):
    train = {"max_epochs": 2, "batch_size": 14, "warmup": 1, "m": 3, "pool_size": 4, "log_every": 3}
    file = config_file("points.yaml", {"workers": 0}, checkpoint_steps=2, **train)
    command = [sys.executable, "-m", "tests.helpers.kill_points", file, tmp_path]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["failures"] == []
    # The training saved everything that can be saved, and the kills were in the right places.
    calls, state = found["calls"], found["state"]
    assert (state["step"], state["epoch"], state["stopped"]) == (6, 2, "max_epochs reached")
    assert len(state["pool"]["entries"]) == 4
    assert state["waiting"]
    saves = 4  # three by steps, and the last one
    assert calls.count("replace") == 2 + 2 * saves  # config.yaml and data.json; pool.json and a checkpoint each
    assert calls.count("fsync") == 2 * calls.count("replace") + saves  # file and folder; metrics
    assert calls.count("unlink") == 2
    assert {"write", "flush", "truncate", "mkdir"} < set(calls)
    assert found["deaths"] == len(calls) + calls.count("write") + 1  # before each, in the middle of writes, at the end


def test_kill_at_random_moments(config_file, tmp_path):
    """Kill one run four times: before the first checkpoint, and at three later moments."""
    file = config_file("moments.yaml", {"workers": 1, "memory_gb": 0}, max_epochs=40, warmup=30, checkpoint_steps=7)

    def start(folder):
        command = [sys.executable, "-m", "greedynas", "train", file, "--out", folder]
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted = start(whole)
    moments = [-1, *(random.randint(first, first + 35) for first in (7, 55, 95))]
    for moment in moments:
        process = start(killed)
        while process.poll() is None and not reached(killed, moment):
            time.sleep(0.002)
        time.sleep(0 if moment < 0 else random.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -9, f"it ended before it could be killed at {moments}"
        assert (moment < 0) == (newest_step(killed) is None)
    assert start(killed).wait() == 0
    assert uninterrupted.wait() == 0
    assert not differences(outcome(whole), outcome(killed)), moments
    assert outcome(whole)["state"]["step"] == 160
    log = (killed / "log.txt").read_text()
    assert log.count("resuming from step") == 3  # the first resumption had nothing to go on from


def reached(folder, moment):
    """Return whether the training has started, or has saved such a step."""
    if moment < 0:
        return (folder / "metrics.jsonl").exists()
    return (newest_step(folder) or 0) >= moment


def newest_step(folder):
    steps = [int(file.name.split("-")[1]) for file in (folder / "supernet").glob("step-*.safetensors")]
    return max(steps, default=None)
