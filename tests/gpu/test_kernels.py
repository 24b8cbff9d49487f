"""Triton's kernels in its interpreter, which must be chosen before Triton is imported: in another process."""

from tests.helpers.interpreted import run_interpreted


def test_kernels_run_in_the_interpreter():
    run_interpreted("tests/helpers/interpreted_kernels.py")
