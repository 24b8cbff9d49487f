import itertools
import json
import math
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from greedynas import (
    Budget,
    Fixed,
    GreedyNASError,
    LatencyTable,
    Space,
    Stage,
    import_latency,
    known_networks,
    load_latency_table,
    load_space,
    measure_latency,
)
from greedynas.deploy import latency_measurement
from greedynas.deploy.latency_backends import LATENCY_BACKENDS
from greedynas.deploy.latency_backends.backend import LatencyBackend, make_block_of, make_image, open_backend
from greedynas.deploy.latency_backends.onnxruntime_backend import OnnxRuntimeBackend, join_onnx
from greedynas.deploy.latency_backends.torch_backend import compose
from greedynas.deploy.runtimes.openvino_model import compile_model
from greedynas.runtime.yaml_files import MAX_BYTES
from greedynas.spaces.latency import Block, Entry, fill, fingerprint, fixed_layers
from tests.conftest import SHARED
from tests.helpers.latency import blocks_of, made_up
from tests.helpers.plugins import registered
from tests.helpers.synthetic_files import phone_ms, phone_space, write_phone_table

MOBILENET = load_space("mobilenet")
SUMS = {  # ms on the Pixel 1, from the project's design
    "proxyless-r": (known_networks()["proxyless-r"].path, 82.52),
    "all MB3_K3": ((1,) * 21, 76.05),
    "all MB6_K7": ((6,) * 21, 191.03),
}


def small_space(width=8, ops=("ID", "MB2_K3", "MB3_K3"), **changes):
    stages = [Stage(channels=width, repeat=2, stride=2), Stage(channels=12, repeat=2)]
    fixed = {"stem": [Fixed(op="CONV_K3", channels=8)], "head": [Fixed(op="CONV_K1", channels=16)]}
    settings = {"stages": stages, "image_size": 8, "num_classes": 3, **fixed, **changes}
    return Space(name="small", ops=list(ops), **settings)


@pytest.fixture(scope="module")
def pixel1():
    """Return the published table of the Pixel 1."""
    file = SHARED / "pixel1_latency_proxyless.yaml"
    if not file.exists():
        pytest.skip("the Pixel 1 table is not beside this checkout")
    return file


@pytest.fixture(scope="module")
def phone_file(tmp_path_factory):
    """Return the file of a synthetic table with the same blocks."""
    return write_phone_table(tmp_path_factory.mktemp("phone") / "phone.yaml")


@pytest.fixture(scope="module")
def phone(phone_file):
    return import_latency(phone_file, MOBILENET, nearest_width=True)


# Tables


def test_price_is_the_sum_of_the_entries():
    space = small_space()
    table = made_up(space, constant_ms=0.25)
    paths = np.array(list(itertools.product(*(range(n) for n in space.num_ops))))
    fixed = sum(entry.ms for row in table.fixed for entry in row.ops.values())
    expected = [
        0.25
        + fixed
        + sum(table.entries[i][layer.ops[op]].ms for i, (layer, op) in enumerate(zip(space.layers, path, strict=True)))
        for path in paths
    ]
    np.testing.assert_allclose(table.cost_table(space)(paths), expected)
    assert table.price(paths[5], space) == pytest.approx(expected[5])
    assert table.entries[1]["ID"] == Entry(ms=0.0)  # an identity takes no time
    assert table.entries[0]["ID"].ms > 0
    assert len(table.fixed) == 3  # stem, head, classifier


def test_a_limit_excludes_paths_without_a_price():
    space = small_space()
    table = made_up(space, lack=["ID"])  # at layers 0 and 2, which change the shape
    assert table.missing() == ["layer 0 ID 8x8x8 to 8 channels /2", "layer 2 ID 4x4x8 to 12 channels"]
    assert table.priceable_paths() == 2 * 3 * 2 * 3
    assert table.unpriceable_share() == pytest.approx(1 - 4 / 9)
    assert table.price((0, 1, 1, 1), space) is None
    paths = np.array(list(itertools.product(range(3), repeat=4)))
    costs = table.cost_table(space)(paths)
    assert np.isnan(costs).sum() == 81 - 36
    limit = float(np.nanmedian(costs))
    drawn = space.sample(4000, np.random.default_rng(0), Budget(max_latency_ms=limit), latency=table)
    seen, counts = np.unique(drawn, axis=0, return_counts=True)
    assert {tuple(path) for path in seen} == {tuple(path) for path in paths[costs <= limit]}
    assert counts.min() > 0.5 * counts.mean()
    both = Budget(max_latency_ms=limit, max_params=int(np.median(space.costs(paths).params)))
    drawn = space.sample(100, np.random.default_rng(0), both, latency=table)
    assert (table.cost_table(space)(drawn) <= limit).all()
    assert (space.costs(drawn).params <= both.max_params).all()


