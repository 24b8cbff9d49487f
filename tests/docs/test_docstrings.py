"""Test the docstrings of all public names: a first sentence, arguments, and an example that runs."""

import doctest
import inspect
import re
from functools import cached_property

import pytest

import greedynas
from tests.helpers.doc_blocks import ROOT, registries_kept

# The allowed first words of the docstrings of public functions.
VERBS = {
    *(
        "Add",
        "Build",
        "Classify",
        "Describe",
        "Draw",
        "Evaluate",
        "Export",
        "Import",
        "Load",
        "Measure",
        "Open",
        "Read",
        "Register",
        "Return",
    ),
    *("Run", "Sample", "Search", "Train", "Write"),
}


@pytest.mark.parametrize("name", greedynas.__all__)
def test_the_docstring_has_a_sentence_arguments_and_an_example(name):
    value = getattr(greedynas, name)
    text = inspect.cleandoc(value.__doc__ or "")
    first, _, rest = text.partition("\n")
    assert first.endswith("."), first
    assert not rest.startswith("\n "), "the first line is a paragraph of its own"
    assert not rest or rest.startswith("\n"), "the first line is a paragraph of its own"
    assert ">>>" in text
    if not inspect.isclass(value):
        assert first.split()[0].rstrip(":,") in VERBS, first
        arguments = list(inspect.signature(value).parameters)
        assert ("Args:" in text) == bool(arguments)
        for argument in arguments:
            assert re.search(rf"^    {argument}: ", text, re.M), argument


@pytest.mark.parametrize("name", [name for name in greedynas.__all__ if inspect.isclass(getattr(greedynas, name))])
def test_the_methods_of_a_class_have_docstrings(name):
    own = {key: value for key, value in vars(getattr(greedynas, name)).items() if not key.startswith("_")}
    kinds = (classmethod, staticmethod, property, cached_property)
    methods = {key: value for key, value in own.items() if callable(value) or isinstance(value, kinds)}
    assert [key for key, value in methods.items() if key != "forward" and not inspect.getdoc(value)] == []


@pytest.mark.parametrize("name", greedynas.__all__)
def test_the_example_runs(name, place):
    finder = doctest.DocTestFinder(recurse=False)
    [example] = finder.find(getattr(greedynas, name), name, module=False, globs={"__name__": "documented"})
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    with registries_kept():
        result = doctest.DocTestRunner(optionflags=flags).run(example)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert sorted(re.findall(r"^::: greedynas\.(\w+)$", page, re.M)) == sorted(greedynas.__all__)
