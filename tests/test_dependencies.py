"""What is declared, what is pinned, and what is installed by default agree."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.helpers.paths import ROOT

TESTED = ("dev", "docs")  # the extras that make and CI install


def pinned(name):
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in (ROOT / name).read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): one.specifier for one in found}


def declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(one) for one in (*project["dependencies"], *(one for name in TESTED for one in extras[name]))]


def test_every_dependency_has_a_tested_newest_version_within_its_bounds():
    versions = pinned("constraints.txt")
    for one in declared():
        (exact,) = versions[canonicalize_name(one.name)]
        assert exact.operator == "=="
        assert one.specifier.contains(exact.version), one


def test_the_oldest_versions_are_those_that_are_declared():
    versions = pinned("requirements-min.txt")
    for one in declared():
        least = [Version(bound.version) for bound in one.specifier if bound.operator == ">="]
        for bound in versions.get(canonicalize_name(one.name), ()):
            assert bound.operator != "==" or Version(bound.version).release[:2] == least[0].release[:2], one


def test_majors_that_are_known_to_break_are_excluded():
    bounded = {one.name for one in declared() if any(bound.operator == "<" for bound in one.specifier)}
    assert bounded >= {"numpy", "plotly", "pydantic", "pymoo", "pyyaml", "timm", "torch"}


@pytest.mark.parametrize("file", ["constraints.txt", "requirements-min.txt"])
def test_nothing_is_pinned_to_a_place(file):
    """No registry, host, path or local build."""
    assert not re.search(r"https?:|file:|@|--|^-|\+|/", re.sub(r"#.*", "", (ROOT / file).read_text()), re.MULTILINE)


def test_make_installs_the_constraints():
    text = (ROOT / "Makefile").read_text()
    assert "CONSTRAINTS ?= constraints.txt" in text
    assert "-c $(CONSTRAINTS) -e '.[dev,docs]'" in text
    assert "make test" in (ROOT / ".ci" / "run").read_text()
