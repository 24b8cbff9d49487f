"""Compare the kernels for small images with plain PyTorch; `test_graphs.py` runs this file in Triton's interpreter."""

import itertools
import os
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter", allow_module_level=True)

from greedynas.data.transforms import View, _scale_and_shift, normalisation
from greedynas.experimental.split_after_identity import SplitSupernet
from greedynas.gpu import ends, engine, recording
from greedynas.gpu.kernels import depthwise_whole, products, small
from greedynas.greedy.evaluation import _evaluate_chunk, shared_layers
from greedynas.greedy.graphs import evaluation as evaluation_graphs
from greedynas.greedy.graphs import training
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.steps import supernet_optimizer, train_step
from greedynas.models.batchnorm import bn_mode
from greedynas.models.blocks import ConvNorm, MBConv
from greedynas.models.supernet import Supernet
from greedynas.spaces.space import Fixed, Space, Stage
from tests.helpers.interpreted_engine import compare, picture, randomised

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _engine_on():
    torch.manual_seed(0)
    with engine.using("on"):
        yield


@pytest.mark.parametrize(("augment", "stored"), [("pad_crop", 12), ("pad_crop", 15), ("none", 14)])
@pytest.mark.parametrize("channels", [1, 3])
def test_crops_as_torch_makes_them(augment, stored, channels):
    view = View(12, stored, channels, augment, pad=3, min_scale=0.2, flip=True, seed=0)
    pixels = torch.randint(256, (20, stored, stored, channels), dtype=torch.uint8)
    rows = torch.randperm(20)[:7]
    plan = view.plan(1, np.arange(7))
    found = small.crops(pixels, rows, plan, 12, *_scale_and_shift(*normalisation(channels), CPU))
    wanted = view.normalise(view.augmented(pixels, rows, plan)).permute(0, 2, 3, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("block", "mode"), [(MBConv(8, 8, 1, 3, 3, False, "relu"), "train"), (MBConv(8, 10, 2, 2, 5, False, "hard_swish"), "eval")])  # fmt: skip
def test_blocks_by_products_of_the_library(block, mode, monkeypatch):
    monkeypatch.setattr(products, "NARROWEST", 1)
    used = []
    for name in ("forward", "narrowing", "widening"):
        work = getattr(products, name)
        monkeypatch.setattr(products, name, lambda *args, name=name, work=work: used.append(name) or work(*args))
    compare(randomised(block), picture(3, 8, 5, 5), mode)
    assert used == ["forward", "narrowing", "widening"]


