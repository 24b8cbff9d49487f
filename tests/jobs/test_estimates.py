import json
import random
import re
import time

import numpy as np
import pytest
import torch
from rich.console import Console

from greedynas import Budget, GreedyNASError, Supernet, load_space
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.settings import SearchSettings, TrainSettings
from greedynas.greedy.training import train_supernet
from greedynas.jobs import estimates
from greedynas.jobs import machine_speed as pace_module
from greedynas.jobs.estimates import estimate, fit_hours, job_table, predict, scaled, shorter_search
from greedynas.jobs.machine_speed import Pace, known_pace, measure_pace, tree_macs
from greedynas.models.network import build_network
from greedynas.runtime.rng import stream, torch_stream
from greedynas.settings.schema import Config, RetrainSettings
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import make_recipe
from greedynas.stages.run import read_data
from tests.helpers.speed import PACE
from tests.helpers.training import SETTINGS, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def config_of(search=None, retrain=None, **train):
    return Config(
        name="tiny",
        space=tiny_space(),
        train=TrainSettings(**{**SETTINGS, **train}),
        search=SearchSettings(**(search or {})),
        retrain=RetrainSettings(**{"epochs": 20, "batch_size": 10, **(retrain or {})}),
    )


def printed(table):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(table)
    return console.export_text()


@pytest.fixture
def fixed_pace(monkeypatch):
    monkeypatch.setattr(estimates, "measure_pace", lambda *_: PACE)


# Estimates


def test_a_pace_is_measured_once_for_all_lengths(data, monkeypatch):
    asked = []
    monkeypatch.setattr(pace_module, "measure_pace", lambda config, *_: asked.append(config) or PACE)
    monkeypatch.setattr(pace_module, "_known", {})
    config = config_of()
    longer = scaled(config, 3, 3).model_copy(update={"reasons": ("more time",)})
    assert known_pace(config, data, CPU) == known_pace(shorter_search(longer, 0.1), data, CPU) == PACE
    assert len(asked) == 1
    known_pace(config_of(batch_size=20), data, CPU)
    known_pace(config, data, CPU, Budget(max_macs=10**9))
    assert len(asked) == 3


def test_hours_and_the_plan_share_their_measurement(data, fixed_pace):
    quick = Pace(**{**vars(PACE), "step": 1e-3})
    slow, _ = fit_hours(config_of(), data, CPU, 0.05)
    fast, _ = fit_hours(config_of(), data, CPU, 0.05, pace=quick)
    assert fast.train.max_epochs >= slow.train.max_epochs


def test_the_parts_add_up(data):
    """Check 42 images in batches of 10: 12 steps in 3 epochs, 4 of them warm-up, a filtering for every 2 of the others."""
    found = predict(config_of(search={"population": 10, "generations": 3}), data, PACE, "here")
    supernet, search, retraining, rest = found.stages
    assert supernet.seconds == pytest.approx(12 * (0.1 + 0.01) + 4 * 0.2)
    assert (supernet.optimization_images, supernet.evaluation_images) == (120, 4 * 4 * 6)
    assert supernet.corrected_images == pytest.approx(120 + 96 / 3.33)
    assert search.seconds == pytest.approx(30 * 0.05)
    assert search.evaluation_images == 30 * 12
    assert retraining.seconds == pytest.approx(20 * 5 * 0.1)  # 54 images, training and validation
    assert retraining.optimization_images == 20 * 50
    assert found.seconds == pytest.approx(sum(stage.seconds for stage in found.stages))
    assert rest.seconds == pytest.approx(estimates.EXPORT_SECONDS + 5 * 6 * 0.01)
    assert json.loads(json.dumps(found.to_json()))["stages"][0]["corrected_images"] == supernet.corrected_images


def test_a_search_never_evaluates_more_paths_than_the_space_has(data):
    everything = tiny_space().size
    found = predict(config_of(search={"population": 100, "generations": 100}), data, PACE, "here")
    assert found.stages[1].evaluation_images == everything * 12


def test_other_ways_to_train(data):
    uniform = predict(config_of(sampler="uniform"), data, PACE, "").stages[0]
    assert (uniform.seconds, uniform.evaluation_images) == (pytest.approx(12 * 0.11), 0)
    fair = predict(config_of(sampler="fair"), data, PACE, "").stages[0]
    assert fair.seconds == pytest.approx(12 * (3 * 0.1 + 0.01))
    assert fair.optimization_images == 3 * 120
    family = predict(config_of(), data, PACE, "", networks=3)
    assert family.stages[2].seconds == pytest.approx(3 * 10)
    top = predict(config_of(retrain={"top": 4}), data, PACE, "").stages[2]
    assert top.seconds == pytest.approx((20 * 5 + 4 * 2 * 4) * 0.1)
    beside = predict(config_of(retrain={"top": 4}), data, PACE, "", networks=2, rivals=2)
    assert beside.stages[2].seconds == pytest.approx(
        (4 * 20 * 5 + 2 * 4 * 2 * 4) * 0.1
    )  # rivals have no short trainings
    assert beside.stages[2].what.startswith("4 times 20 epochs")
    assert beside.stages[1] == predict(config_of(), data, PACE, "", networks=2).stages[1]
    assert "after 4 short trainings" in top.what


