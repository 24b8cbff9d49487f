"""What all methods with architecture parameters have in common: resumption, ranks, memory, plugins, refusals."""

import json

import numpy as np
import pytest
import torch

from greedynas import GreedyNASError, load_space
from greedynas.greedy.methods.darts import Darts
from greedynas.greedy.methods.method import Method
from greedynas.greedy.samplers.sampler import make_sampler
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.settings import SAMPLERS, TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.models.shared_supernet import SharedSupernet
from greedynas.rundir.callbacks import Callback
from greedynas.runtime.rng import torch_stream
from tests.helpers.method_references import space_of
from tests.helpers.ranks import JOBS, launch, left
from tests.helpers.training import SETTINGS, new_net, new_run, rows_of, same_tensors, train, without_wall_clock

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS = ("darts", "fbnet", "proxyless", "proxyless-reinforce", "mdenas", "single-path")
SPACE = space_of()


def net_for(method):
    if method != "single-path":
        return new_net(SPACE)
    return SharedSupernet(SPACE, generator=torch_stream(0, "init"))


class Interruption(Callback):
    def __init__(self, step):
        self.step = step

    def log(self, kind, step, epoch, values):
        if kind == "step" and step == self.step:
            raise KeyboardInterrupt


def trained(method, data, folder, callbacks=(), **settings):
    chosen = {"sampler": method, "warmup": 2, "checkpoint_steps": 1, "max_epochs": 2, **settings}
    if method != "mdenas":
        chosen["target"] = {"max_macs": 30_000}
    with new_run(folder, SPACE, **chosen) as run:
        return train(data, SPACE, run=run, net=net_for(method), callbacks=callbacks, **chosen)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(method, data, tmp_path):
    whole, state = trained(method, data, tmp_path / "whole")
    for at in (1, 6):  # in warm-up, and in the middle of an epoch
        with pytest.raises(KeyboardInterrupt):
            trained(method, data, tmp_path / "cut", [Interruption(at)])
    resumed, same = trained(method, data, tmp_path / "cut")
    assert same_tensors(whole.state_dict(), resumed.state_dict())
    assert state.memory == same.memory
    assert state.memory["alpha"] != [[0.0] * len(layer) for layer in state.memory["alpha"]]
    assert (state.optimization_images, state.evaluation_images) == (same.optimization_images, same.evaluation_images)
    for kind, rows in rows_of(tmp_path / "whole").items():
        assert without_wall_clock(rows) == without_wall_clock(rows_of(tmp_path / "cut")[kind])


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_learned_in_warmup_and_probabilities_are_ones_afterwards(method, data):
    _, state = train(data, SPACE, net=net_for(method), sampler=method, warmup=1.0)
    first = json.dumps(state.memory["alpha"])
    assert set(first) <= set("[], 0.") or method == "mdenas"
    _, state = train(data, SPACE, net=net_for(method), sampler=method, warmup=2)
    assert json.dumps(state.memory["alpha"]) != first
    for layer in state.memory["probabilities"]:
        assert sum(layer) == pytest.approx(1)
        assert min(layer) >= 0
    settings = TrainSettings(**{**SETTINGS, "sampler": method, "warmup": 2})
    predicted = Schedule(settings, len(data.train)).predicted_images(space=SPACE)
    assert predicted[0] == state.optimization_images
    assert state.evaluation_images <= predicted[1]


def double_ranks(folder, ranks, photos):
    jobs = [
        ("train", {"name": name, "photos": photos, "sync_bn": True, "max_epochs": 2, "sampler": name, "method": True})
        for name in METHODS
    ]
    if ranks == 1:
        for job, arguments in jobs:
            JOBS[job](folder, **arguments)
    else:
        launch(ranks, folder, *jobs)


