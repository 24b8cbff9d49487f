"""Test helpers shared by `tests.gpu.test_kernels` and others."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.helpers.paths import ROOT


def run_interpreted(file):
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout
