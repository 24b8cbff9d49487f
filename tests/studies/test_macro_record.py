"""The record of `study macro`, compared with the ground truth that it was made with."""

import json

import pytest

from greedynas.studies.macro.results import flat, macro_study
from greedynas.studies.study import read_part
from greedynas.studies.truth import read_truth
from tests.helpers.paths import ROOT

RECORD = ROOT / "benchmarks" / "records" / "macro-h200-2026-11-16"


def test_the_record_follows_from_its_parts(macro_truth):
    """Compute the record again from its parts: they remain readable, and no figure was written by hand."""
    parts = [read_part(RECORD, name) for name in ("greedy-400", "nwot-400")]
    found = macro_study(read_truth(macro_truth), parts, {}).results
    recorded = json.loads((RECORD / "study.json").read_text())["results"]
    for key, made in (("parts", found["parts"][0]), ("untrained", found["untrained"][0])):
        kept = next(row for row in recorded[key] if (row["seed"], row.get("method")) == (400, made.get("method")))
        numbers, expected = flat(made), flat(kept)
        assert numbers == pytest.approx(expected)
        assert len(numbers) > 10
