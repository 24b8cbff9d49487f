"""Tests of training on small images on a GPU. `interpreted_small.py` tests the logic and the kernels without one."""

import pytest
import torch

from greedynas.gpu import engine, recording
from greedynas.greedy.graphs import training
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.steps import TrainingStep, supernet_optimizer, train_step
from greedynas.models.supernet import Supernet
from tests.helpers.graphs import Recorded
from tests.helpers.interpreted import run_interpreted


def test_recorded_training_in_the_interpreter():
    run_interpreted("tests/helpers/interpreted_small.py")


def test_nothing_is_recorded_on_the_cpu():
    assert not recording.worth_recording(torch.zeros(1, 3, 32, 32))


def test_larger_images_are_not_recorded(monkeypatch):
    class Images:
        device = torch.device("cuda")
        shape = (8, 3, 32, 32)

    monkeypatch.setattr(engine, "has_triton", lambda: True)
    assert recording.worth_recording(Images)
    with engine.using("off"):
        assert not recording.worth_recording(Images)
    Images.shape = (8, 3, 224, 224)
    assert not recording.worth_recording(Images)


def test_batches_of_another_size_take_the_plain_step_and_refresh_the_recording(monkeypatch):
    Recorded.made = []
    monkeypatch.setattr("greedynas.greedy.steps.GraphedTraining", Recorded)
    monkeypatch.setattr("greedynas.greedy.steps.worth_recording", lambda images: True)
    settings = TrainSettings()
    net = Supernet("macro").train()
    step = TrainingStep(net, supernet_optimizer(net, settings), settings, None, "fp32")
    images, labels = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)
    for n in (4, 4, 2, 4):
        step(images[:n], labels[:n], [(0,) * 8], 0.1)
    assert [(r.steps, r.refreshed) for r in Recorded.made] == [(3, 1)]


def test_clipped_gradients_take_the_plain_step(monkeypatch):
    Recorded.made = []
    monkeypatch.setattr("greedynas.greedy.steps.GraphedTraining", Recorded)
    monkeypatch.setattr("greedynas.greedy.steps.worth_recording", lambda images: True)
    settings = TrainSettings(clip_grad=1.0)
    net = Supernet("macro").train()
    step = TrainingStep(net, supernet_optimizer(net, settings), settings, None, "fp32")
    step(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64), [(0,) * 8], 0.1)
    assert Recorded.made == []


@pytest.mark.parametrize(("sampler", "recorded"), [("uniform", 0), ("fair", 1)])
def test_several_paths_of_an_update_are_recorded_if_they_share_no_op(monkeypatch, sampler, recorded):
    """Replay updates each op right after its path, but gradients of paths that share an op must be added up first."""
    Recorded.made = []
    monkeypatch.setattr("greedynas.greedy.steps.GraphedTraining", Recorded)
    monkeypatch.setattr("greedynas.greedy.steps.worth_recording", lambda images: True)
    settings = TrainSettings(sampler=sampler)
    net = Supernet("macro").train()
    step = TrainingStep(net, supernet_optimizer(net, settings), settings, None, "fp32")
    images, labels = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)
    step(images, labels, [(0,) * 8, (1,) * 8], 0.1)
    assert sum(one.steps for one in Recorded.made) == recorded
    step(images, labels, [(0,) * 8], 0.1)
    assert sum(one.steps for one in Recorded.made) == recorded + 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampler", ["greedy", "fair"])
def test_replayed_steps_equal_those_of_the_engine(sampler):
    settings = TrainSettings(sampler=sampler)
    paths = [[(2, 1, 0, 1, 2, 0, 1, 2)], [(0, 0, 1, 2, 2, 1, 0, 0)]]
    if sampler == "fair":
        paths = [[(0,) * 8, (1,) * 8, (2,) * 8]] * 2
    images = torch.randn(16, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(10, (16,), device="cuda")
    found = []
    for recorded in (True, False):
        net = Supernet("macro", generator=torch.Generator().manual_seed(0)).cuda().train()
        net.to(memory_format=torch.channels_last)
        optimizer = supernet_optimizer(net, settings)
        if recorded:
            step = training.GraphedTraining(net, optimizer, images, labels, settings, None, "bf16")
            found.append([step(images, labels, chosen, 0.05).item() for chosen in paths])
        else:
            found.append([train_step(net, optimizer, images, labels, chosen, 0.05, settings, None, "bf16").item() for chosen in paths])  # fmt: skip
    assert found[0] == pytest.approx(found[1], rel=1e-2)
