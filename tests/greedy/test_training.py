import itertools
import json
import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from greedynas import CandidatePool, GreedyNASError, compact
from greedynas.greedy import ratio
from greedynas.greedy.filtering import filter_paths
from greedynas.greedy.samplers import greedy
from greedynas.greedy.samplers.fair import fair_paths
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.steps import TrainingStep, supernet_optimizer, train_step
from greedynas.greedy.training import train_supernet
from greedynas.greedy.validation import FilterLosses
from greedynas.jobs.resolving import load_config
from greedynas.models.batchnorm import BN_MODES
from greedynas.rundir.checkpoints import load_weights
from greedynas.runtime.rng import stream, torch_stream
from greedynas.stages.run import supernet_of
from tests.helpers.evaluation import one_at_a_time
from tests.helpers.pictures import paint
from tests.helpers.pool import Reference
from tests.helpers.supernet import with_lively_statistics
from tests.helpers.training import (
    SETTINGS,
    new_net,
    new_run,
    opened,
    recorded,
    rows_of,
    same_tensors,
    snapshot,
    tiny_space,
    train,
    without_wall_clock,
)

pytestmark = pytest.mark.usefixtures("one_thread")


ONE_PATH = tiny_space(["MB2_K3"])


class Watch:
    """Observes a training from outside. Copies of the net's modules do not count (the ratio is measured on one)."""

    def __init__(self, net, monkeypatch=None):
        self.paths, self.batches = [], []  # for every forward pass in training
        self.filter_images = []  # input of the stem in every filtering
        self.evaluated = 0  # logits of filterings
        self.blocks = []  # (layer, op) run in training
        self.filterings = []  # (pool, epsilon, outcome, steps done before)
        self.pools = []  # at every forward pass in training
        net.register_forward_pre_hook(lambda _, arguments: self._step(*arguments))
        net.stem.register_forward_pre_hook(lambda module, arguments: self._stem(net, module, *arguments))
        net.classifier.register_forward_pre_hook(lambda module, arguments: self._logits(net, module))
        for i, layer in enumerate(net.layers):
            for j, block in enumerate(layer):
                block.register_forward_pre_hook(lambda module, _, at=(i, j): self._block(net, module, at))
        if monkeypatch is not None:
            monkeypatch.setattr(greedy, "filter_paths", self._filter_paths(filter_paths))

    def _step(self, images, path):
        self.paths.append(tuple(path))
        self.batches.append(images.clone())
        self.pools.append(dict(self.filterings[-1][0].best()) if self.filterings else {})

    def _stem(self, net, module, images):
        if module is net.stem and not net.training:
            self.filter_images.append(images.clone())

    def _logits(self, net, module):
        self.evaluated += module is net.classifier and not net.training

    def _block(self, net, module, at):
        if module is net.layers[at[0]][at[1]] and net.training:
            self.blocks.append(at)

    def _filter_paths(self, function):
        def watched(space, evaluate, m, k, rng, pool, epsilon, explore):
            outcome = function(space, evaluate, m, k, rng, pool, epsilon, explore)
            assert (len(outcome.kept), len(outcome.kept) + len(outcome.rejected)) == (k, m)
            self.filterings.append((pool, epsilon, outcome, len(self.paths)))
            return outcome

        return watched


def filtered(net, data, settings, seed=0, draws=0, precision="fp32"):
    """Run Algorithm 1 on validation images as training does, and return the outcome."""
    state = TrainState(CandidatePool(6), draws=draws)
    losses = FilterLosses(net, data, settings, seed, state, precision)
    return filter_paths(net.space, losses, settings.m, settings.k, stream(seed, "paths", draws))


# Filtering does not affect training


@pytest.mark.parametrize("bn", BN_MODES.names())
def test_filtering_changes_no_weights_and_no_random_state(data, bn):
    net = with_lively_statistics(new_net()).train()
    settings = TrainSettings(**{**SETTINGS, "bn": bn})
    optimizer = supernet_optimizer(net, settings)
    images, labels = next(data.train.train_batches(0, 10))
    for path in fair_paths(net.space, np.random.default_rng(0)):  # momentum everywhere
        train_step(net, optimizer, images, labels, [path], 0.05, settings, None, "fp32")
    before, momentum = snapshot(net), deepcopy(optimizer.state_dict()["state"])
    gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    modes = [module.training for module in net.modules()]
    generator, global_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    filtered(net, data, settings)
    assert same_tensors(snapshot(net), before)
    assert [module.training for module in net.modules()] == modes
    for old, parameter in zip(gradients, net.parameters(), strict=True):
        assert (old is None) == (parameter.grad is None)
        assert old is None or torch.equal(old, parameter.grad)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i]["momentum_buffer"], state["momentum_buffer"]) for i, state in momentum.items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert (np.random.get_state()[1] == global_state).all()  # noqa: NPY002


