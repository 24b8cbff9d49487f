import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedynas import Budget, GreedyNASError
from greedynas.spaces.budget import parse_count, parse_latency


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("330M", 330_000_000),
        ("1.2G", 1_200_000_000),
        ("5e6", 5_000_000),
        ("320,000,000", 320_000_000),
        ("600k", 600_000),
        ("42", 42),
    ],
)
def test_counts_are_read_with_their_units(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("80ms", 80), ("80", 80), ("0.08s", 80), ("900us", 0.9), ("12.5 ms", 12.5)]
)
def test_latencies_are_read_with_their_units(text, value):
    assert parse_latency(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "M", "-5M", "0", "5MM", "5T", "nan", "inf", "1e99", "five", "5 M M", "0x10"])
def test_unreadable_budgets_are_refused(text):
    with pytest.raises(GreedyNASError):
        parse_count(text)


@given(st.text())
def test_any_text_is_a_number_or_refused(text):
    for parse in (parse_count, parse_latency):
        with contextlib.suppress(GreedyNASError):
            assert parse(text) >= 0


def test_contradictory_limits_are_refused():
    with pytest.raises(ValueError, match="contradictory limits on macs"):
        Budget(min_macs=2, max_macs=1)
