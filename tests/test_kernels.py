"""Triton's kernels in its interpreter. Triton has to be told before it is imported, hence the process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def run_interpreted(file):
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout


def test_kernels_in_the_interpreter():
    run_interpreted("tests/interpreted_kernels.py")