@pytest.mark.parametrize("bn", BN_MODES.names())
def test_with_a_single_path_greedy_and_uniform_training_end_with_the_same_weights(data, bn):
    greedy, state = train(data, ONE_PATH, bn=bn, warmup=1, pool_size=2)
    uniform, _ = train(data, ONE_PATH, sampler="uniform")
    each = 6 + (16 if bn == "recalibrate" else 0)  # calibration images are evaluated too
    assert state.evaluation_images == 6 * each  # 11 steps after warm-up need six filterings of one distinct path
    assert same_tensors(greedy.state_dict(), uniform.state_dict())


def test_data_and_augmentation_do_not_depend_on_the_sampler(data):
    seen = {}
    for sampler in ("greedy", "uniform", "fair"):
        net = new_net()
        watch = Watch(net)
        train(data, net=net, sampler=sampler)
        seen[sampler] = watch.batches[:: 3 if sampler == "fair" else 1]
    assert len(seen["uniform"]) == 12
    for other in ("greedy", "fair"):
        for ours, theirs in zip(seen["uniform"], seen[other], strict=True):
            assert torch.equal(ours, theirs)
    assert len({batch.numpy().tobytes() for batch in seen["uniform"]}) == 12


# Algorithm 1 on validation images


@pytest.mark.parametrize("bn", BN_MODES.names())
def test_all_paths_of_a_filtering_are_ranked_on_the_same_images(data, bn):
    net = with_lively_statistics(new_net()).train()
    watch = Watch(net)
    settings = TrainSettings(**{**SETTINGS, "bn": bn, "m": 8})
    outcome = filtered(net, data, settings, seed=5, draws=3)
    (images, *calibration) = watch.filter_images if bn != "recalibrate" else watch.filter_images[::-1]
    assert len(images) == 6
    labels = labels_of(images, data.val)
    ranked = outcome.kept + outcome.rejected
    assert outcome.evaluated >= 4
    for path, loss in ranked:
        expected, _ = one_at_a_time(net, path, images, labels, bn, 1, *(calibration or [None]))
        assert loss == pytest.approx(expected, rel=1e-4)
    losses = [loss for _, loss in ranked]
    assert losses == sorted(losses)
    if bn == "recalibrate":
        assert len(calibration[0]) == 16
        labels_of(calibration[0], data.train)  # only training images


def labels_of(images, image_set):
    """Return the labels of some images, found by comparing each with all images of the set."""
    pictures, labels = image_set.eval_batch()
    places = [torch.where((pictures == image).all((1, 2, 3)))[0].tolist() for image in images]
    assert all(len(place) == 1 for place in places)
    assert len({place[0] for place in places}) == len(images)
    return labels[[place[0] for place in places]]


def test_every_filtering_has_new_class_balanced_images(data):
    net = new_net()
    watch = Watch(net)
    train(data, net=net, warmup=0, max_epochs=5)
    assert len(watch.filter_images) == 10  # one run of the stem each: 20 steps, k = 2
    for images in watch.filter_images:
        assert torch.bincount(labels_of(images, data.val)).tolist() == [2, 2, 2]
    drawn = {frozenset(image.numpy().tobytes() for image in images) for images in watch.filter_images}
    assert len(drawn) == 10


def test_a_path_without_a_finite_loss_ranks_last(data, tmp_path):
    net = new_net(tiny_space(["ID", "MB2_K3"], repeat=1))
    broken = net.layers[0][1]
    for parameter in broken.parameters():
        parameter.data.fill_(math.nan)
    settings = TrainSettings(**{**SETTINGS, "m": 10, "k": 10, "pool_size": 10})
    outcome = filtered(net, data, settings)
    lost = [path for path, loss in outcome.kept if loss == math.inf]
    assert lost
    assert all(path[0] == 1 for path in lost)
    assert all(path[0] == 0 for path, _ in outcome.kept[: -len(lost)])


