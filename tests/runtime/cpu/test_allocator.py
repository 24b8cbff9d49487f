"""Test that freed memory is kept by the process, and that users can switch this off."""

import os
import platform
import subprocess
import sys

import pytest

from greedynas.runtime.cpu.allocator import VARIABLE

COUNT = """
import resource, torch
from greedynas.runtime.devices import prepare
from greedynas.runtime.cpu.allocator import keep_freed_memory
prepare(torch.device("cpu"))
for _ in range(20):
    torch.ones(12 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(12 << 20)  # 48 MB, which is more than glibc keeps by itself
print(keep_freed_memory(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**environment):
    """Return whether memory is kept, and the page faults of ten buffers that are freed at once."""
    told = subprocess.run(
        [sys.executable, "-c", COUNT],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = told.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_used_again_without_page_faults():
    kept, faults = page_faults()
    assert kept
    assert faults < 100
    kept, faults = page_faults(**{VARIABLE: "system"})
    assert not kept
    assert faults > 10 * (48 << 20) // 4096 // 2