def test_limits_that_no_path_keeps_are_refused():
    space = small_space()
    table = made_up(space)
    with pytest.raises(GreedyNASError, match=r"latency_ms of at most 0\.5: the cheapest path has"):
        space.sample(1, np.random.default_rng(0), Budget(max_latency_ms=0.5), latency=table)
    with pytest.raises(GreedyNASError, match="needs a latency table"):
        space.sample(1, np.random.default_rng(0), Budget(max_latency_ms=0.5))
    with pytest.raises(GreedyNASError, match="no timing at all for layer 0, layer 2"):
        made_up(space, lack=["ID", "MB2_K3", "MB3_K3"]).cost_table(space)
    with pytest.raises(GreedyNASError, match="no timing at all for classifier"):
        made_up(space, lack=["FC"]).cost_table(space)


@pytest.mark.parametrize(
    "other",
    [
        small_space(width=10),
        small_space(ops=("ID", "MB2_K3", "MB3_K5")),
        small_space(ops=("ID", "MB3_K3", "MB2_K3")),
        small_space(image_size=16),
        small_space(num_classes=4),
        small_space(activation="hard_swish"),
        small_space(head=[]),
        load_space("macro"),
    ],
)
def test_a_table_for_another_space_is_refused(other):
    table = made_up(small_space())
    assert fingerprint(other) != table.fingerprint == fingerprint(small_space())
    for use in (
        lambda: table.cost_table(other),
        lambda: table.price(other.sample(1, np.random.default_rng(0))[0], other),
        lambda: other.sample(1, np.random.default_rng(0), Budget(max_latency_ms=9), latency=table),
    ):
        with pytest.raises(GreedyNASError, match="the latency table is for"):
            use()


def test_the_name_of_a_space_does_not_matter():
    renamed = Space.model_validate(small_space().model_dump() | {"name": "another"})
    assert made_up(small_space()).cost_table(renamed)


def test_json_round_trip(tmp_path):
    space = small_space()
    table = made_up(space, lack=["MB3_K3"], constant_ms=-0.125)
    table.save(tmp_path / "table.json")
    again = load_latency_table(tmp_path / "table.json")
    assert again == table
    assert again.fingerprint == table.fingerprint
    assert json.loads((tmp_path / "table.json").read_text())["schema_version"] == 1
    assert load_latency_table(table) is table
    with pytest.raises(GreedyNASError, match="cannot write"):
        table.save(tmp_path / "nosuch" / "table.json")


def test_import_of_our_own_tables(tmp_path):
    file = tmp_path / "table.json"
    space = small_space()
    table = made_up(space, constant_ms=0.5)
    table.save(file)
    assert import_latency(file, space) == table
    wider = small_space(width=10)
    with pytest.raises(
        GreedyNASError, match=r"lacks 8 entries of small: layer 0 ID 8x8x8 to 10 channels /2, .* channels"
    ):
        import_latency(file, wider)
    borrowed = import_latency(file, wider, nearest_width=True)
    assert borrowed.borrowed() == 8
    assert borrowed.entries[0]["ID"].borrowed == "ID 8x8x8 to 8 channels /2"
    assert borrowed.entries[3]["MB2_K3"] == table.entries[3]["MB2_K3"]
    assert (borrowed.device, borrowed.constant_ms) == ("abacus", 0.5)
    # A borrowed entry keeps its mark and is not borrowed again.
    borrowed.save(file)
    assert import_latency(file, wider) == borrowed
    with pytest.raises(GreedyNASError, match="no timing at all for layer 0, layer 2"):
        import_latency(file, small_space(width=11), nearest_width=True)
    with pytest.raises(GreedyNASError, match="timed with relu, small has hard_swish"):
        import_latency(file, small_space(activation="hard_swish"))


def test_missing_entries_are_borrowed_from_the_nearest_width():
    def ms(width):
        timings = {Block("MB3_K3", w, w, 1, 14): Entry(ms=w) for w in (16, 24, 40, 80)}
        timings |= {Block("MB3_K3", 30, 31, 1, 14): Entry(ms=1000), Block("MB3_K3", 30, 30, 1, 7): Entry(ms=2000)}
        timings |= {Block("MB3_K5", 30, 30, 1, 14): Entry(ms=3000), Block("MB3_K3", 30, 30, 2, 14): Entry(ms=4000)}
        stem = [Fixed(op="CONV_K3", channels=width)]
        space = small_space(image_size=14, ops=["MB3_K3"], stages=[Stage(channels=width)], stem=stem)
        entry = fill(space, timings, nearest_width=True, device="", backend="").entries[0]["MB3_K3"]
        return entry.ms, entry.borrowed is not None

    assert ms(24) == (24, False)
    assert ms(30) == (24, True)
    assert ms(33) == (40, True)
    assert ms(1000) == (80, True)