def test_two_ranks_learn_like_one(photos, tmp_path):
    for ranks in (1, 2):
        double_ranks(tmp_path, ranks, str(photos))
    for name in METHODS:
        (one,), two = left(tmp_path, name), left(tmp_path, name, 2)
        for rank in two:
            for ours, theirs in zip(one["memory"]["alpha"], rank["memory"]["alpha"], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
            for key, tensor in one["weights"].items():
                torch.testing.assert_close(rank["weights"][key], tensor, rtol=0, atol=1e-9)
            assert rank["images"] == one["images"]
        assert two[0]["memory"] == two[1]["memory"]  # to the bit


# Plugins and wrong input


def test_a_plugin_can_register_a_method(data, registered):
    class Cheapest(Method):
        """Learns to prefer cheap ops by a step on the cost alone."""

        def learn(self, draw, learning):
            shares = [layer.softmax(0) for layer in self.alpha]
            self.descend(torch.autograd.grad(self.target.excess(shares), self.alpha))

        def choose(self, draw, learning):
            return [[self.sampled(draw.rng)]]

    registered(SAMPLERS, "cheap", Cheapest)
    settings = {"sampler": "cheap", "target": {"max_macs": 27_000}, "warmup": 0, "arch_lr": 0.3}
    _, state = train(data, SPACE, **settings)
    assert [int(np.argmax(layer)) for layer in state.memory["probabilities"]] == [0, 0, 0, 0]


def test_a_function_may_use_the_memory(data, registered):
    def counting(draw):
        draw.learning.memory["seen"] = draw.learning.memory.get("seen", 0) + 1
        return draw.uniform()

    registered(SAMPLERS, "counting", counting)
    _, state = train(data, sampler="counting")
    assert state.memory == {"seen": 12}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target": {"min_macs": 5}}, "train.target takes upper limits"),
        ({"target": {}}, "train.target takes upper limits"),
        ({"target": {"max_latency_ms": 5}}, "needs train.latency_table, written by greedynas latency"),
        ({"sampler": "dart"}, "unknown sampler 'dart'"),
        ({"arch_lr": 0}, "arch_lr"),
    ],
)
def test_wrong_settings_are_refused(settings, told):
    with pytest.raises((GreedyNASError, ValueError), match=told):
        TrainSettings(**settings)


def test_a_target_that_no_path_reaches_is_refused(data):
    with pytest.raises(GreedyNASError, match="no path has macs of at most 10: the cheapest has"):
        train(data, SPACE, sampler="darts", target={"max_macs": 10})


def test_a_target_of_a_method_without_costs_is_refused(data):
    with pytest.raises(GreedyNASError, match=r"mdenas learns from accuracies alone: leave train.target out"):
        train(data, SPACE, sampler="mdenas", target={"max_macs": 30_000})


def test_limits_are_the_target_without_another(data):
    _, limited = train(data, SPACE, sampler="darts", limits={"max_macs": 30_000}, warmup=0)
    _, aimed = train(data, SPACE, sampler="darts", target={"max_macs": 30_000}, warmup=0)
    _, free = train(data, SPACE, sampler="darts", warmup=0)
    assert limited.memory == aimed.memory != free.memory


def test_architecture_parameters_that_are_no_numbers_are_refused(data, registered):
    class Broken(Darts):
        def learn(self, draw, learning):
            self.descend([torch.full_like(layer, torch.inf if draw.step > 4 else 0.1) for layer in self.alpha])

    registered(SAMPLERS, "broken", Broken)
    with pytest.raises(GreedyNASError, match="architecture parameters of broken are no longer finite at step 5"):
        train(data, SPACE, sampler="broken", warmup=0)


@pytest.mark.parametrize(
    "memory",
    [
        {"probabilities": [[0.5, 0.5, 0.0]]},
        {"probabilities": [[0.5, 0.5, float("nan")]] * 4},
        {"probabilities": [[0.0, 0.0, 0.0]] * 4},
        {"probabilities": "none"},
    ],
)
def test_a_checkpoint_with_other_probabilities_is_refused(memory, data):
    _, state = train(data, SPACE, max_epochs=1)
    with pytest.raises(ValueError, match=r"layers|probabilities|convert"):
        TrainState.from_json({**state.to_json(), "memory": memory}, SPACE)


def test_experiments_with_more_blocks_than_ops_are_refused(data):
    from greedynas.experimental.split_after_identity import SplitSupernet

    with pytest.raises(GreedyNASError, match=r"not with image sizes .* nor with experimental.split_after_identity"):
        train(data, SPACE, net=SplitSupernet(SPACE), sampler="darts")


def test_all_methods_are_known():
    assert set(METHODS) <= set(SAMPLERS.names())
    for name in METHODS:
        assert isinstance(make_sampler(name), Method)
    make_sampler("single-path").check(load_space("mobilenet"))
    make_sampler("single-path").check(load_space("fashion"))
