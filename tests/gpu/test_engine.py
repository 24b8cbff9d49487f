import subprocess
import sys

import pytest
import torch

from greedynas.gpu import engine
from greedynas.models.blocks import ConvNorm, MBConv
from greedynas.runtime.errors import GreedyNASError
from tests.helpers.interpreted import run_interpreted


def test_blocks_run_in_the_interpreter():
    run_interpreted("tests/helpers/interpreted_engine.py")


def test_plain_pytorch_runs_on_the_cpu():
    block = MBConv(8, 8, 1, 3, 3, False, "relu")
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        assert not engine.takes(block, x)
        assert not engine.applies(x, block.project.norm)


def test_blocks_need_no_triton():
    """Check an installation for the CPU, which has no Triton."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from greedynas.models.blocks import MBConv\n"
        "MBConv(8, 8, 1, 3, 3, False, 'relu')(torch.randn(2, 8, 5, 5)).sum().backward()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modes():
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    norm = ConvNorm(4, 4).norm
    with engine.using("on"):
        assert engine.applies(x, norm)
        assert not engine.applies(x.contiguous(), norm)  # NCHW
        assert not engine.applies(x, torch.nn.BatchNorm2d(4, affine=False))
        assert not engine.applies(x, torch.nn.BatchNorm2d(4, momentum=None))
        assert not engine.applies(x[:1, :, :1, :1], norm)  # one value per channel, which BatchNorm refuses
    with engine.using("off"):
        assert not engine.applies(x, norm)
    assert not engine.applies(x, norm)
    with pytest.raises(GreedyNASError, match="engine mode"):
        engine.use("fast")
