"""A process that has used OpenVINO survives signals."""

import ctypes
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from greedynas.deploy.runtimes.signal_stack import _Stack, kept_signal_stack

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenVINO changes the stack only on Linux")


def stack():
    found = _Stack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(found)) == 0
    return found.address, found.flags, found.size


@pytest.mark.parametrize("fails", [False, True])
def test_the_signal_stack_is_put_back(fails):
    before, other = stack(), ctypes.create_string_buffer(64 << 10)
    change = _Stack(ctypes.addressof(other), 0, len(other))
    with pytest.raises(RuntimeError) if fails else kept_signal_stack(), kept_signal_stack():
        assert ctypes.CDLL(None).sigaltstack(ctypes.byref(change), None) == 0
        assert stack() == (ctypes.addressof(other), 0, len(other))
        if fails:
            raise RuntimeError
    assert stack() == before


OVERLAP = """
import signal, subprocess, sys
from greedynas.deploy.formats import FORMATS
from greedynas.deploy.formats.format import Conversion
from pathlib import Path
from tests.helpers.model_files import SE, make_card, trained_network

signals = []
signal.signal(signal.SIGCHLD, lambda number, _: signals.append(number))
card, file = make_card(SE), Path(sys.argv[1], "model.xml")
format = FORMATS["openvino"]()
format.convert(Conversion(trained_network(card), card, lambda: iter(())), "fp32", file)
first, second = format.open(file, 1), format.open(file, 1)
del first
del second
signals.clear()
subprocess.run(["true"], check=True)
print(signals == [signal.SIGCHLD])
"""


@pytest.mark.skipif(not find_spec("openvino"), reason="needs pip install greedynas[openvino]")
def test_signals_arrive_after_openvino_has_gone(tmp_path):
    """Without `kept_signal_stack`, the process ended by SIGSEGV at the end of its next child."""
    command = [sys.executable, "-c", OVERLAP, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
