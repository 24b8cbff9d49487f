"""docs/paper-to-code.md: every function and file that it names exists, and it covers every item of the paper."""

import re

from tests.helpers.doc_blocks import ROOT

OTHER = {"epsilon", "sgd", "rmsprop"}  # settings and names
TEXT = (ROOT / "docs" / "paper-to-code.md").read_text()


def test_the_named_files_exist():
    files = set(re.findall(r"`(greedynas/[\w/.\-]+\.\w+)`", TEXT))
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_named_functions_are_in_their_files():
    checked = 0
    for row in re.findall(r"^\| .*$", TEXT, re.M):
        files = re.findall(r"`(greedynas/[\w/]+\.py)`", row)
        source = "".join((ROOT / file).read_text() for file in files)
        for name in set(re.findall(r"`([A-Za-z]\w*)`", row)) - OTHER if files else ():
            assert re.search(rf"^(def|class) {name}\b", source, re.M), f"{name} is not in {files}"
            checked += 1
    assert checked >= 25


def test_every_item_of_the_paper_is_covered():
    for item in [
        *(f"Algorithm {i}" for i in (1, 2, 3)),
        *(f"Table {i}" for i in range(1, 8)),
        *(f"Figure {i}" for i in range(1, 7)),
    ]:
        assert re.search(rf"^\| {item}\b", TEXT, re.M), item
    numbers = [
        int(number)
        for row in re.findall(r"^\| ((?:\(\d+\)(?:, | and |))+)", TEXT, re.M)
        for number in re.findall(r"\d+", row)
    ]
    assert sorted(numbers) == list(range(1, 11))
