import itertools
import json
import time

import numpy as np
import pytest
import yaml
from hypothesis import given
from scipy import stats

from greedynas import Budget, Fixed, GreedyNASError, Space, Stage, load_space, space_names
from tests.helpers.strategies import spaces

SHIPPED = ["fashion", "macro", "micro", "mobilenet", "mobilenet-se", "pocket", "shufflenet"]


def test_the_builtin_spaces():
    assert space_names() == SHIPPED
    shape = {name: (len(load_space(name).layers), set(load_space(name).num_ops)) for name in SHIPPED[1:]}
    large = {"mobilenet": (21, {7}), "mobilenet-se": (21, {13}), "shufflenet": (20, {4})}
    assert shape == {"macro": (8, {3}), "micro": (14, {7}), "pocket": (8, {3}), **large}
    assert load_space("mobilenet").size == 7**21


@pytest.mark.timed
def test_macro_costs_equal_the_ground_truth_in_under_a_second(macro_truth):
    truth = json.loads(macro_truth.read_text())
    start = time.perf_counter()
    costs = load_space("macro").costs([[int(digit) for digit in path] for path in truth])
    assert time.perf_counter() - start < 1
    assert len(truth) == 6561
    assert costs.macs.tolist() == [entry["flops"] for entry in truth.values()]
    assert costs.params.tolist() == [entry["params"] for entry in truth.values()]


@pytest.mark.timed
def test_a_million_paths_are_priced_in_under_half_a_second():
    space = load_space("mobilenet-se")
    paths = space.sample(1_000_000, np.random.default_rng(0))
    start = time.perf_counter()
    costs = space.costs(paths)
    assert time.perf_counter() - start < 0.5
    assert costs.macs.dtype == costs.params.dtype == np.int64
    assert costs.macs.shape == (1_000_000,)


@pytest.mark.timed
@pytest.mark.parametrize(("limit", "count"), [(330_000_000, 100_000), (200_000_000, 10_000)])
def test_sampling_under_a_budget_is_fast_even_if_hardly_any_path_fits(limit, count):
    space = load_space("mobilenet")
    start = time.perf_counter()
    paths = space.sample(count, np.random.default_rng(0), Budget(max_macs=limit))
    assert time.perf_counter() - start < 10
    assert paths.shape == (count, 21)
    assert space.costs(paths).macs.max() <= limit
    assert len(np.unique(paths, axis=0)) > 0.99 * count


@pytest.mark.parametrize(
    "budget",
    [
        Budget(max_macs=40_000_000),
        Budget(min_macs=90_000_000),
        Budget(min_macs=50_000_000, max_macs=52_000_000),
        Budget(max_macs=60_000_000, max_params=1_200_000),
        Budget(max_macs=60_000_000, min_params=1_000_000, max_params=1_500_000),
    ],
)
def test_each_feasible_path_is_equally_likely(budget):
    space = load_space("macro")
    everything = np.array(list(itertools.product(range(3), repeat=8)))
    costs = space.costs(everything)
    feasible = np.ones(len(everything), dtype=bool)
    for name in ("macs", "params"):  # by the fields of the budget, because `limits` is under test as well
        low, high = getattr(budget, f"min_{name}") or 0, getattr(budget, f"max_{name}") or np.inf
        feasible &= (getattr(costs, name) >= low) & (getattr(costs, name) <= high)
    expected = {tuple(path) for path in everything[feasible]}
    draws = space.sample(40 * len(expected), np.random.default_rng(1), budget)
    seen, counts = np.unique(draws, axis=0, return_counts=True)
    assert {tuple(path) for path in seen} == expected  # with 40 draws each, missing one has a chance of e^-40
    assert stats.chisquare(counts).pvalue > 0.001


def test_uniform_samples_cover_layers_with_different_ops():
    space = Space(
        name="mixed",
        ops=["ID", "MB3_K3"],
        stem=[Fixed(op="CONV_K3", channels=8)],
        stages=[Stage(channels=8, repeat=2), Stage(channels=16, ops=["MB3_K3", "MB6_K3", "MB6_K5"])],
        image_size=8,
    )
    paths = space.sample(6000, np.random.default_rng(0))
    _, counts = np.unique(paths, axis=0, return_counts=True)
    assert len(counts) == space.size == 12
    assert stats.chisquare(counts).pvalue > 0.001


def test_the_same_generator_gives_the_same_paths():
    space, budget = load_space("mobilenet"), Budget(max_macs=330_000_000)
    for limit in (None, budget):
        first, second = (space.sample(100, np.random.default_rng(7), limit) for _ in range(2))
        assert (first == second).all()


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(max_macs=50_000_000), "cheapest path has 50,878,976"),
        (Budget(min_params=6_000_000), "most expensive path has 5,135,080"),
        (Budget(max_macs=51_000_000, min_params=5_000_000), "no path is within all limits"),
        (Budget(max_latency_ms=80), "latency table"),
    ],
)
def test_a_budget_without_feasible_paths_is_refused(budget, message):
    with pytest.raises(GreedyNASError, match=message):
        load_space("mobilenet").sample(10, np.random.default_rng(0), budget)


@given(spaces())
def test_yaml_is_read_back_as_the_same_space(tmp_path_factory, space):
    file = tmp_path_factory.mktemp("space") / "mine.yaml"
    file.write_text(space.to_yaml())
    assert load_space(file) == space
    assert load_space(space) is space
    assert hash(load_space(file)) == hash(space)


def test_the_space_of_the_guide_works(tmp_path):
    page = (load_space.__globals__["SPACES"].parents[2] / "docs" / "guide" / "your-space.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "mine.yaml").write_text(text)
    space = load_space(tmp_path / "mine.yaml")
    assert space.num_ops == (4, 4, 4, 2, 2, 2, 4, 4)


def spoiled(**changes):
    data = yaml.safe_load(load_space("macro").to_yaml())
    for key, value in changes.items():
        data[key] = value
    return yaml.safe_dump(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "not valid YAML"),
        ("- a\n- b", "mapping"),
        ("", "mapping"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        (spoiled(ops=["ID", "FOO"]), "unknown op 'FOO'"),
        (spoiled(ops=["ID", "ID"]), "listed twice"),
        (spoiled(ops=[]), "ops"),
        (spoiled(stages=[{"channels": 0}]), "stages.0.channels"),
        (spoiled(stages=[{"channels": -4}]), "stages.0.channels"),
        (spoiled(stages=[{"channels": 8, "repeat": 0}]), "stages.0.repeat"),
        (spoiled(stages=[{"channels": 8, "stride": 0}]), "stages.0.stride"),
        (spoiled(stages=[{"channels": 1.5}]), "stages.0.channels"),
        (spoiled(stages=[]), "stages"),
        (spoiled(stages=[{"channels": 33, "repeat": 2, "ops": ["SHUFFLE_K3"]}]), "cannot go from 32 to 33"),
        (spoiled(image_size=4), "too small"),
        (spoiled(image_size=0), "image_size"),
        (spoiled(num_classes=-1), "num_classes"),
        (spoiled(activation="tanh"), "activation"),
        (spoiled(stagez=[]), "stagez"),
    ],
)
def test_wrong_space_files_get_one_line(text, message, tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(GreedyNASError, match=message) as error:
        load_space(file)
    assert "wrong.yaml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("paths", [[[0] * 7], [[3] * 8], [[-1] * 8], [[0.5] * 8], [0] * 8])
def test_wrong_arrays_of_paths_are_refused(paths):
    with pytest.raises(GreedyNASError, match="path"):
        load_space("macro").costs(paths)