# Algorithm 2


def test_algorithm_2(data, monkeypatch):
    net = new_net()
    watch = Watch(net, monkeypatch)
    settings = {"m": 5, "k": 3, "warmup": 5, "max_epochs": 5, "pool_size": 1000}
    _, state = train(data, net=net, **settings)
    assert len(watch.paths) == state.step == 20
    # No filtering and an empty pool until warm-up ends; then one for every k steps.
    assert [steps for *_, steps in watch.filterings] == [5, 8, 11, 14, 17]
    assert watch.pools[:5] == [{}] * 5
    newest = {}
    for pool, epsilon, outcome, steps in watch.filterings:
        # Each kept path is trained on one batch, in order of rank.
        assert watch.paths[steps : steps + 3] == [path for path, _ in outcome.kept]
        # The pool has all of them, with the losses of this filtering, before the first of them is trained.
        newest |= dict(outcome.kept)
        assert watch.pools[steps : steps + 3] == [newest] * 3
        assert pool is state.pool
        assert epsilon == pytest.approx(0.8 * (steps - 5) / 14)
    assert dict(state.pool.best()) == newest
    assert len(set(watch.paths[:5])) > 1


def test_the_pool_is_updated_after_every_filtering(data, monkeypatch):
    net = new_net()
    watch = Watch(net, monkeypatch)
    _, state = train(data, net=net, warmup=2, max_epochs=8, pool_size=4, epsilon=0.3)
    reference = Reference(4)
    for _, _, outcome, _ in watch.filterings:
        for path, loss in outcome.kept:
            reference.update(path, loss)
    assert len(watch.filterings) == 15
    assert dict(state.pool.best()) == dict(reference.entries)


def test_without_a_seed_training_has_seed_0(data):
    first, _ = train(data, max_epochs=1)
    second = new_net()
    train_supernet(second, data, TrainSettings(**{**SETTINGS, "max_epochs": 1}), seed=0)
    assert same_tensors(first.state_dict(), second.state_dict())


def test_the_paths_of_greedy_training_depend_on_the_seed(data):
    def trained(seed):
        net = new_net()
        watch = Watch(net)
        train_supernet(net, data, TrainSettings(**SETTINGS), seed=seed)
        return watch.paths, snapshot(net)

    (paths, weights), (again, same_weights), (others, _) = trained(3), trained(3), trained(4)
    assert paths == again
    assert paths[:4] != others[:4]  # during warm-up
    assert sorted(paths[4:]) != sorted(others[4:])
    assert same_tensors(weights, same_weights)


# Strict fairness


def test_one_fair_update_trains_every_op_once(data):
    net = new_net()
    watch = Watch(net)
    _, state = train(data, net=net, sampler="fair", batch_size=42, max_epochs=1)
    assert state.step == 1
    assert sorted(watch.blocks) == list(itertools.product(range(4), range(3)))
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in net.parameters())
    assert state.optimization_images == 3 * 42
    assert state.evaluation_images == 0
    assert len(state.pool) == 0


def test_fair_gradients_add_up(data):
    net = new_net().double()
    images, labels = next(data.train.train_batches(0, 42))
    images = images.double()
    paths = fair_paths(net.space, np.random.default_rng(0))
    total = {name: torch.zeros_like(parameter) for name, parameter in net.named_parameters()}
    losses = []
    for path in paths:
        single = deepcopy(net)
        loss = F.cross_entropy(single(images, path), labels)
        loss.backward()
        losses.append(loss.item())
        for name, parameter in single.named_parameters():
            total[name] += 0 if parameter.grad is None else parameter.grad
    settings = TrainSettings(**SETTINGS)
    loss = train_step(net, supernet_optimizer(net, settings), images, labels, paths, 0.05, settings, None, "fp32")
    assert loss.item() == pytest.approx(np.mean(losses))
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, total[name], rtol=1e-9, atol=1e-12)


# Ablation switches


def test_without_filtering_all_sampled_paths_are_trained(data, monkeypatch):
    net = new_net()
    watch = Watch(net, monkeypatch)
    _, state = train(data, net=net, filtering=False)
    assert [len(outcome.kept) for _, _, outcome, _ in watch.filterings] == [2] * 4
    assert not any(outcome.rejected for _, _, outcome, _ in watch.filterings)
    assert watch.filterings[-1][1] > 0  # the pool is still sampled from
    assert len(state.pool) > 0


