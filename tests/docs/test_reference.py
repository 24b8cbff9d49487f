"""The pages of docs/reference equal the output of `tools/reference_pages.py`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import reference_pages


@pytest.mark.parametrize("file", reference_pages.pages(), ids=lambda file: file.name)
def test_the_page_is_up_to_date(file):
    assert file.read_text() == reference_pages.pages()[file], "run python tools/reference_pages.py"