@pytest.mark.parametrize(("block", "height", "width", "mode"), [
    (MBConv(8, 8, 1, 2, 3, False, "relu"), 4, 4, "train"),
    (MBConv(6, 6, 1, 2, 5, False, "hard_swish"), 2, 3, "batch"),
    (MBConv(8, 8, 1, 1, 5, False, "relu"), 3, 3, "train"),  # nothing to expand
    (MBConv(8, 8, 1, 2, 7, True, "relu"), 4, 4, "eval"),
])  # fmt: skip
def test_maps_that_a_thread_keeps(block, height, width, mode):
    assert depthwise_whole.fits(torch.empty(1, height, width, 1), 1)
    compare(randomised(block), picture(5, block.depthwise.conv.in_channels // (1 if block.expand is None else 2), height, width), mode)  # fmt: skip


@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_head_up_to_the_mean(activation, mode):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = ConvNorm(6, 20, activation=activation)

        def forward(self, x):
            if ends.pools(self.block, x):
                assert engine.mode() == "on"
                return ends.pooled(self.block, x)[:, :, None, None]
            return self.block(x).mean((2, 3), keepdim=True)

    compare(randomised(Head()), picture(7, 6, 3, 3), mode)


@pytest.mark.parametrize(("images", "classes"), [(16, 10), (37, 3), (20, 33)])
def test_scores(images, classes):
    features, classifier = torch.randn(images, 70), nn.Linear(70, classes)
    labels = torch.randint(classes, (images,))
    losses, right = torch.zeros(-(-images // 16)), torch.full((images,), 7, dtype=torch.int8)
    with torch.no_grad():
        small.scores(features, classifier.weight, classifier.bias, labels, losses, right, False)
        logits = classifier(features)
    torch.testing.assert_close(losses.sum(), F.cross_entropy(logits, labels, reduction="sum"))
    assert right.view(torch.bool).tolist() == (logits.argmax(1) == labels).tolist()


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_update_as_sgd(momentum):
    ours = [nn.Parameter(torch.randn(shape)) for shape in [(5,), (3, 700), (2100, 2)]]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    decays = [0.0, 0.1, 0.01]
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(theirs, decays, strict=True)]
    optimizer = torch.optim.SGD(groups, 0.5, momentum, nesterov=momentum > 0)
    cast = torch.zeros(3, 700, dtype=torch.bfloat16)
    velocities, lr = [torch.zeros_like(p) for p in ours], torch.zeros(())
    update = small.Update(ours, velocities, decays, [None, cast, None], momentum, lr)
    before = [p.detach().clone() for p in ours]
    gradients = [torch.ones_like(p) for p in ours]
    update(gradients)  # has no effect before `begin`
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    update.begin()
    for step in range(3):
        lr.fill_(0.1 * (step + 1))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (step + 1)
        for gradient, p in zip(gradients, theirs, strict=True):
            gradient.normal_()
            p.grad = gradient.clone()
        update(gradients)
        optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(cast.float(), ours[1].detach(), rtol=2**-7, atol=0)  # the interpreter does not round
    update([gradients[0], gradients[1].t().contiguous().t(), gradients[2]])
    with pytest.raises(ValueError, match="layout"):
        update.begin()


# Graphs need a GPU. In these tests, a "graph" is the recorded work itself, which every replay executes again.


class Replayed:
    def __init__(self, work):
        self.replay = work


class Readdressed(small.Update):
    begun = False

    def __call__(self, gradients):
        if self.begun:
            self.gradients = gradients
            super().begin()
        super().__call__(gradients)

    def begin(self):
        self.begun = True


@pytest.fixture
def replayed(monkeypatch):
    def captured(work, pool):
        work()
        return Replayed(work)

    monkeypatch.setattr(recording, "captured", captured)
    monkeypatch.setattr(recording, "new_pool", object)
    monkeypatch.setattr(recording, "warm_up", lambda work: work())
    monkeypatch.setattr(recording, "side_by_side", recording.in_turn)
    monkeypatch.setattr(small, "Update", Readdressed)


def some_net(layers=2, split=False):
    space = Space(
        name="small", image_size=3, num_classes=5, ops=["ID", "MB2_K3"], stem=[Fixed(op="CONV_K3", channels=8)],
        stages=[Stage(channels=8, repeat=layers, stride=1)],
        head=[Fixed(op="CONV_K1", channels=20)],
    )  # fmt: skip
    net = (SplitSupernet if split else Supernet)(space, generator=torch.Generator().manual_seed(0))
    return net.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(("sampler", "split"), [("greedy", False), ("fair", False), ("greedy", True)])
def test_recorded_training_is_plain_training(replayed, sampler, split):
    settings = TrainSettings(sampler=sampler, label_smoothing=0.1, weight_decay=1e-2)
    weights = torch.linspace(0.5, 1.5, 5)
    batches = [(picture(4, 3, 3, 3), torch.randint(5, (4,))) for _ in range(2)]
    steps = [[(0, 1)], [(1, 1)]]
    if sampler == "fair":
        steps = [[(0, 1), (1, 0)], [(1, 1), (0, 0)]]
    nets, told = [], []
    for recorded in (True, False):
        net = some_net(split=split).train()
        optimizer = supernet_optimizer(net, settings)
        with engine.using("on" if recorded else "off"):
            if recorded:
                before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
                step = training.GraphedTraining(net, optimizer, *batches[0], settings, weights, "fp32")
                assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
            else:
                step = partial(train_step, net, optimizer, settings=settings, class_weights=weights, precision="fp32")
            told.append([step(*batch, paths, lr=0.1).item() for batch, paths in zip(batches, steps, strict=True)])
        nets.append(net.state_dict() | {f"v{i}": optimizer.state[p].get("momentum_buffer", torch.zeros_like(p)) for i, p in enumerate(net.parameters())})  # fmt: skip
    torch.testing.assert_close(*told, rtol=1e-4, atol=1e-4)
    for name, tensor in nets[0].items():
        torch.testing.assert_close(tensor, nets[1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("bn", "split"), [("batch", False), ("recalibrate", False), ("batch", True)])
def test_recorded_evaluation_is_plain_evaluation(replayed, monkeypatch, bn, split):
    net, images, labels = some_net(3, split), picture(6, 3, 3, 3), torch.randint(5, (6,))
    # All paths that start with the first op, which are one graph, and some that start with the second. With split
    # identities, all that start with the second op as well, which are another graph.
    monkeypatch.setattr(evaluation_graphs, "FEW_SUBTREES", 1)
    paths = [(1, 1, 0), (1, 0, 1), *((0, *ends) for ends in itertools.product(range(2), repeat=2))]
    if split:
        paths = [*itertools.product(range(2), repeat=3)]
    found = []
    for recorded in (True, False):
        with engine.using("on" if recorded else "off"), torch.no_grad(), bn_mode(net, bn):
            distinct = sorted(paths)
            calibration = images.flip(0)[:5] if bn == "recalibrate" else None
            if recorded:
                evaluation = evaluation_graphs.GraphedEvaluation(
                    net, images.roll(1, 0), labels, calibration, bn, "fp32"
                )
                found.append(evaluation(net, distinct, shared_layers(distinct), images, labels, calibration))
                assert len(evaluation.subtrees) == (2 if split else 1)
            else:
                found.append(_evaluate_chunk(net, distinct, shared_layers(distinct), images, labels, calibration, bn, "fp32"))  # fmt: skip
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert (found[0][1] == found[1][1]).float().mean() > 0.99
