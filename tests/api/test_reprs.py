"""Tests of how public objects are shown in a console and in a notebook."""

import xml.etree.ElementTree as ElementTree

import numpy as np

import greedynas
from greedynas.api.runs import RunRecord
from tests.helpers.latency import made_up
from tests.helpers.training import tiny_space


def test_a_space_is_one_line_and_a_table():
    space = greedynas.load_space("macro")
    assert repr(space) == str(space) == "Space('macro': 8 layers of 3 ops, 6,561 paths, 32 px, 10 classes)"
    assert "5.6e+17 paths" in repr(greedynas.load_space("mobilenet"))
    table = ElementTree.fromstring(space._repr_html_())
    assert len(table.findall("./tbody/tr")) == 8 + len(space.stem) + len(space.head)


def test_the_name_of_a_space_cannot_put_markup_into_a_notebook():
    space = tiny_space().model_copy(update={"name": "<script>alert(1)</script>"})
    assert "<script" not in space._repr_html_()


def test_a_budget_shows_the_limits_that_it_has():
    assert repr(greedynas.Budget(max_macs=5_000_000, min_params=7)) == "Budget(max_macs=5000000, min_params=7)"
    assert repr(greedynas.Budget()) == "Budget()"


def test_a_pool_shows_its_best_paths():
    pool = greedynas.CandidatePool(20)
    assert repr(pool) == "CandidatePool(0 of 20 paths)"
    for number in range(12):
        pool.update((number, 0), 2.0 - number / 10)
    assert repr(pool) == "CandidatePool(12 of 20 paths, losses 0.900 to 2.000)"
    rows = ElementTree.fromstring(pool._repr_html_()).findall("./tbody/tr")
    assert [cell.text for cell in rows[0]] == ["11 0", "0.9000"]
    assert len(rows) == 10


def test_a_search_result_is_a_line_and_two_pictures():
    space = greedynas.load_space("macro")
    result = greedynas.search(space, lambda paths: [sum(path) / 16 for path in paths], generations=2)
    assert repr(result) == f"Searched(100 paths of macro, best {result.best.accuracy:.4f})"
    assert repr(result.best).startswith("Found(path=(")
    chart, network = ElementTree.fromstring(f"<p>{result._repr_html_()}</p>")
    circles = [element for element in chart if element.tag.endswith("circle")]
    assert len(circles) == 100 + len(result.front())
    assert network.tag.endswith("svg")


def test_a_search_result_without_paths_or_with_one():
    space = greedynas.load_space("macro")
    result = greedynas.search(space, lambda paths: [0.5] * len(paths), population_size=1, generations=1)
    assert "nan" not in result._repr_html_()
    result.found.clear()
    assert repr(result) == "Searched(0 paths of macro)"
    assert result._repr_html_() == "<p>Searched(0 paths of macro)</p>"


def test_a_latency_table_shows_its_origin():
    table = made_up(greedynas.load_space("macro"))
    assert repr(table) == str(table)
    assert repr(table).startswith("LatencyTable('macro' at 32 px, 8 layers: ")
    assert table.device in repr(table)


def test_an_evaluation_is_one_line():
    found = greedynas.Evaluation(np.array([1.0, 2.0]), np.array([0.25, 0.75]))
    assert repr(found) == "Evaluation(2 paths: accuracies 0.2500 to 0.7500, losses 1.0000 to 2.0000)"
    assert repr(greedynas.Evaluation(np.zeros(0), np.zeros(0))) == "Evaluation(0 paths)"


def test_a_drawing_is_text_and_a_picture():
    drawing = greedynas.draw_path((2,) * 8, greedynas.load_space("macro"))
    assert isinstance(drawing, str)
    assert drawing._repr_svg_() == drawing
    ElementTree.fromstring(drawing)


def test_a_run_shows_its_stage(exported):
    run = greedynas.open_run(exported)
    assert isinstance(run, RunRecord)
    assert repr(run) == f"RunRecord({str(exported)!r}, {run.stage})"  # no network of this run was tested
