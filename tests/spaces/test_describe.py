"""Descriptions of spaces around a base, of their paths, and their drawings."""

import io
import json
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

import greedynas
from greedynas import GreedyNASError
from greedynas.models.shared_supernet import SharedSupernet
from greedynas.spaces.describe import path_facts, show_path, show_space, space_facts
from tests.helpers.bases import SMALL, small_space, whole_path
from tests.helpers.latency import made_up

SPACE = small_space()


def shown(show, *arguments):
    console = Console(file=io.StringIO(), width=400)
    show(*arguments, console)
    return console.file.getvalue()


@pytest.mark.parametrize("space", [SPACE, small_space(sizes=()), greedynas.load_space("macro")], ids=str)
def test_the_costs_of_the_layers_add_up(space):
    for path in space.sample(5, np.random.default_rng(0)):
        facts, costs = path_facts(path, space), space.costs([path])
        assert (facts["macs"], facts["params"]) == (costs.macs[0], costs.params[0])
        for cost in ("macs", "params"):
            assert sum(layer[cost] for layer in facts["layers"]) == facts[cost]


def test_a_path_is_described_at_its_image_size():
    facts = path_facts((1, *whole_path(SPACE)[1:]), SPACE)
    assert (facts["image_size"], facts["ops"][0], facts["layers"][0]["in_size"]) == (48, "PX48", 48)
    assert [layer["where"] for layer in facts["layers"]][-3:] == ["head", "neck", "classifier"]
    assert facts["canonical_path"] == facts["path"]
    text = shown(show_path, (1, *whole_path(SPACE)[1:]), SPACE)
    assert f"of {SPACE.name} at 48 px, 5 classes" in text
    assert "MB6_K5_SE" in text


def test_a_path_is_described_with_a_latency_table():
    for space in (small_space(sizes=()), greedynas.load_space("macro")):
        path, table = whole_path(space), made_up(space)
        facts = path_facts(path, space, table)
        priced = [layer["latency_ms"] for layer in facts["layers"]]
        assert sum(priced) == pytest.approx(table.price(path, space)) == facts["latency_ms"]
        console = Console(file=io.StringIO(), width=400)
        show_path(path, space, console, table)
        assert f"latency: {table.price(path, space):.3f} ms" in console.file.getvalue()
    with pytest.raises(GreedyNASError, match=r"a latency table is for one image size, and .* chooses among"):
        table.cost_table(SPACE)


def test_a_space_is_described_with_its_supernet():
    facts = space_facts(SPACE)
    net = SharedSupernet(SPACE)
    assert facts["supernet_params"] == sum(parameter.numel() for parameter in net.parameters())
    assert (facts["macs"]["min"], facts["macs"]["max"]) == SPACE.cost_tables["macs"].range
    rows = [line.strip("│ ").split("│") for line in shown(show_space, SPACE).splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) == 5]
    assert rows[0] == ["0", "", "", "64²×3", "PX32 PX48 PX64"]
    for (number, width, stride, shape, ops), (i, layer) in zip(rows[1:], enumerate(SPACE.layers[1:], 1), strict=False):
        assert (number, width, stride) == (str(i), str(layer.out_channels), str(layer.stride))
        assert shape == f"{layer.in_size}²×{layer.in_channels}"
        assert ops == "as above" or ops == " ".join(layer.ops)
    assert len(rows) == len(SPACE.layers)


def test_a_space_is_a_table_in_a_notebook():
    table = SPACE._repr_html_()
    assert "<td>neck</td><td>1²×288</td><td>1²×1024</td>" in table
    assert "PX48" in table


def drawn(path, space):
    return [text.text for text in ElementTree.fromstring(greedynas.draw_path(path, space)).iter() if text.text]


def test_a_path_around_a_base_is_drawn():
    path = (1, *whole_path(SPACE)[1:])
    texts = drawn(path, SPACE)
    assert "image 48×48×3" in texts
    assert f"a network of {SPACE.name}" in texts
    assert texts.count("MB6_K5_SE") == sum(name == "MB6_K5_SE" for name in greedynas.op_names(path, SPACE)) > 0
    assert "24²×16, /2" in texts  # the stem's output at 48 px
    assert "neck" in texts
    assert "FC 1024 → 5" in texts
    assert "pool, FC 1280 → 10" in drawn((2,) * 8, greedynas.load_space("macro"))


def test_a_space_of_timm_by_its_name(run_cli, tmp_path):
    code, out, _ = run_cli("describe", "--space", f"timm:{SMALL}", "--json")
    facts, space = json.loads(out), greedynas.load_space(f"timm:{SMALL}")
    assert code == 0
    assert (facts["paths"], facts["image_size"], facts["macs"]["max"]) == (
        space.size,
        224,
        space.cost_tables["macs"].range[1],
    )
    path = ",".join(map(str, whole_path(space)))
    file = tmp_path / "a.svg"
    code, out, err = run_cli("describe", "--space", f"timm:{SMALL}", "--path", path, "--image-size", 96, "--svg", file)
    assert (code, err) == (0, "")
    assert f"of around {SMALL} at 96 px" in out
    assert "image 96×96×3" in file.read_text()
    code, out, err = run_cli("describe", "--space", "timm:nosuch")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "timm has no model 'nosuch'" in err
