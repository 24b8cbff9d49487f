"""A system without file locks, as Windows: one clear line instead of a traceback, and a doctor that works."""

import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

WITHOUT_LOCKS = """
import sys
sys.modules["fcntl"] = None
sys.argv = ["greedynas", *sys.argv[1:]]
from greedynas.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "arguments", [("runs",), ("train", "fashion", "--out", "nowhere"), ("demo", "--out", "nowhere")]
)
def test_windows_gets_one_clear_line(arguments, tmp_path):
    done = _call(arguments, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: greedynas runs on Linux and macOS; on Windows, use it in WSL\n"


def test_help_and_doctor_work_there(tmp_path):
    assert _call(("--help",), tmp_path).returncode == 0
    done = _call(("doctor", "--json"), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def _call(arguments, folder):
    command = [sys.executable, "-c", WITHOUT_LOCKS, *arguments]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True
    )