def test_the_printed_plan(data):
    config = config_of(search={"population": 10, "generations": 3})
    text = printed(job_table(config, predict(config, data, PACE, "2 CPU threads")))
    for part in (
        "Plan: tiny at 8 px, on 2 CPU threads",
        "3 epochs of 42 images",
        "30 paths on 12 images",
        "20 epochs of 54 images",
        "optimization images",
        "corrected (r = 3.33)",
        "in all",
        "estimated from a measurement of 2 s",
    ):
        assert part in text
    assert "may stop earlier" not in text  # stopping is switched off
    assert "may stop earlier" in printed(job_table(config_of(stopping=True), predict(config, data, PACE, "")))


def test_measuring_leaves_no_trace(data):
    config = config_of(retrain={"dropout": 0.5, "randaugment": "rand-m9", "erasing": 0.5})
    before, _ = next(data.train.train_batches(0, 10))
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    pace = measure_pace(config, data, CPU, Budget(max_macs=10**9, max_latency_ms=3))
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    after, _ = next(data.train.train_batches(0, 10))
    assert torch.equal(before, after)
    assert all(value > 0 for value in (pace.step, pace.waiting, pace.filtering, pace.evaluation, pace.retrain_step))


@pytest.mark.parametrize("bn", ["recalibrate", "running"])
def test_measuring_with_other_statistics(data, bn):
    config = config_of(bn=bn, search={"bn": bn, "population": 4})
    pace = measure_pace(config, data, CPU)
    assert pace.filtering > 0
    assert pace.evaluation > 0


def test_the_wait_for_streamed_images_is_measured(photos):
    config = config_of()
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"source": str(photos), "memory_gb": 0.0, "workers": 1})}
    )
    data = read_data(config, CPU)
    assert not data.train.in_memory
    pace = measure_pace(config, data, CPU)
    assert pace.waiting > 1e-4  # ten files to open


@pytest.mark.timed
@pytest.mark.filterwarnings("ignore")
def test_the_estimate_is_near_the_truth():
    """Check this with a tolerance for other processes; on an idle machine the estimate is within a fifth."""
    config = Config(
        name="fashion",
        space=load_space("fashion"),
        data={"source": "fashion", "val_images": 6800, "augment": "pad_crop", "check_duplicates": False},
        train=TrainSettings(
            m=10, k=5, filter_images=32, bn_images=32, pool_size=20, warmup=0.25, max_epochs=2, batch_size=64
        ),
        search=SearchSettings(population=8, generations=1),
        retrain=RetrainSettings(epochs=1, batch_size=64),
    )
    data = read_data(config, CPU)
    first = estimate(config, data, CPU)
    times = {}
    start = time.perf_counter()
    net = Supernet(config.space, generator=torch_stream(0, "init")).to(memory_format=torch.channels_last)
    state = train_supernet(net, data, config.train, eval_precision="fp32")
    times["supernet"] = time.perf_counter() - start
    start = time.perf_counter()
    images, labels = data.val.eval_batch()
    evaluate_paths(net, list(config.space.sample(8, stream(0, "test"))), images, labels, bn_images=500)
    times["search"] = time.perf_counter() - start
    start = time.perf_counter()
    network = build_network([2] * 7, config.space, generator=torch_stream(0, "init"))
    retrain(network.to(memory_format=torch.channels_last), data.train.seen(), make_recipe(config.retrain))
    times["retraining"] = (time.perf_counter() - start) * len(data.train_and_val()) / len(data.train)
    second = estimate(config, data, CPU)
    assert state.optimization_images == first.stages[0].optimization_images
    for one, other in zip(first.stages[:3], second.stages[:3], strict=True):
        about = (one.seconds * other.seconds) ** 0.5
        assert times[one.name] / 3 < about < times[one.name] * 3, (one.name, about, times[one.name])
    assert first.pace.measuring < 60


def test_shared_prefixes_are_counted_once():
    space = tiny_space(["ID", "MB2_K3"])
    paths = space.sample(40, stream(0, "test"))
    stem = sum(layer.cost(layer.ops[0]).macs for layer in space.stem_layers)
    prefixes = {tuple(path[: layer + 1]) for path in paths.tolist() for layer in range(len(path))}
    blocks = sum(space.layers[len(prefix) - 1].cost(space.layers[0].ops[prefix[-1]]).macs for prefix in prefixes)
    head = space.cost_tables["macs"].fixed - stem
    assert tree_macs(space, paths) == stem + blocks + 40 * head
    assert tree_macs(space, paths[:1]) == space.costs(paths[:1]).macs[0]
    assert tree_macs(space, paths) < space.costs(paths).macs.sum()


