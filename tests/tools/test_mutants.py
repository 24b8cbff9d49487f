"""Mutation testing itself: the changes it makes in a piece of code, and its report on tests that are too weak."""

import gzip
import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.helpers.paths import ROOT

TOOLS = ROOT / "tools"


@pytest.fixture
def mutations(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import mutations

    return mutations


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", {"return (a <= b)", "return (a >= b)", "return None"}),
        ("return a * (b + 1)", {"return a * ((b - 1))", "return a * (b + 2)", "return a * (b + 0)"}),
        ("return f(x, y, key=z)", {"return f(x, y)", "return f(y, x, key=z)"}),
        ("return min(a, b)", {"return max(a, b)"}),
        ("return x[a:b]", {"return x[:b]", "return x[a:]"}),
        ("return a and b", {"return (a or b)"}),
        ("return not a", {"return a"}),
        ("return b if a else c", {"return b if (not (a)) else c"}),
        ("a.b = 1", {"pass", "a.b = 2", "a.b = 0"}),
        ("a += b", {"pass", "a -= b"}),
        ("add(a)", {"pass"}),
        ("return 0.5, True", {"return 1.0, True", "return 0.5, False"}),
        ("é = 1; return é + b", {"é = 1; return (é - b)"}),
    ],
)
def test_a_line_has_the_expected_mutants(mutations, line, expected):
    source = f'def f(a, b):\n    """Return 1."""\n    {line}\n'
    found = mutations.mutants(source)
    assert expected <= {mutant.after for mutant in found}
    for mutant in found:
        compile(mutant.source, "mutant", "exec")
        assert (mutant.function, mutant.line, mutant.before) == ("f", 3, line)
        assert mutant.source.replace(mutant.after, line) == source
    assert len({mutant.source for mutant in found}) == len({mutant.id for mutant in found}) == len(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""1 + 1"""',
        'def f(x: "int | None") -> int | None:\n    """Return 1 + 1."""',
        "logger.info(1 + 1)",
        'text = f"{1 + 1}"',
        "@decorated(1)\ndef f(): ...",
        "Alias = int | str",
        "x = [a for a, b in zip(c, d, strict=True)]",
    ],
)
def test_text_and_annotations_are_not_changed(mutations, source):
    assert mutations.mutants(source) == []


def test_the_message_of_an_error_is_not_changed_but_the_error_is(mutations):
    (found,) = mutations.mutants('def f():\n    raise ValueError(1 + 1, f"{2}")\n')
    assert found.after == "pass"


def test_the_id_of_a_mutant_does_not_depend_on_preceding_code(mutations):
    source = "def f(a):\n    a += 1\n    a += 1\n    return a\n"
    ids = [mutant.id for mutant in mutations.mutants(source)]
    moved = mutations.mutants(f"import x\n\n\ndef g():\n    return 3\n\n\n{source}")
    assert [mutant.id for mutant in moved if mutant.function == "f"] == ids


def test_all_mutated_modules_and_their_tests_exist(mutations):
    import mutants

    for file, tests in mutants.MODULES.values():
        for place in (file, *(test.partition("::")[0] for test in tests)):
            assert (ROOT / place).is_file(), place


def run(root, *arguments):
    command = [sys.executable, root / "tools" / "mutants.py", "--module", "pool", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    lines = (root / "mutants.jsonl").read_text().splitlines()
    return done, [json.loads(line) for line in lines]


def test_a_run_finds_the_mutants_that_survive(tmp_path):
    shutil.copytree(TOOLS, tmp_path / "tools")
    script = (TOOLS / "mutants.py").read_text()
    (tmp_path / "tools" / "mutants.py").write_text(
        re.sub("LIBRARIES = .*", "LIBRARIES = ()", script)
    )  # not needed here
    for folder in ("greedynas", "greedynas/greedy", "tests", "tests/greedy", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    for file in ("README.md", "pyproject.toml"):
        (tmp_path / file).touch()
    (tmp_path / "greedynas" / "greedy" / "pool.py").write_text(
        "def clip(x):\n    if x > 3:\n        x = 3\n    return x\n"
    )
    weak = "from greedynas.greedy.pool import clip\n\n\ndef test_clip():\n    assert clip(1) == 1\n"
    (tmp_path / "tests" / "greedy" / "test_pool.py").write_text(weak)
    done, results = run(tmp_path)
    assert {result["after"]: result["outcome"] for result in results} == {
        "if (x >= 3):": "survived",
        "if (x <= 3):": "killed",
        "if x > 4:": "survived",
        "if x > 2:": "survived",
        "x = 4": "survived",
        "x = 2": "survived",
        "return None": "killed",
    }
    assert done.returncode == 1
    assert "of the survivors 5 without a reason" in done.stdout
    assert {result["test"] for result in results} == {None, "tests/greedy/test_pool.py::test_clip"}

    (tmp_path / "tests" / "greedy" / "test_pool.py").write_text(
        weak + "    assert (clip(3), clip(4), clip(5)) == (3, 3, 3)\n"
    )
    done, results = run(tmp_path, "--again", "--sample", "6", "--jobs", "2")
    again = {result["after"]: result["outcome"] for result in results[7:]}
    assert len(again) in (4, 5)  # the survivors in the sample
    assert again.pop("if (x >= 3):", "survived") == again.pop("if x > 2:", "survived") == "survived"
    assert set(again.values()) == {"killed"}

    equal = [("if x > 3:", "if (x >= 3):"), ("if x > 3:", "if x > 2:")]
    known = [{"module": "pool", "function": "clip", "before": old, "after": new, "why": "3 is 3"} for old, new in equal]
    (tmp_path / "tools" / "surviving_mutants.yaml").write_text(json.dumps(known))
    results = run(tmp_path, "--again")[1]  # including those that were not in the sample
    done, same = run(tmp_path)
    assert same == results  # nothing is tested twice
    assert done.returncode == 0
    report = subprocess.run(
        [sys.executable, tmp_path / "tools" / "mutants.py", "--report"], capture_output=True, text=True, check=True
    ).stdout
    assert "| `pool` | 7 | 7 | 5 | 0 | 2 |" in report
    changes = ["  - `clip`: `if x > 3:` → `if (x >= 3):`", "  - `clip`: `if x > 3:` → `if x > 2:`"]
    assert "\n".join(["", "### pool", "", "- 3 is 3", *changes]) in report
    packed = tmp_path / "results.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "mutants.jsonl").read_bytes()))
    command = [sys.executable, tmp_path / "tools" / "mutants.py", "--report", "--results", packed]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == report


def test_the_page_about_mutants_has_every_known_survivor():
    page = (TOOLS.parent / "docs" / "results" / "mutants.md").read_text()
    for entry in yaml.safe_load((TOOLS / "surviving_mutants.yaml").read_text()):
        assert f"- {entry['why']}\n" in page
        assert f"`{entry['before']}` → `{entry['after']}`" in page