def test_without_pool_sampling_epsilon_is_0(data, tmp_path):
    _, _, rows = recorded(tmp_path, data, pool_sampling=False)
    assert len(rows["filter"]) == 4
    assert all(row["epsilon"] == 0 for row in rows["filter"] + rows["step"])
    assert all(len(row["rejected"]) == 2 for row in rows["filter"])


def test_with_every_switch_off_greedy_training_is_uniform(data):
    off, state = train(data, filtering=False, pool_sampling=False, stopping=False)
    uniform, _ = train(data, sampler="uniform")
    assert same_tensors(off.state_dict(), uniform.state_dict())
    assert state.evaluation_images == len(state.pool) == 0


def test_training_stops_at_the_end_of_the_epoch_where_the_pool_is_steady(data, tmp_path, monkeypatch):
    history = {"warmup": 6, "max_epochs": 8, "pool_size": 7}
    net = new_net()
    watch = Watch(net, monkeypatch)
    _, _, whole = recorded(tmp_path / "whole", data, net=net, **history)
    assert [row["stopped"] for row in whole["epoch"]] == [None] * 7 + ["max_epochs reached"]

    # π by hand: the pool at the end of every epoch of four steps.
    reference, ends = Reference(7), [set()]
    for end in range(4, 36, 4):
        for _, _, outcome, steps in watch.filterings:
            if end - 4 <= steps < end:
                for path, loss in outcome.kept:
                    reference.update(path, loss)
        ends.append({path for path, _ in reference.entries})
    novelties = [1 - len(ends[i] & ends[i - 1]) / 7 if len(ends[i]) == 7 else None for i in range(1, 9)]
    assert [row["pi"] for row in whole["epoch"]] == novelties
    assert [row["pool_size"] for row in whole["epoch"]] == [len(end) for end in ends[1:]]

    full = next(i for i, pi in enumerate(novelties) if pi is not None)
    assert full >= 2  # there were epochs in which the pool was empty or not full
    later = next(pi for pi in novelties[full + 1 :] if pi < novelties[full])
    for alpha in (1.0, later):
        _, state, rows = recorded(tmp_path / str(alpha), data, stopping=True, alpha=alpha, **history)
        epoch = next(i for i, pi in enumerate(novelties) if pi is not None and pi <= alpha)
        assert (state.epoch, state.step) == (epoch + 1, 4 * (epoch + 1))
        assert "the pool is steady" in state.stopped
        assert [row["stopped"] for row in rows["epoch"]] == [None] * epoch + [state.stopped]
        # Stopping changes nothing before that: the schedules depend on max_epochs.
        for kind in ("step", "filter"):
            assert without_wall_clock(rows[kind]) == without_wall_clock(whole[kind])[: len(rows[kind])]
    assert epoch > full


# Optimization


def test_residual_blocks_start_as_identities_with_zero_residuals():
    device, space = torch.device("cpu"), load_config("cifar10").space
    thin, rich = (1, 0, 2, 0, 0, 1, 0, 0), (1, 2, 2, 1, 2, 1, 1, 2)  # layers 1, 3 and 6 change the shape
    images = torch.randn(4, 3, space.image_size, space.image_size, generator=torch_stream(0, "images"))
    usual, zero = (supernet_of(load_config("cifar10", {"zero_residuals": on}), 10, device) for on in (False, True))
    assert not torch.equal(usual(images, thin), usual(images, rich))
    assert torch.equal(zero(images, thin), zero(images, rich))
    assert torch.equal(zero(images, thin), usual(images, thin))  # all other weights are the usual ones
    step = TrainingStep(zero, supernet_optimizer(zero, TrainSettings()), TrainSettings(), None, "fp32")
    step(images, torch.arange(4), [rich], 0.1)
    assert not torch.equal(zero(images, thin), zero(images, rich))


def test_weight_decay_is_on_everything_with_decay_all():
    net = new_net()
    groups = supernet_optimizer(net, TrainSettings(weight_decay=0.3, decay_all=True)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3]
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in net.parameters()}