# Fitting into a time


@pytest.mark.usefixtures("fixed_pace")
@pytest.mark.parametrize("hours", [0.03, 0.1, 0.5, 3])
def test_the_job_fits(data, hours):
    config = config_of(max_epochs=100, pool_size=40, search={"population": 40}, retrain={"epochs": 200})
    fitted, reasons = fit_hours(config, data, CPU, hours)
    total = predict(fitted, data, PACE, "").seconds
    assert total <= 0.9 * 3600 * hours
    longest = fitted.train.max_epochs == 300 and fitted.retrain.epochs == 600
    assert longest or total > 0.75 * 3600 * hours
    assert fitted.search.population * fitted.search.generations >= 80  # all there are
    assert fitted.train.pool_size == max(2, round(40 * min(fitted.train.max_epochs / 100, 1)))
    assert any(reason.startswith(f"train.max_epochs {fitted.train.max_epochs} instead of 100") for reason in reasons)
    assert any("of the" in reason and "given" in reason for reason in reasons)
    assert ("no stage is trained for more than 3 times" in reasons[-1]) == longest
    assert Config.model_validate(fitted.model_dump()) == fitted


@pytest.mark.usefixtures("fixed_pace")
def test_settings_by_hand_are_kept(data):
    config = config_of(max_epochs=50, retrain={"epochs": 200})
    fitted, reasons = fit_hours(config, data, CPU, 0.05, keep={"train.max_epochs", "search.generations"})
    assert fitted.train == config.train
    assert fitted.search.generations == 20
    assert fitted.retrain.epochs < 200
    assert not any(reason.startswith("train.") for reason in reasons)


@pytest.mark.usefixtures("fixed_pace")
def test_too_little_time_is_refused_with_the_time_needed(data):
    config = config_of(max_epochs=100, retrain={"epochs": 200})
    with pytest.raises(GreedyNASError, match=r"0\.01 hours are too short .* at least --hours 0\.0\d+ for") as error:
        fit_hours(config, data, CPU, 0.01)
    assert "\n" not in str(error.value)
    assert "supernet 10 epochs of 42 images" in str(error.value)
    enough = float(re.search(r"--hours ([\d.]+)", str(error.value))[1])
    fitted, _ = fit_hours(config, data, CPU, enough)
    assert fitted.train.max_epochs in (10, 11)  # the shown time is rounded up
    with pytest.raises(GreedyNASError, match="too short"):
        fit_hours(config, data, CPU, 0.9 * enough)


@pytest.mark.parametrize("hours", [0, -1, float("nan"), float("inf")])
def test_hours_are_positive(data, hours):
    with pytest.raises(GreedyNASError, match="--hours must be a positive number"):
        fit_hours(config_of(), data, CPU, hours)


@pytest.mark.usefixtures("fixed_pace")
def test_the_shorter_part_is_spared(data):
    """Check that retraining is shortened first where it takes 12 times as long as the supernet."""
    config = config_of(max_epochs=20, retrain={"epochs": 1000})
    fitted, _ = fit_hours(config, data, CPU, 0.1)
    supernet, _, retraining, _ = predict(fitted, data, PACE, "").stages
    assert fitted.retrain.epochs < 700
    assert fitted.train.max_epochs == 20
    assert retraining.seconds > supernet.seconds


def test_lengths_that_are_counted_in_steps_follow_the_epochs():
    config = config_of(max_epochs=40, warmup=40, pool_size=30, retrain={"epochs": None, "recipe": "rmsprop"})
    half = scaled(config, 0.5, 0.5)
    assert (half.train.max_epochs, half.train.warmup, half.train.pool_size, half.retrain.epochs) == (20, 20, 15, 175)
    double = scaled(config, 2, 2)
    assert (double.train.max_epochs, double.train.warmup, double.train.pool_size) == (80, 80, 30)
    assert scaled(config_of(warmup=0.25), 0.5, 0.5).train.warmup == 0.25
    least = scaled(config, 1e-6, 1e-6)
    assert (least.train.max_epochs, least.retrain.epochs, least.train.pool_size) == (1, 1, 2)


@pytest.mark.parametrize(
    ("share", "generations", "population"), [(1.5, 20, 50), (1, 20, 50), (0.5, 10, 50), (0.2, 5, 40), (0, 5, 20)]
)
def test_a_shorter_search(share, generations, population):
    search = shorter_search(config_of(), share).search
    assert (search.generations, search.population) == (generations, population)
    small = config_of(search={"population": 6, "generations": 2})
    assert shorter_search(small, share).search == small.search
