"""The pages of docs/reference are what `tools/reference_pages.py` writes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import reference_pages


@pytest.mark.parametrize("file", reference_pages.pages(), ids=lambda file: file.name)
def test_page_is_current(file):
    assert file.read_text() == reference_pages.pages()[file], "run python tools/reference_pages.py"