def test_weight_decay_is_not_on_batch_norm_and_biases():
    net = new_net()
    groups = supernet_optimizer(net, TrainSettings(weight_decay=0.3)).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert len(decay) == len(list(net.parameters()))
    spared = 0
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            none = isinstance(module, nn.BatchNorm2d) or name == "bias"
            assert decay[id(parameter)] == (0 if none else 0.3)
            spared += none and not isinstance(module, nn.BatchNorm2d)
    assert spared == 1 + 4 * 2  # the classifier's bias, and those of four squeeze-and-excites


def test_two_updates_equal_a_computation_by_hand(data):
    """An update is SGD with Nesterov momentum, weight decay and cosine decay of the learning rate, and nothing else."""
    settings = {"sampler": "uniform", "batch_size": 21, "max_epochs": 1, "lr": 0.2, "weight_decay": 0.1}
    by_hand = new_net(ONE_PATH).double()
    velocity = [torch.zeros_like(parameter) for parameter in by_hand.parameters()]
    for (images, labels), lr in zip(data.train.train_batches(0, 21), (0.2, 0.1), strict=True):
        by_hand.zero_grad()
        F.cross_entropy(by_hand(images.double(), (0, 0, 0, 0)), labels).backward()
        for i, parameter in enumerate(by_hand.parameters()):
            gradient = parameter.grad + (0.1 if parameter.ndim > 1 else 0) * parameter.data
            velocity[i] = 0.9 * velocity[i] + gradient
            parameter.data -= lr * (gradient + 0.9 * velocity[i])
    net, _ = train(data, ONE_PATH, **settings)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor.double(), by_hand.state_dict()[name].double(), rtol=1e-3, atol=1e-4)


def test_an_update_leaves_the_ops_of_other_paths_as_they_are(data):
    """Momentum and weight decay would still move an op whose gradient is zero instead of absent."""
    images, labels = next(data.train.train_batches(0, 42))
    net, settings = new_net(), TrainSettings(**{**SETTINGS, "weight_decay": 0.1})
    optimizer = supernet_optimizer(net, settings)
    train_step(net, optimizer, images, labels, [(2, 2, 2, 2)], 0.05, settings, None, "fp32")
    before = snapshot(net)
    train_step(net, optimizer, images, labels, [(1, 1, 1, 1)], 0.05, settings, None, "fp32")
    moved = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
    ops = {name.split(".")[2] for name in moved if name.startswith("layers.")}
    assert ops == {"1"}


def test_training_without_momentum_is_plain_sgd():
    (group, *_) = supernet_optimizer(new_net(), TrainSettings(momentum=0)).param_groups
    assert (group["momentum"], group["nesterov"]) == (0, False)