# ProxylessNAS's format


@pytest.mark.parametrize("name", SUMS)
def test_sums_on_the_pixel_1(pixel1, name):
    path, expected = SUMS[name]
    table = import_latency(pixel1, MOBILENET, nearest_width=True)
    assert table.price(path, MOBILENET) == pytest.approx(expected, abs=0.05)


def test_a_file_with_all_blocks_prices_every_path(phone_file):
    """For the space of the file, nothing is borrowed, and the price is the sum of the blocks."""
    space = phone_space(ops=[op for op in MOBILENET.ops if op != "ID"])
    table = import_latency(phone_file, space)
    assert (table.missing(), table.borrowed(), table.device) == ([], 0, "phone.yaml")
    for path in space.sample(20, np.random.default_rng(0)).tolist():
        blocks = [Block.of(layer, layer.ops[op]) for layer, op in zip(space.layers, path, strict=True)]
        blocks += [Block.of(layer, layer.ops[0]) for layer in fixed_layers(space)]
        assert table.price(path, space) == pytest.approx(sum(map(phone_ms, blocks)))


def sum_on_the_phone(path):
    """Return the latency of a path of `mobilenet` by the file, with blocks of 24 channels in place of 32."""
    space = phone_space()
    layers = [(layer, layer.ops[op]) for layer, op in zip(space.layers, path, strict=True)]
    layers += [(layer, layer.ops[0]) for layer in fixed_layers(space)]
    return sum(phone_ms(Block.of(layer, op)) for layer, op in layers if not layer.is_nothing(op))


@pytest.mark.parametrize("name", SUMS)
def test_blocks_of_the_nearest_width_are_borrowed(phone, name):
    path, _ = SUMS[name]
    assert phone.price(path, MOBILENET) == pytest.approx(sum_on_the_phone(path))


def test_the_missing_entries_of_a_phones_table(phone, phone_file):
    # Its first stage has 24 channels, ours 32: 6 ops in layers 0 to 4 are missing, and all 1x1 identities.
    with pytest.raises(
        GreedyNASError, match=r"lacks 36 entries of mobilenet: layer 0 ID .* and 28 more; --nearest-width"
    ):
        import_latency(phone_file, MOBILENET)
    assert phone.borrowed() == 30
    marked = [i for i, row in enumerate(phone.entries) if any(entry and entry.borrowed for entry in row.values())]
    assert marked == [0, 1, 2, 3, 4]
    assert phone.entries[1]["MB3_K3"].borrowed == "MB3_K3 56x56x24 to 24 channels"
    assert phone.entries[1]["ID"] == Entry(ms=0.0)
    timing_there = yaml.safe_load(phone_file.read_text())[
        "expanded_conv-input:56x56x24-output:56x56x24-expand:3-kernel:3-stride:1-idskip:1"
    ]
    assert phone.entries[1]["MB3_K3"].ms == timing_there["mean"]
    assert phone.entries[1]["MB3_K3"].count == timing_there["count"]
    assert phone.entries[1]["MB3_K3"].spread == pytest.approx(
        1.349 * 0.2
    )  # of a normal distribution with variance 0.04
    assert [text.split()[1:3] for text in phone.missing()] == [[str(i), "ID"] for i in (0, 4, 8, 12, 16, 20)]
    assert phone.unpriceable_share() == pytest.approx(1 - (6 / 7) ** 6)


def test_squeeze_and_excitation_has_no_price_on_the_phone(phone_file):
    space = load_space("mobilenet-se")
    table = import_latency(phone_file, space, nearest_width=True)
    assert len(table.missing()) == 6 + 21 * 6
    assert table.price(known_networks()["greedynas-a"].path, space) is None
    cheapest, most_expensive = table.cost_table(space).range
    limit = 0.7 * cheapest + 0.3 * most_expensive
    drawn = space.sample(50, np.random.default_rng(0), Budget(max_latency_ms=limit), latency=table)
    assert (table.cost_table(space)(drawn) <= limit).all()


def test_another_number_of_classes_borrows_the_classifier(phone_file):
    table = import_latency(phone_file, MOBILENET.adapt(num_classes=10), nearest_width=True)
    assert table.fixed[-1].ops["FC"].borrowed == "FC 7x7x1280 to 1000 channels"


