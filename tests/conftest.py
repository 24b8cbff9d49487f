import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(2)
settings.register_profile("quick", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.load_profile("quick")

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def macro_truth() -> Path:
    """The ground truth of NAS-Bench-Macro, which lies beside the checkout and is not part of it."""
    file = SHARED / "nas-bench-macro_cifar10.json"
    if not file.exists():
        pytest.skip("NAS-Bench-Macro's ground truth is not beside this checkout")
    return file
