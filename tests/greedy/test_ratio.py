"""Tests of the measured cost of a training step in forward passes (`measured_ratio`)."""

import io
import json
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from greedynas.greedy import ratio
from greedynas.greedy.ratio import FEWEST, MOST, Measurement, Turn, judge, time_turns
from greedynas.greedy.settings import TrainSettings
from greedynas.reporting import tables
from greedynas.rundir.schemas import Epoch
from greedynas.stages.train import report_training, summary
from tests.helpers.training import SETTINGS, new_net, recorded, train

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Clock:
    """Replaces the machine's clocks: work advances both, and other programs advance only the wall clock."""

    def __init__(self, monkeypatch):
        self.wall = self.cpu = 0.0
        monkeypatch.setattr(ratio.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(ratio.time, "process_time", lambda: self.cpu)

    def work(self, seconds, waiting=0.0):
        self.wall += seconds + waiting
        self.cpu += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def turns(*ratios, cpu=None):
    return [Turn(value, 1.0, value if cpu is None else cpu, 1.0) for value in ratios]


def test_the_ratio_is_a_step_over_a_forward_pass(data, clock):
    """Here a forward pass takes one second and a backward pass three, so a step costs four passes, not a quarter."""

    def classified(module, _, logits):
        if isinstance(module, nn.Linear):
            clock.work(1.0)
            if logits.requires_grad:
                logits.register_hook(lambda _: clock.work(3.0))

    hook = nn.modules.module.register_module_forward_hook(classified)
    try:
        found = ratio.measure_ratio(new_net(), data, TrainSettings(**SETTINGS), "fp32", "fp32")
    finally:
        hook.remove()
    assert found == pytest.approx(4.0)


def test_steps_and_passes_take_turns(clock):
    calls = []

    def train():
        calls.append("train")
        clock.work(0.03)

    def evaluate():
        calls.append("evaluate")
        clock.work(0.01)

    found = time_turns(train, evaluate, CPU)
    assert len(found) == MOST
    assert calls == ["train", "evaluate"] * (MOST + 1)  # the first turn is not timed
    assert all(turn.ratio == pytest.approx(3) == pytest.approx(turn.cpu_ratio) for turn in found)
    slow = time_turns(lambda: clock.work(60), lambda: clock.work(20), CPU)
    assert len(slow) == FEWEST


def test_a_slow_first_step_is_ignored(clock):
    seconds = iter([100.0] + [3.0] * MOST)
    assert judge(time_turns(lambda: clock.work(next(seconds)), lambda: clock.work(1.0), CPU), CPU).ratio == 3


@pytest.mark.parametrize(
    ("found", "device", "why"),
    [
        (turns(2, 2.4, 3, 4, 5), CPU, r"the middle half of 5 measurements lies between 2.40 and 4.00"),
        (turns(2, 2.4, 3, 4, 5), GPU, r"the middle half of 5 measurements"),
        (turns(6, 6, 6, 6, 6, cpu=3), CPU, r"6.00 by the clock, 3.00 by CPU time"),
        (turns(0.56, 0.56, 0.56, 0.56, 0.56), CPU, r"0.56 is less than any training step can cost"),
        (turns(0.56, 0.56, 0.56, 0.56, 0.56), GPU, r"0.56 is less"),
    ],
)
def test_unreliable_measurements_give_no_ratio(found, device, why):
    result = judge(found, device)
    assert result.ratio is None
    assert "could not be measured" in result.message
    assert why in result.message


def test_consistent_measurements_give_their_median():
    assert judge(turns(3.0, 2.9, 3.1, 3.2, 40.0), CPU).ratio == 3.1  # a single interruption does not count
    assert judge(turns(3, 3, 3, 3, 3, cpu=3.5), CPU).ratio == 3
    assert judge(turns(3, 3, 3, 3, 3, cpu=9), GPU).ratio == 3  # CPU time means nothing on a GPU
    assert "costs 3.10 forward passes" in judge(turns(3.0, 2.9, 3.1, 3.2, 40.0), CPU).message


def test_a_busy_machine_gives_no_ratio(clock):
    """Every other forward pass waits for the CPU, so the ratio alternates between 0.5 and 3."""
    waits = iter([0, 5, 0] * MOST)
    found = time_turns(lambda: clock.work(3), lambda: clock.work(1, next(waits)), CPU)
    assert judge(found, CPU).ratio is None


def test_the_ratio_of_real_work_is_measured():
    def busy(seconds):
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

    found = judge(time_turns(lambda: busy(0.006), lambda: busy(0.002), CPU), CPU)
    assert found.ratio is None or 2 < found.ratio < 4.5  # None on a busy machine


# Use of the ratio in training, estimates and reports


@pytest.mark.parametrize("answers", [[None, None, None, 3.0], [None, 3.0], [2.5]])
def test_the_measurement_is_repeated_for_a_few_epochs(data, tmp_path, monkeypatch, answers):
    asked = []
    monkeypatch.setattr(ratio, "measure_ratio", lambda *_: asked.append(0) or answers[len(asked) - 1])
    _, state, rows = recorded(tmp_path, data, max_epochs=5)
    wanted = answers[:3] + answers[:3][-1:] * 5
    assert len(asked) == min(len(answers), 3)
    assert state.measured_ratio == wanted[4]
    for row, found in zip(rows["epoch"], wanted, strict=False):
        assert row["measured_ratio"] == found
        images = row["optimization_images"], row["evaluation_images"]
        corrected = None if found is None else images[0] + images[1] / found
        assert row["corrected_images_measured"] == (corrected if found is None else pytest.approx(corrected))
        assert row["corrected_images"] == pytest.approx(images[0] + images[1] / 3.33)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (3.126, "a training step costs 3.1 forward passes here."),
        (
            None,
            "the cost of a training step in forward passes could not be measured here, because the machine was busy",
        ),
        (0.56, "could not be measured"),  # of a run of an earlier version
    ],
)
def test_the_summary_shows_the_measured_ratio(data, monkeypatch, found, message):
    monkeypatch.setattr(ratio, "measure_ratio", lambda *_: found)
    _, state = train(data)
    console = Console(file=io.StringIO(), width=1000)
    report_training(summary(state), console)
    assert message in console.file.getvalue()
    assert "0.56" not in console.file.getvalue()
    assert json.loads(json.dumps(summary(state)))["measured_ratio"] == found


@pytest.mark.parametrize(
    ("found", "message"), [(2.5, "measured on this machine, 2.5, it is 140."), (None, ""), (0.56, "")]
)
def test_the_cost_table_uses_only_the_papers_ratio_without_a_measured_one(found, message):
    last = {"kind": "epoch", "step": 4, "epoch": 1, "optimization_images": 100, "evaluation_images": 100}
    last |= {"corrected_images": 130.03, "measured_ratio": found}
    last["corrected_images_measured"] = None if found is None else 100 + 100 / found
    facts = SimpleNamespace(
        training=SimpleNamespace(epochs=[Epoch.model_validate(last)]),
        models=(),
        chosen=None,
        config=SimpleNamespace(train=SimpleNamespace(sampler="greedy")),
    )
    note = tables.cost_table(facts).note
    assert message in note
    assert ("could not be measured" in note) == (not message)
    assert "0.56" not in note


def test_a_failed_measurement_says_why():
    assert judge(turns(3, 3, 3, 3, 3), CPU) == Measurement(
        3.0,
        "a training step costs 3.00 forward passes here; the middle half of 5 measurements lies between 3.00 and 3.00",
    )
