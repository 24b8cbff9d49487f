"""The cheapest faults of `make chaos`, which has many more trials of more faults (see `tests/chaos`).

They run in a process of their own, because they fork, which a process with threads should not do.
"""

import json
import os
import subprocess
import sys

from tests.helpers.paths import ROOT


def test_some_faults_lose_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.chaos", "--few", "--out", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["fault"]: row for row in json.loads((tmp_path / "chaos.json").read_text())["faults"]}
    assert len(rows) >= 6
    for row in rows.values():
        assert row["outcome"] == "nothing lost", row
        assert row["trials"] >= 1, row