def test_another_image_size_has_no_timings(phone_file):
    with pytest.raises(GreedyNASError, match="no path of mobilenet can be priced"):
        import_latency(phone_file, MOBILENET.adapt(image_size=192), nearest_width=True)


# Untrusted files

KEY = "expanded_conv-input:14x14x80-output:14x14x96-expand:3-kernel:3-stride:1-idskip:0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{KEY}: {{mean: .nan, var: 0, count: 1}}", "mean must be a number"),
        (f"{KEY}: {{mean: .inf, var: 0, count: 1}}", "mean must be a number"),
        (f"{KEY}: {{mean: -1, var: 0, count: 1}}", "mean must be a number"),
        (f"{KEY}: {{mean: 1.0e+9, var: 0, count: 1}}", "from 0 to 600000"),
        (f"{KEY}: {{mean: {'9' * 4000}, var: 0, count: 1}}", "mean must be a number"),
        (f"{KEY}: {{mean: {'9' * 9000}, var: 0, count: 1}}", "not valid YAML"),
        (f"{KEY}: {{mean: fast, var: 0, count: 1}}", "mean must be a number"),
        (f"{KEY}: {{mean: true}}", "mean must be a number"),
        (f"{KEY}: {{var: 1}}", "mean must be a number"),
        (f"{KEY}: {{mean: 1, var: -1}}", "var must be a number"),
        (f"{KEY}: {{mean: 1, count: .nan}}", "count must be a number"),
        (f"{KEY}: 12", "a timing must be a mapping"),
        (f"{KEY}: &a {{mean: 1}}\nb: *a", "aliases are not allowed"),
        ("a: &a {x: 1}\nb: &b {<<: [*a, *a]}\nc: {<<: [*b, *b]}", "aliases are not allowed"),
        ("!!python/object/apply:os.system [ls]", "not valid YAML"),
        ("- 1\n- 2", "mapping of names"),
        ("just text", "mapping of names"),
        ("", "mapping of names"),
        ("a: 1\nb: 2", "no key of ProxylessNAS's or Once-for-All's format"),
        ("a: [", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("#" * (MAX_BYTES + 1), "larger than"),
        ('{"schema_version": 2}', "schema_version"),
        ('{"a": ', "is not a latency table"),
        ('{"a": ' * 5000, "is not a latency table"),
    ],
)
def test_invalid_files_are_refused(tmp_path, text, message):
    (tmp_path / "file").write_text(text)
    with pytest.raises(GreedyNASError, match=message):
        import_latency(tmp_path / "file", MOBILENET, nearest_width=True)
    with pytest.raises(GreedyNASError):
        load_latency_table(tmp_path / "file")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("layers", 0, "ops", "MB2_K3", "ms"), -1.0),
        (("layers", 0, "ops", "MB2_K3", "ms"), math.nan),
        (("layers", 0, "ops", "MB2_K3", "ms"), math.inf),
        (("layers", 0, "ops", "MB2_K3", "ms"), 1e12),
        (("layers", 0, "ops", "MB2_K3", "ms"), "1"),
        (("layers", 0, "ops"), {}),
        (("layers",), []),
        (("fixed",), None),
        (("constant_ms",), math.nan),
        (("device",), "\x1b[2J"),
        (("surprise",), 1),
    ],
)
def test_damaged_tables_are_refused(tmp_path, where, value):
    data = made_up(small_space()).model_dump(mode="json")
    inner = data
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    (tmp_path / "table.json").write_text(json.dumps(data))
    with pytest.raises(GreedyNASError, match="is not a latency table") as error:
        load_latency_table(tmp_path / "table.json")
    assert str(where[-1]) in str(error.value)


def test_unknown_keys_are_logged(tmp_path, caplog):
    keys = [KEY, KEY.replace("idskip:0", "idskip:1"), KEY.replace("14x14x80", "14x15x80"), "Pool", 7]
    keys += [KEY.replace("output:14x14", "output:9x9"), KEY.replace("stride:1", "stride:0")]
    keys += ["Conv-input:14x14x3-output:14x14x80", "Logits-input:14x14x96-output:9"]
    (tmp_path / "file.yaml").write_text(yaml.safe_dump({key: {"mean": 2, "var": 1, "count": 3} for key in keys}))
    stem, stages = [Fixed(op="CONV_K3", channels=80)], [Stage(channels=96)]
    space = small_space(ops=["MB3_K3"], stem=stem, stages=stages, head=[], image_size=14, num_classes=9)
    assert import_latency(tmp_path / "file.yaml", space).price([0], space) == 6
    assert "unknown keys are left out" in caplog.text
    assert caplog.text.count("idskip:1") == 1


