"""The fuzzer detects failures: one that accepts everything would never find any."""

import sys
import time

import pytest
from hypothesis import given, settings

from tests.fuzz import runner
from tests.fuzz.__main__ import Fuzzer, signature
from tests.fuzz.generators import Target, assignments, mutated, spoiled
from tests.fuzz.runner import Outcome, call_forked


def told(line):
    print(line, file=sys.stderr)


def raises():
    raise KeyError("x")


def ends(code, *lines):
    def end():
        for line in lines:
            told(line)
        sys.exit(code)

    return end


def takes_memory():
    held = bytearray(300_000_000)
    sys.exit(held[5])


def hangs():
    time.sleep(30)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (ends(0), None),
        (ends(2, "error: no such file"), None),
        (ends(2, "warning: damaged", "error: no such file"), None),
        (raises, "a traceback"),
        (ends(1, "error: x"), "exit code 1"),
        (ends(2), "exit code 2 without an error message"),
        (ends(2, "something", "error: x"), "more than one line"),
        (ends(2, "error: \x1b[2J"), "control characters"),
        (hangs, "it hangs"),
        (takes_memory, "it took"),
    ],
)
def test_problems_of_a_command_are_detected(tmp_path, monkeypatch, command, problem):
    monkeypatch.setattr(runner.cli, "main", command)
    monkeypatch.setattr(runner, "SECONDS", 1.0)
    if command is takes_memory:
        before = call_forked([], tmp_path).memory
        monkeypatch.setattr(runner, "MEMORY", before - 100_000_000)
    outcome = call_forked([], tmp_path)
    assert (outcome.problem is None) == (problem is None), outcome
    assert problem is None or outcome.problem.startswith(problem)


class FakeBench:
    """Refuses all words, and fails for words with an x."""

    def try_input(self, kind, content, suffix):
        return Outcome(2, "error: no", 0.01, 0, "a traceback" if "x" in content else None)


def test_a_failing_input_is_made_smaller_and_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tests.fuzz.__main__.CORPUS", tmp_path)
    monkeypatch.setattr("tests.fuzz.__main__.TURN", 500)
    from hypothesis import strategies as st

    fuzzer = Fuzzer(FakeBench(), keep=False)
    target = Target("words/flops", st.text(alphabet="abcx", max_size=20))
    fuzzer.turn(target, 0, time.monotonic() + 60)
    assert len(fuzzer.found) == 1
    assert (tmp_path / "words" / "found" / "flops.json").read_text() == '[\n"x"\n]\n'
    assert "FOUND words/flops: a traceback" in capsys.readouterr().out


def test_refusals_differ_by_their_words_and_not_by_names():
    def refusal(line):
        return signature("arch", Outcome(2, f"warning: x\nerror: {line}\n", 0.0, 0, None))

    assert refusal("cannot read /a/b: 5 ops") == refusal("cannot read /c/d: 17 ops")
    assert refusal("no space 'a'") != refusal("no path 'a'")


@given(mutated([{"a": [1, {"b": 2}], "c": "d"}]), spoiled([b"hello"]), assignments())
@settings(max_examples=50)
def test_inputs_of_all_kinds_are_made(value, data, word):
    assert isinstance(data, bytes)
    assert isinstance(word, str)


def test_inputs_are_changed():
    found = set()

    @given(mutated([{"a": 1, "b": [2, 3]}]))
    @settings(max_examples=60, database=None)
    def collect(value):
        found.add(repr(value))

    collect()
    assert len(found) > 20
