"""Every file of `benchmarks/` that is named in the repository exists."""

import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PLACES = (
    "docs",
    "greedynas",
    "tests",
    "tools",
    "benchmarks",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
    "pyproject.toml",
)
KINDS = {".md", ".py", ".sh", ".yaml", ".toml", ".txt", ""}
NAMED = re.compile(r"\bbenchmarks/[\w./*-]*")
LINKED = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
IN_TABLE = re.compile(r"`(scripts/[\w.]+|records/[a-z][\w.-]*|[a-z-]+-(?:h200|cpu\d+)-\d{4}-\d\d-\d\d)`?")


def texts() -> list[tuple[Path, str]]:
    files = [
        file for place in PLACES for file in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
    ]
    chosen = [file for file in files if file.is_file() and file.suffix in KINDS and "corpus" not in file.parts]
    return [(file, file.read_text(encoding="utf-8")) for file in chosen]


def test_named_benchmarks_exist():
    named = {(file, name.rstrip("./")) for file, text in texts() for name in NAMED.findall(text)}
    assert len(named) > 40
    assert [(file.relative_to(ROOT), name) for file, name in sorted(named) if not any(ROOT.glob(name))] == []


@pytest.mark.parametrize("page", ["benchmarks/README.md", "benchmarks/records/tuning.md"])
def test_links_and_tables_of_benchmarks_name_existing_files(page):
    file = ROOT / page
    text = file.read_text(encoding="utf-8")
    assert [link for link in LINKED.findall(text) if not (file.parent / link).exists()] == []
    places = (ROOT / "benchmarks", ROOT / "benchmarks/records")
    names = IN_TABLE.findall(text)
    assert names
    assert [name for name in names if not any((place / name).exists() for place in places)] == []


def test_every_record_has_a_row():
    table = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    folders = [folder.name for folder in (ROOT / "benchmarks" / "records").iterdir() if folder.is_dir()]
    assert len(folders) > 15
    assert [name for name in folders if f"| `{name}` |" not in table] == []