@given(st.data())
def test_damaged_files_never_crash(tmp_path_factory, data):
    """Bytes are changed, removed or added within good files of both formats."""
    space = small_space()
    good = yaml.safe_dump({KEY: {"mean": 2.5, "var": 0.1, "count": 3}, "Logits-input:7x7x12-output:3": {"mean": 1}})
    ours = json.dumps(made_up(space, lack=["ID"]).model_dump(mode="json"))
    text = bytearray(data.draw(st.sampled_from([good, ours])).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 30))] = data.draw(
            st.binary(max_size=8)
            | st.sampled_from([b"-", b"1e999", b"null", b"NaN", b"{", b"]", b"\n", b"&a ", b"*a", b": "])
        )
    file = tmp_path_factory.mktemp("fuzz") / "file"
    file.write_bytes(bytes(text))
    for read in (
        lambda: import_latency(file, space, nearest_width=True),
        lambda: import_latency(file, space),
        lambda: load_latency_table(file).cost_table(space),
    ):
        with suppress(GreedyNASError):
            read()


# Measuring


class Abacus:
    """A backend with known latencies: a call costs 0.1 ms, a network 0.03 ms more; half of all runs are disturbed."""

    backend, device, threads = "beads", "abacus", 1

    def __init__(self, space):
        self.ms = {block: 0.5 + i / 16 for i, block in enumerate(blocks_of(space))}
        self.made, self.rng = [], np.random.default_rng(0)

    def parts(self, layer, ops, activation):
        self.made += [Block.of(layer, op) for op in ops]
        return [Block.of(layer, op) for op in ops]

    def runner(self, parts, layer, side_by_side=False):
        assert side_by_side == (len(set(parts)) == 1 and len(parts) > 1 and not parts[0].keeps_shape)
        whole = 0.03 if len(set(parts)) > 1 else 0

        def run():
            disturbance = self.rng.exponential() if self.rng.random() < 0.5 else 0
            return 0.1 + whole + sum(self.ms[part] for part in parts) + disturbance

        return run


def test_the_latency_of_a_block_is_that_of_one_more_copy(monkeypatch):
    space = small_space()
    abacus = Abacus(space)
    monkeypatch.setattr(latency_measurement, "open_backend", lambda *_: abacus)
    reports = []
    table = measure_latency(space, repeats=30, progress=lambda *report: reports.append(report))
    assert len(abacus.made) == len(set(abacus.made))  # each distinct block once, and no identities
    assert Block("ID", 8, 8, 1, 4) not in abacus.made
    for row, layer in zip((*table.layers, *table.fixed), (*space.layers, *fixed_layers(space)), strict=True):
        for op, entry in row.ops.items():
            expected = 0 if layer.is_nothing(op) else abacus.ms[Block.of(layer, op)]
            assert entry.ms == pytest.approx(expected)
    assert table.constant_ms == pytest.approx(0.13)
    assert table.fit.networks == 8
    assert table.fit.median_error == pytest.approx(0, abs=1e-9)
    assert table.layers[0].ops["MB2_K3"].spread > 0  # the disturbances
    assert {what for what, _, _ in reports} == {"building blocks", "timing blocks", "whole networks"}
    assert all(done <= total for _, done, total in reports)


class Beads(LatencyBackend):
    """The same backend as a plugin."""

    devices = ("cpu", "npu")

    def __init__(self, device, threads):
        super().__init__(device, threads)
        self.backend, self.device = "beads 1.0", f"abacus ({device})"
        self.abacus = Abacus(small_space())

    def parts(self, layer, ops, activation):
        return self.abacus.parts(layer, ops, activation)

    def runner(self, parts, layer, side_by_side=False):
        return self.abacus.runner(parts, layer, side_by_side)


def test_the_backend_of_a_plugin_measures(run_cli, tmp_path):
    (tmp_path / "small.yaml").write_text(small_space().to_yaml())
    out = tmp_path / "table.json"
    command = ["latency", "measure", "--space", tmp_path / "small.yaml", "--out", out, "--repeats", 5, "--json"]
    with registered(LATENCY_BACKENDS, beads=Beads):
        table = measure_latency(small_space(), "beads", device="npu", threads=3, repeats=30)
        assert (table.backend, table.device, table.threads) == ("beads 1.0", "abacus (npu)", 3)
        assert table.constant_ms == pytest.approx(0.13)
        assert run_cli(*command, "--backend", "beads")[0] == 0
        assert load_latency_table(out).backend == "beads 1.0"
        with pytest.raises(
            GreedyNASError, match="beads can be timed only on the CPU or npu; for a GPU use --backend torch"
        ):
            measure_latency(small_space(), "beads", device="cuda")
        with pytest.raises(GreedyNASError, match=r"unknown device 'tpu'.*known: cpu, cuda, npu"):
            measure_latency(small_space(), "beads", device="tpu")
        with pytest.raises(GreedyNASError, match=r"latency backend 'bead'.*known: onnxruntime, .*torch, beads"):
            measure_latency(small_space(), "bead")
    code, _, err = run_cli(*command, "--backend", "beads")
    assert (code, err.count("\n")) == (2, 1)
    assert "unknown latency backend 'beads'; known: onnxruntime, " in err
    assert "torch (those of a plugin need --plugin MODULE)" in err


