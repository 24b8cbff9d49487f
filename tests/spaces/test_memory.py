"""Peak memory and flash against an executor that runs the networks, and limits on them in sampling and search."""

from itertools import product

import numpy as np
import pytest
import torch

import greedynas
from greedynas import Budget, Fixed, GreedyNASError, Space, Stage, build_network, load_space
from greedynas.spaces.budget import parse_bytes, short_bytes
from greedynas.spaces.describe import path_facts
from greedynas.spaces.feasible import FeasiblePaths
from greedynas.spaces.memory import cost_tables_for, memory_tables
from greedynas.spaces.ranked import ranked_paths  # noqa: F401  (the searchers rank feasible paths with it)
from tests.helpers.reference_executor import measured_peak, stored_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Space(
    name="small",
    ops=["ID", "MB3_K3", "MB6_K5", "MB6_K3_SE"],
    stem=[Fixed(op="CONV_K3", channels=8, stride=2)],
    stages=[Stage(channels=8, repeat=2, stride=1), Stage(channels=12, repeat=3, stride=2)],
    image_size=16,
    num_classes=3,
)


@pytest.mark.parametrize(
    ("space", "size"), [("micro", 48), ("mobilenet-se", 33), ("shufflenet", 32), ("pocket", 32), ("macro", 32)]
)
def test_the_peak_is_that_of_an_executor(space, size):
    space = load_space(space).adapt(image_size=size, num_classes=7)
    tables = memory_tables(space)
    paths = space.sample(6, np.random.default_rng(1))  # 40 each: benchmarks/scripts/memory_peaks.py
    peaks = set()
    for path in paths:
        network = build_network(path, space).eval()
        image = torch.randn(1, space.image_channels, size, size)
        logits, peak = measured_peak(network, image)
        with torch.no_grad():
            assert torch.equal(logits, network(image))
        assert int(tables["ram"](path[None])[0]) == peak
        assert int(tables["flash"](path[None])[0]) == stored_bytes(network)
        peaks.add(peak)
    assert len(peaks) > 1 or space.name in ("macro", "pocket")  # where the stem or one stage decides


def exhaustive(space):
    return np.array(list(product(*map(range, space.num_ops))))


@pytest.mark.parametrize(
    "limits",
    [
        {"max_ram": 6656},
        {"max_ram": 6704, "max_macs": 150_000},
        {"max_ram": 7000, "max_flash": 12_000, "min_params": 3_000},
    ],
)
def test_samples_are_uniform_over_exactly_the_paths_within_limits(limits):
    budget, paths = Budget(**limits), exhaustive(SMALL)
    tables = cost_tables_for(SMALL, budget.limits())
    kept = np.ones(len(paths), bool)
    for cost, (low, high) in budget.limits().items():
        kept &= (tables[cost](paths) >= (low or 0)) & (tables[cost](paths) <= (high or np.inf))
    wanted = set(map(tuple, paths[kept].tolist()))
    assert 20 < len(wanted) < len(paths) / 2
    n = 60 * len(wanted)
    found, counts = np.unique(SMALL.sample(n, np.random.default_rng(0), budget), axis=0, return_counts=True)
    assert set(map(tuple, found.tolist())) == wanted
    chi_square = ((counts - 60) ** 2 / 60).sum()
    assert chi_square < len(wanted) + 5 * (2 * len(wanted)) ** 0.5
    values = [np.random.default_rng(layer).random(ops) for layer, ops in enumerate(SMALL.num_ops)]
    ranked = list(FeasiblePaths(tables, budget.limits()).ranked(values))
    assert set(ranked) == wanted
    sums = [sum(layer[op] for layer, op in zip(values, path, strict=True)) for path in ranked]
    assert sums == pytest.approx(sorted(sums, reverse=True), abs=1e-6)


@pytest.mark.parametrize("searcher", ["evolution", "random", "local", "aging"])
def test_a_search_never_returns_a_path_above_the_limits(searcher):
    space, budget = load_space("micro"), Budget(max_ram=parse_bytes("110K"), max_flash=parse_bytes("400K"))
    tables = memory_tables(space)
    result = greedynas.search(
        space, lambda paths: [sum(path) / 100 for path in paths], budget, searcher=searcher, generations=3
    )
    found = np.array([entry.path for entry in result.found])
    assert (tables["ram"](found) <= 110 * 1024).all()
    assert (tables["flash"](found) <= 400 * 1024).all()
    assert (tables["ram"](found) > 80 * 1024).any()  # the limit is used


def test_limits_that_no_path_keeps_are_one_line():
    with pytest.raises(GreedyNASError, match=r"no path has ram of at most 1,024: every path needs [\d,]+") as error:
        load_space("micro").sample(1, np.random.default_rng(0), Budget(max_ram=1024))
    assert "\n" not in str(error.value)
    with pytest.raises(GreedyNASError, match=r"no path has flash of at most 1,024"):
        load_space("micro").sample(1, np.random.default_rng(0), Budget(max_flash=1024))


@pytest.mark.parametrize(
    ("text", "value"), [("256K", 262144), ("1M", 2**20), ("0.5 MiB", 2**19), ("320kb", 327680), ("9", 9)]
)
def test_amounts_of_memory(text, value):
    assert parse_bytes(text) == value
    assert parse_bytes(short_bytes(value)) == value


@pytest.mark.parametrize("text", ["", "K", "-1K", "1T", "many", "0"])
def test_malformed_amounts_are_refused(text):
    with pytest.raises(GreedyNASError, match=r"memory|positive"):
        parse_bytes(text)


def test_describe_states_memory(run_cli):
    space = load_space("micro")
    path = space.sample(1, np.random.default_rng(0))[0]
    facts = path_facts(path, space)
    assert facts["ram"] == int(memory_tables(space)["ram"](path[None])[0])
    digits = "".join(map(str, path.tolist()))
    code, out, _ = run_cli("describe", "--space", "micro", "--path", digits, "--ram", "1K")
    assert code == 0
    assert "of RAM for activations" in out
    assert "ram is limited to 1.0 KiB" in out
    code, out, _ = run_cli("describe", "--space", "micro", "--ram", "128K", "--flash", "1M")
    assert code == 0
    assert "of random paths are within the limits" in out
    code, _, err = run_cli("describe", "--space", "micro", "--ram", "1K")
    assert (code, err.count("\n")) == (2, 1)
    assert "no path has ram of at most 1,024" in err
