"""Test helpers shared by `tests.jobs.test_kill` and others."""

import os

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