def test_a_backend_with_a_missing_package_is_refused():
    class Far(Beads):
        packages = {"no_such_runtime": "no-such-runtime>=2"}  # noqa: RUF012

    message = (
        "^the latency backend 'far' needs no_such_runtime, which is not installed: pip install no-such-runtime>=2$"
    )
    with registered(LATENCY_BACKENDS, far=Far), pytest.raises(GreedyNASError, match=message):
        measure_latency(small_space(), "far")


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_real_backends_measure_a_table(backend, tmp_path):
    space = small_space(ops=("ID", "MB2_K3_SE"), activation="hard_swish")
    threads = torch.get_num_threads()
    table = measure_latency(space, backend, repeats=2)
    assert torch.get_num_threads() == threads
    assert table.backend.startswith(backend)
    assert table.missing() == []
    low, high = table.cost_table(space).range
    assert math.isfinite(low)
    assert low < high < 1000
    assert table.entries[3]["ID"].ms == 0 < table.entries[3]["MB2_K3_SE"].ms
    table.save(tmp_path / "table.json")
    assert load_latency_table(tmp_path / "table.json") == table


@pytest.mark.parametrize("side_by_side", [False, True])
def test_joined_onnx_graphs_compute_the_same(side_by_side):
    space = small_space(ops=("ID", "MB2_K3_SE"), activation="hard_swish")
    layer = space.layers[2]  # changes the shape
    first, second = (space.layers[2], space.layers[2]) if side_by_side else (space.layers[2], space.layers[3])
    backend = OnnxRuntimeBackend("cpu", 1)
    ops = ["ID", "MB2_K3_SE"] if side_by_side else ["MB2_K3_SE", "MB2_K3_SE"]
    parts = [backend.parts(layer, [op], space.activation)[0] for layer, op in zip((first, second), ops, strict=True)]
    model = join_onnx(parts, side_by_side)
    image = make_image(layer)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"input": image.numpy()})
    blocks = [make_block_of(layer, op, space.activation) for layer, op in zip((first, second), ops, strict=True)]
    with torch.no_grad():
        expected = blocks[0](image) + blocks[1](image) if side_by_side else nn.Sequential(*blocks)(image)
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_onnxruntime_does_not_merge_copies(tmp_path):
    """If ONNX Runtime recognised copies side by side as equal, they would seem to cost nothing."""
    space = small_space()
    layer = space.layers[2]
    model = join_onnx(
        OnnxRuntimeBackend("cpu", 1).parts(layer, ["MB2_K3"], "relu") * latency_measurement.COPIES,
        side_by_side=True,
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    assert sum("Conv" in node.op_type for node in nodes) == 3 * latency_measurement.COPIES


def test_tables_of_once_for_all_are_imported(tmp_path):
    """Their `expand` counts channels, `se` and `hs` say what a block has, and the pooling is timed by itself."""
    space = Space(
        name="ofa",
        activation="hard_swish",
        ops=["MB3_K5", "MB4_K5_SE"],
        stem=[Fixed(op="CONV_K3", channels=24, stride=2)],
        stages=[Stage(channels=24, repeat=1), Stage(channels=32, repeat=1, stride=2)],
        image_size=16,
        num_classes=10,
    )
    rows = {
        "Conv-input:16x16x3-output:8x8x24": 1.0,
        "expanded_conv-input:8x8x24-output:8x8x24-expand:72-kernel:5-stride:1-idskip:1-se:0-hs:1": 2.0,
        "expanded_conv-input:8x8x24-output:8x8x24-expand:72-kernel:5-stride:1-idskip:1-se:0-hs:0": 99.0,  # ReLU
        "expanded_conv-input:8x8x24-output:8x8x24-expand:96-kernel:5-stride:1-idskip:1-se:1-hs:1": 3.0,
        "expanded_conv-input:8x8x24-output:4x4x32-expand:72-kernel:5-stride:2-idskip:0-se:0-hs:1": 4.0,
        "expanded_conv-input:8x8x24-output:4x4x32-expand:96-kernel:5-stride:2-idskip:0-se:1-hs:1": 5.0,
        "AvgPool2D-input:4x4x32-output:1x1x32": 0.25,
        "Logits-input:1x1x32-output:10": 0.5,
    }
    file = tmp_path / "note10.yaml"
    file.write_text(yaml.safe_dump({key: {"mean": mean, "var": 0.0, "count": 5} for key, mean in rows.items()}))
    table = import_latency(file, space)
    assert table.price((0, 0), space) == pytest.approx(1 + 2 + 4 + 0.75)
    assert table.price((1, 1), space) == pytest.approx(1 + 3 + 5 + 0.75)


def test_openvino_does_not_merge_copies():
    """OpenVINO merges parallel branches with equal weights, so those of copies differ."""
    if not find_spec("openvino"):
        pytest.skip("needs pip install greedynas[openvino]")
    import openvino

    space = small_space()
    part = OnnxRuntimeBackend("cpu", 1).parts(space.layers[2], ["MB2_K3"], "relu")
    joined = join_onnx(part * latency_measurement.COPIES, side_by_side=True)
    compiled = compile_model(openvino.Core().read_model(joined.SerializeToString()), 1)
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in compiled.get_runtime_model().get_ops()]
    assert sum("Convolution" in kind for kind in kinds) == 3 * latency_measurement.COPIES


