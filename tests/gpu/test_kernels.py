"""Triton's kernels in its interpreter. Triton has to be told before it is imported, hence the process of its own."""

from tests.helpers.interpreted import run_interpreted


def test_kernels_in_the_interpreter():
    run_interpreted("tests/helpers/interpreted_kernels.py")