def test_gradients_are_clipped(data):
    images, labels = next(data.train.train_batches(0, 42))
    gradients = {}
    for clip in (None, 0.01, 1000.0):
        net, settings = new_net(), TrainSettings(**{**SETTINGS, "clip_grad": clip})
        train_step(net, supernet_optimizer(net, settings), images, labels, [(1, 2, 1, 2)], 0.05, settings, None, "fp32")
        gradients[clip] = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    assert gradients[None].norm() > 0.02
    assert torch.equal(gradients[1000.0], gradients[None])
    expected = gradients[None] * 0.01 / gradients[None].norm()
    torch.testing.assert_close(gradients[0.01], expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", ["none", "balanced"])
def test_label_smoothing_and_class_weights_enter_the_loss(tmp_path, weights, smoothing):
    paint(tmp_path / "photos", {"a": 30, "b": 10, "c": 20})
    uneven = opened(tmp_path / "photos", class_weights=weights)
    net = new_net()
    watch = Watch(net)
    _, _, rows = recorded(tmp_path / "run", uneven, net=net, sampler="uniform", label_smoothing=smoothing, max_epochs=1)
    images, labels = next(uneven.train.train_batches(0, 10))
    log_p = new_net()(images, watch.paths[0]).log_softmax(1).detach().double()
    counts = torch.bincount(uneven.train.labels).double()
    assert counts.tolist() == [21, 7, 14]
    w = counts.sum() / (3 * counts) if weights == "balanced" else torch.ones(3).double()
    target = F.one_hot(labels, 3) * (1 - smoothing) + smoothing / 3
    expected = -(target * log_p * w[labels, None]).sum() / len(labels)
    assert rows["step"][0]["loss"] == pytest.approx(expected.item(), rel=1e-4)
    plain = -log_p.gather(1, labels[:, None]).mean().item()
    if (weights, smoothing) != ("none", 0.0):  # the classifier starts near 0, so all losses are near log 3
        assert abs(expected.item() - plain) > 1e-4


def test_running_statistics_are_updated(data):
    net = new_net().eval()  # training switches the mode
    watch = Watch(net)
    train(data, net=net, bn="batch")
    tracked = net.stem[0].norm.num_batches_tracked
    assert tracked == 12 == len(watch.paths)
    for i, layer in enumerate(net.layers):
        for j, block in enumerate(layer):
            times = sum(path[i] == j for path in watch.paths)
            for norm in (module for module in block.modules() if isinstance(module, nn.BatchNorm2d)):
                assert norm.num_batches_tracked == times
                assert (times > 0) == bool(norm.running_mean.abs().sum() > 0)
                assert (times > 0) == bool((norm.running_var != 1).any())


# Counts and metrics


def test_counted_images_equal_a_count_by_hand(data, tmp_path, monkeypatch):
    space = tiny_space(["ID", "MB2_K3"], repeat=1)  # four paths, so that some of six drawn ones are the same
    net = new_net(space)
    watch = Watch(net, monkeypatch)
    monkeypatch.setattr(ratio, "measure_ratio", lambda *_: 4.0)
    _, state, rows = recorded(tmp_path, data, space, net=net, m=6, k=3, warmup=3, pool_size=4)
    assert len(watch.filterings) == 3
    distinct = [len({path for path, _ in outcome.kept + outcome.rejected}) for _, _, outcome, _ in watch.filterings]
    assert all(count <= 4 for count in distinct)
    assert watch.evaluated == sum(distinct)  # duplicates are evaluated once
    for step, row in enumerate(rows["step"], 1):
        evaluation = 6 * sum(distinct[: -(-max(step - 3, 0) // 3)])
        counted(row, step, 10 * step, evaluation)
    for epoch, row in enumerate(rows["epoch"], 1):
        step = 4 * epoch
        evaluation = 6 * sum(distinct[: -(-(step - 3) // 3)])
        counted(row, step, 10 * step, evaluation)
        assert row["measured_ratio"] == state.measured_ratio == 4.0
        assert row["corrected_images_measured"] == pytest.approx(10 * step + evaluation / 4)
    assert (state.optimization_images, state.evaluation_images) == (120, 6 * sum(distinct))
    assert state.corrected_images == pytest.approx(120 + 6 * sum(distinct) / 3.33)


def counted(row, step, optimization, evaluation):
    assert (row["step"], row["optimization_images"], row["evaluation_images"]) == (step, optimization, evaluation)
    assert row["corrected_images"] == pytest.approx(optimization + evaluation / 3.33)


def test_metrics_describe_the_training(data, tmp_path, monkeypatch):
    net = new_net()
    watch = Watch(net, monkeypatch)
    _, state, rows = recorded(tmp_path, data, net=net, max_epochs=6)
    assert [row["step"] for row in rows["step"]] == list(range(1, 25))
    assert [row["epoch"] for row in rows["step"]] == sorted([*range(6)] * 4)
    assert [row["step"] for row in rows["filter"]] == list(range(4, 24, 2))
    assert [row["epoch"] for row in rows["epoch"]] == [1, 2, 3, 4, 5, 6]
    seconds = [row["seconds"] for row in rows["step"]]
    assert seconds == sorted(seconds)
    pi = None
    for row in rows["step"]:
        assert row["loss"] > 0
        assert row["images_per_second"] > 0
        assert row["lr"] == pytest.approx(0.05 * (1 + math.cos(math.pi * (row["step"] - 1) / 24)) / 2)
        assert row["epsilon"] == pytest.approx(0.8 * max(row["step"] - 1 - 4, 0) / 19)
        ended = [epoch for epoch in rows["epoch"] if epoch["step"] < row["step"]]
        assert row["pi"] == (ended[-1]["pi"] if ended else None)
        pi = row["pi"] if pi is None else pi
    assert pi is not None
    reference = Reference(6)
    for row, (_, epsilon, outcome, _) in zip(rows["filter"], watch.filterings, strict=True):
        assert row["epsilon"] == epsilon
        assert row["kept"] == [loss for _, loss in outcome.kept]
        assert row["rejected"] == [loss for _, loss in outcome.rejected]
        for path, loss in outcome.kept:
            reference.update(path, loss)
        losses = sorted(loss for _, loss in reference.entries)
        assert row["pool_size"] == len(losses)
        assert [row[f"pool_{name}"] for name in ("best", "median", "worst")] == [
            losses[0],
            losses[len(losses) // 2],
            losses[-1],
        ]
    pool = json.loads((tmp_path / "supernet" / "pool.json").read_text())
    assert [(tuple(entry["path"]), entry["loss"]) for entry in pool] == state.pool.best()


def test_losses_between_lines_of_metrics_are_averaged(data, tmp_path):
    _, _, every = recorded(tmp_path / "1", data, log_every=1)
    _, _, some = recorded(tmp_path / "3", data, log_every=3)
    losses = [row["loss"] for row in every["step"]]
    # Every third step, and at the end of every epoch.
    assert [row["step"] for row in some["step"]] == [3, 4, 6, 8, 9, 12]
    for row, before in zip(some["step"], [0, 3, 4, 6, 8, 9], strict=True):
        assert row["loss"] == pytest.approx(np.mean(losses[before : row["step"]]))


def test_a_finished_training_that_is_run_again_writes_nothing(data, tmp_path):
    net, state, _ = recorded(tmp_path, data)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.name not in ("log.txt", ".lock")}
    again, same, _ = recorded(tmp_path, data)
    after = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.name not in ("log.txt", ".lock")}
    config = tmp_path / "config.yaml"
    assert {**after, config: 0} == {**before, config: 0}
    assert same_tensors(again.state_dict(), net.state_dict())
    assert (same.step, same.stopped, same.pool.best()) == (state.step, state.stopped, state.pool.best())


# Divergence


def test_a_loss_that_is_not_a_number_stops_the_run(data, tmp_path):
    net = new_net()
    watch = Watch(net)
    settings = {"lr": 1e30, "checkpoint_steps": 1, "sampler": "uniform"}
    with new_run(tmp_path, **settings) as run:
        with pytest.raises(GreedyNASError, match="the last good checkpoint is kept") as error:
            train(data, run=run, net=net, **settings)
        step, path = len(watch.paths), watch.paths[-1]
        assert f"at step {step} on path {compact(path, net.space)} (" in str(error.value)
        assert "\n" not in str(error.value)
        loaded = run.load_checkpoint()
        assert loaded is not None
        tensors, state = loaded
        assert state["step"] == step - 1 >= 1
        fresh = new_net()
        load_weights(fresh, tensors)
        assert all(parameter.isfinite().all() for parameter in fresh.parameters())
    assert len(rows_of(tmp_path)["step"]) == step - 1


def test_weights_that_are_not_finite_are_not_saved(data, tmp_path):
    """The loss of the step is finite, but the update makes weights that are not."""
    settings = {"checkpoint_steps": 1, "sampler": "uniform"}
    net = new_net()
    watch = Watch(net)
    with new_run(tmp_path, **settings) as run:
        too_much = TrainSettings(**{**SETTINGS, **settings}).model_copy(update={"lr": math.inf})
        with pytest.raises(GreedyNASError, match="at step 1 on path") as error:
            train_supernet(net, data, too_much, run=run)
        assert compact(watch.paths[0], net.space) in str(error.value)
        assert run.load_checkpoint() is None


def test_a_filtering_without_a_finite_loss_stops_the_run(data):
    net = new_net()
    net.classifier.weight.data.fill_(math.nan)
    with pytest.raises(GreedyNASError, match=r"at step 0 on path \d{4} \("):
        train(data, net=net, warmup=0)


def test_broken_paths_do_not_break_the_metrics(data, tmp_path):
    """JSON has no infinite numbers."""
    space = tiny_space(["ID", "MB2_K3"], repeat=1)
    net = new_net(space)
    for parameter in net.layers[0][1].parameters():
        parameter.data.fill_(math.nan)
    settings = {"m": 6, "k": 6, "pool_size": 6, "warmup": 0, "max_epochs": 1}
    with new_run(tmp_path, space, **settings) as run, pytest.raises(GreedyNASError, match=r"on path 1\d \(MB2_K3"):
        train(data, space, run=run, net=net, **settings)
    (row,) = rows_of(tmp_path)["filter"]
    assert "Infinity" not in (tmp_path / "metrics.jsonl").read_text()
    assert None in row["kept"]
    assert row["pool_worst"] is None
    assert row["pool_best"] is not None
