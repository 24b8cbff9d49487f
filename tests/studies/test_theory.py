import itertools
import json
import math

import pytest

from greedynas.studies.theory.run import at_least


def test_the_papers_two_numbers():
    assert round(100 * at_least(5, 10, 0.6), 2) == 83.38
    assert round(100 * at_least(5, 10, 0.6, 0.5), 2) == 99.36


@pytest.mark.parametrize(("m", "k", "q"), [(3, 2, 0.3), (5, 5, 0.9), (4, 1, 0.5)])
def test_theorem_1_by_counting(m, k, q):
    """Add up the probabilities of all outcomes of m draws."""
    outcomes = itertools.product((0, 1), repeat=m)
    expected = sum(math.prod(q if good else 1 - q for good in one) for one in outcomes if sum(one) >= k)
    assert at_least(k, m, q) == pytest.approx(expected)


def test_the_command_prints_and_writes_both_numbers(run_cli, tmp_path):
    code, out, _ = run_cli("study", "theory", "--out", tmp_path / "study")
    assert code == 0
    assert "83.38%, with the pool 99.36%" in out
    saved = json.loads((tmp_path / "study" / "study.json").read_text())
    assert saved["results"]["with_pool"] == pytest.approx(0.9936, abs=5e-5)
    curve = next(curve for curve in saved["results"]["curves"]["without_pool"] if curve["q"] == 0.6)
    assert len(curve["probabilities"]) == 10
    assert curve["probabilities"][4] == pytest.approx(0.8338, abs=5e-5)
    page = (tmp_path / "study" / "study.html").read_text()
    assert "The paper" in page
    assert "83.38%" in page


def test_stdout_has_only_the_json(run_cli, tmp_path):
    code, out, _ = run_cli("study", "theory", "--m", 20, "--k", 8, "--q", 0.3, "--json", "--out", tmp_path / "study")
    assert code == 0
    assert json.loads(out)["results"]["without_pool"] == pytest.approx(at_least(8, 20, 0.3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", 11], "k must be between 1 and m"),
        (["--k", 0], "k must be between 1 and m"),
        (["--q", 1.5], "--q must be a probability between 0 and 1, got 1.5"),
        (["--epsilon", -1], "--epsilon must be a probability"),
    ],
)
def test_wrong_numbers_give_a_one_line_error(run_cli, tmp_path, arguments, message):
    code, _, err = run_cli("study", "theory", *arguments, "--out", tmp_path / "study")
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_help_shows_an_example(run_cli):
    code, out, _ = run_cli("study", "theory", "--help")
    assert code == 0
    assert "greedynas study theory --m 10" in " ".join(out.split())