def test_copies_of_modules_have_their_own_weights():
    block = make_block_of(small_space().layers[2], "MB2_K3", "relu")
    copies = list(compose([block, block], side_by_side=False).children())
    for first, second, own in zip(*(module.parameters() for module in (*copies, block)), strict=True):
        assert torch.equal(first, own)
        assert torch.allclose(second, 1.001 * own)


@pytest.mark.parametrize("backend", ["openvino", "ncnn"])
def test_other_runtimes_are_measured(backend):
    for module in ("ncnn", "pnnx") if backend == "ncnn" else ("openvino",):
        if not find_spec(module):
            pytest.skip(f"needs pip install greedynas[{backend}]")
    space = small_space(ops=("ID", "MB2_K3_SE"), activation="hard_swish")
    table = measure_latency(space, backend, repeats=2)
    assert table.backend.startswith(f"{backend} ")
    assert table.backend.endswith(", fp32")
    assert (table.missing(), table.threads) == ([], 1)
    low, high = table.cost_table(space).range
    assert low < high
    if backend == "openvino":  # precision is part of the identity of a table
        assert open_backend("openvino-bf16").backend == table.backend.replace("fp32", "bf16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "tensorrt"}, "unknown latency backend 'tensorrt'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": "cuda"}, "onnxruntime can be timed only on the CPU"),
        ({"threads": 0}, "threads must be from 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
    ],
)
def test_invalid_arguments_to_measure_are_refused(arguments, message):
    with pytest.raises(GreedyNASError, match=message):
        measure_latency(small_space(), **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_on_a_missing_gpu_is_refused():
    with pytest.raises(GreedyNASError, match="PyTorch sees no GPU here"):
        measure_latency(small_space(), "torch", device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_torch_measures_on_a_gpu():
    table = measure_latency(small_space(), "torch", device="cuda", repeats=3)
    assert table.threads is None
    assert 0 < table.cost_table(small_space()).range[0] < 100


# The command line


def test_an_imported_table_is_used_by_describe(run_cli, phone_file, tmp_path):
    out = tmp_path / "phone.json"
    code, printed, err = run_cli("latency", "import", phone_file, "--space", "mobilenet", "--out", out)
    assert (code, printed, err.count("\n")) == (2, "", 1)
    assert "lacks 36 entries" in err
    assert not out.exists()
    command = ["latency", "import", phone_file, "--space", "mobilenet", "--out", out, "--nearest-width"]
    code, printed, err = run_cli(*command)
    assert (code, err) == (0, "")
    assert "30 of 151 entries are borrowed" in printed
    assert "6 entries are missing" in printed
    assert "39.66%" in printed
    facts = json.loads(run_cli(*command, "--json")[1])
    assert (facts["borrowed"], len(facts["missing"]), facts["priceable_paths"]) == (30, 6, 6**6 * 7**15)
    expected = sum_on_the_phone(known_networks()["proxyless-r"].path)
    _, printed, _ = run_cli("describe", "--path", "proxyless-r", "--latency-table", out, "--json")
    facts = json.loads(printed)
    assert facts["latency_ms"] == pytest.approx(expected)
    assert sum(layer["latency_ms"] for layer in facts["layers"]) == pytest.approx(facts["latency_ms"])
    assert f"latency: {expected:.5g} ms" in run_cli("describe", "--path", "proxyless-r", "--latency-table", out)[1]
    skip = ["describe", "--space", "mobilenet", "--path", "0" * 21, "--latency-table", out]
    facts = json.loads(run_cli(*skip, "--json")[1])
    assert facts["latency_ms"] is None
    assert facts["layers"][2]["latency_ms"] is None
    assert "not predicted, the table lacks an op" in run_cli(*skip)[1]
    facts = json.loads(run_cli("describe", "--space", "mobilenet", "--latency-table", out, "--json")[1])
    assert facts["latency_ms"]["min"] < facts["latency_ms"]["quantiles"]["50%"] < facts["latency_ms"]["max"]
    assert facts["unpriceable_share"] == pytest.approx(0.603, abs=0.001)
    assert "60.34% of all paths" in run_cli("describe", "--space", "mobilenet", "--latency-table", out)[1]


def test_a_measured_table_is_used_by_describe(run_cli, tmp_path):
    (tmp_path / "small.yaml").write_text(small_space().to_yaml())
    space, out = tmp_path / "small.yaml", tmp_path / "table.json"
    command = ["latency", "measure", "--space", space, "--backend", "torch", "--out", out, "--repeats", 1]
    code, printed, err = run_cli(*command, "--classes", 5)
    assert (code, err) == (0, "")
    assert "MB2_K3" in printed
    assert f"Next: greedynas describe --space {space} --classes 5 --latency-table {out}" in printed
    assert run_cli("describe", "--space", space, "--classes", 5, "--latency-table", out)[0] == 0
    assert LatencyTable.model_validate_json(out.read_text()).num_classes == 5
    code, printed, err = run_cli("describe", "--space", space, "--latency-table", out)
    assert (code, printed, err.count("\n")) == (2, "", 1)
    assert "for small at 8 px with 5 classes, not for small at 8 px with 3 classes" in err
    facts = json.loads(run_cli(*command, "--json")[1])
    assert (facts["out"], facts["missing"], facts["fit"]["networks"]) == (str(out), [], 8)
    _, printed, _ = run_cli("describe", "--space", space, "--path", "1111", "--latency-table", out, "--json")
    facts = json.loads(printed)
    blocks = sum(layer["latency_ms"] for layer in facts["layers"])
    assert facts["latency_ms"] == pytest.approx(blocks + facts["latency_constant_ms"])


@pytest.mark.parametrize("verb", ["measure", "import"])
def test_help_shows_an_example(run_cli, verb):
    code, out, _ = run_cli("latency", verb, "--help")
    assert code == 0
    assert f"Example: greedynas latency {verb}" in out
    assert verb in run_cli("latency")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "measure", "--space", "macroo", "--out", "t.json"], "unknown space 'macroo'"),
        (["latency", "measure", "--space", "macro", "--out", "no/such/t.json"], "cannot write no/such/t.json"),
        (["latency", "measure", "--space", "macro", "--out", "."], "cannot write"),
        (["latency", "measure", "--space", "macro", "--out", "t.json", "--backend", "tvm"], "unknown latency backend"),
        (["latency", "measure", "--space", "macro", "--out", "t.json", "--threads", "0"], "--threads"),
        (["latency", "measure", "--space", "macro", "--out", "t.json", "--repeats", "0"], "--repeats"),
        (["latency", "measure", "--space", "macro", "--out", "t.json", "--image-size", "1"], "too small"),
        (["latency", "measure", "--space", "macro"], "--out"),
        (["latency", "import", "nosuch.yaml", "--space", "macro", "--out", "t.json"], "no such file: nosuch.yaml"),
        (["latency", "import", ".", "--space", "macro", "--out", "t.json"], "no such file"),
        (["latency", "import", "bytes", "--space", "macro", "--out", "t.json"], "not text"),
        (["latency", "import", "words", "--space", "macro", "--out", "t.json"], "is not a latency table"),
        (["latency", "import", "small.json", "--space", "macro", "--out", "t.json"], "lacks"),
        (["latency", "forget"], "forget"),
        (["describe", "--path", "proxyless-r", "--latency-table", "small.json"], "the latency table is for small"),
        (["describe", "--space", "macro", "--latency-table", "words"], "greedynas latency import"),
        (["describe", "--latency-table", "small.json"], "--space"),
    ],
)
def test_invalid_input_gives_an_error_of_one_line(run_cli, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "words").write_text("just words")
    made_up(small_space()).save(tmp_path / "small.json")
    before = sorted(tmp_path.iterdir())
    code, out, err = run_cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(tmp_path.iterdir()) == before
