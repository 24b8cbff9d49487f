"""A test of kill -9 in a job around a pretrained network: the repeated command ends with the same weights, bit for bit."""

import json
import subprocess
import sys

from tests.helpers.base_runs import write_job
from tests.helpers.killing import ENVIRONMENT
from tests.helpers.paths import ROOT


def test_death_in_every_step_of_a_job_around_a_base(tmp_path):
    often = {"checkpoint_steps": 2}
    file = write_job(tmp_path, train=often, adapt=often, retrain=often)
    command = [sys.executable, "-m", "tests.helpers.kill_base_job", file, tmp_path / "jobs"]
    (tmp_path / "jobs").mkdir()
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["failures"] == []
    assert found["deaths"] == 6  # in the middle of every step, and at the last write of the base's fine-tuning
    assert len({tuple(calls) for calls in found["steps"].values()}) == 5
    assert all(last - first > 5 for first, last in found["steps"].values())
