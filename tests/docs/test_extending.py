"""docs/extending.md: every extension point has an example of at most 20 lines, and its table of files is correct."""

import re
from importlib import import_module

from tests.helpers.doc_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "extending.md"
POINTS = (
    "op",
    "sampler",
    "searcher",
    "evaluator",
    "dataset",
    "callback",
    "format",
    "latency_backend",
    "recipe",
    "batchnorm_mode",
)


def test_every_extension_point_has_a_short_example():
    examples = blocks(PAGE, "python")
    for point in POINTS:
        found = [block for block in examples if f"greedynas.register_{point}(" in block.code]
        assert len(found) == 1, point
        assert len([line for line in found[0].code.splitlines() if line.strip()]) <= 20, point


def test_the_table_of_files_is_correct():
    rows = re.findall(r"^\| (a|an) .*$", PAGE.read_text(), re.M)
    assert len(rows) == 4
    for registry, module, folder in [
        ("SAMPLERS", "greedynas.greedy.settings", "greedynas/greedy/samplers/"),
        ("SAMPLERS", "greedynas.greedy.settings", "greedynas/greedy/methods/"),
        ("BN_MODES", "greedynas.models.batchnorm", "greedynas/models/"),
        ("FORMATS", "greedynas.deploy.formats", "greedynas/deploy/formats/"),
    ]:
        folders = (
            ("greedynas/greedy/samplers", "greedynas/greedy/methods") if registry == "SAMPLERS" else folder.rstrip("/")
        )
        for place in getattr(import_module(module), registry)._places.values():
            if isinstance(place, str):
                assert place.split(":")[0].replace(".", "/").startswith(folders)
        text = PAGE.read_text()
        assert registry in text
        assert folder in text
