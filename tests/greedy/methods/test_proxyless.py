"""ProxylessNAS against the formulas of its paper, layer by layer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from greedynas import GreedyNASError, Space
from greedynas.greedy.methods.proxyless import Proxyless, ProxylessReinforce
from tests.helpers.method_references import (
    adam_step,
    double_net,
    draw_of,
    entropy,
    expected_cost,
    prepared,
    some_alpha,
)
from tests.helpers.training import tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")


def softmax(values):
    return np.exp(values) / np.exp(values).sum()


def gate_gradients(net, images, labels, pairs):
    """Return ⟨∂L/∂y, o_j(x)⟩ for the two ops of each layer, where only the first one is on."""
    net = double_net(net.space)
    x, kept = net.stem(images), []
    for layer, pair in zip(net.layers, pairs, strict=True):
        y = layer[pair[0]](x) + 0  # a tensor of its own, also after an identity
        y.retain_grad()
        kept.append((x, y))
        x = y
    entropy(net.classifier(net.head(x).mean((2, 3))), labels).backward()
    return [
        [float((y.grad * layer[op](x).detach()).sum()) for op in pair]
        for (x, y), layer, pair in zip(kept, net.layers, pairs, strict=True)
    ]


@pytest.mark.parametrize("target", [None, 30_000])
def test_a_step_on_two_ops_follows_the_formula_of_the_paper(data, target):
    net = double_net()
    draw = draw_of(net, data, "proxyless", target=target and {"max_macs": target}, cost_weight=0.5, arch_lr=0.05)
    method, alpha = prepared(Proxyless(), draw, some_alpha(net.space)), some_alpha(net.space)
    pairs = Proxyless.two_ops(method, np.random.default_rng(0))  # the stream of the draw
    images, labels = draw.learning._validation_batch()
    leaves = [torch.tensor(layer, requires_grad=True) for layer in alpha]
    if target is not None:
        shares = [torch.exp(layer) / torch.exp(layer).sum() for layer in leaves]
        (0.5 * torch.log(expected_cost(net.space, shares) / target)).backward()
    method.learn(draw, draw.learning)
    by_gate = gate_gradients(net, images, labels, pairs)
    for layer, start, pair, gates, leaf in zip(method.alpha, alpha, pairs, by_gate, leaves, strict=True):
        q = softmax(start[list(pair)])
        gradient = np.zeros(3) if leaf.grad is None else leaf.grad.numpy()
        for i in range(2):
            gradient[pair[i]] += sum(gates[j] * q[j] * ((i == j) - q[i]) for j in range(2))
        np.testing.assert_allclose(layer.grad, gradient, rtol=1e-8, atol=1e-12)
        moved = adam_step(start, gradient, 0.05, (0.0, 0.999))
        two = list(pair)
        moved[two] -= np.log(np.exp(moved[two]).sum() / np.exp(start[two]).sum())
        np.testing.assert_allclose(layer.detach(), moved, rtol=1e-7, atol=1e-9)
        if target is None:  # the op that was not sampled is as probable as before
            (other,) = {0, 1, 2} - set(pair)
            assert softmax(layer.detach().numpy())[other] == pytest.approx(softmax(start)[other])


def test_ops_are_sampled_by_their_probabilities(data):
    net = double_net()
    draw = draw_of(net, data, "proxyless")
    method = prepared(Proxyless(), draw, some_alpha(net.space))
    rng = np.random.default_rng(1)
    paths = np.array([method.sampled(rng) for _ in range(4000)])
    pairs = np.array([method.two_ops(rng) for _ in range(4000)])
    for layer, p in enumerate(method.probabilities()):
        np.testing.assert_allclose(np.bincount(paths[:, layer], minlength=3) / 4000, p, atol=0.03)
        both = [p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
        drawn = np.sort(pairs[:, layer], axis=1)
        for (i, j), chance in zip(((0, 1), (0, 2), (1, 2)), both, strict=True):
            these = (drawn == (i, j)).all(1)
            assert these.mean() == pytest.approx(chance, abs=0.03)
            assert (pairs[these, layer, 0] == i).mean() == pytest.approx(p[i] / (p[i] + p[j]), abs=0.06)


def test_reinforce_follows_the_advantage_of_sampled_paths(data):
    net = double_net()
    draw = draw_of(net, data, "proxyless-reinforce", target={"max_macs": 30_000}, cost_weight=0.07, arch_lr=0.05, m=4)
    told = []

    def accuracies(paths):
        told.extend(paths)
        return [0.1 * sum(path) for path in paths]

    draw = replace(draw, accuracies=accuracies)
    method, alpha = prepared(ProxylessReinforce(), draw, some_alpha(net.space)), some_alpha(net.space)
    rng = np.random.default_rng(0)
    paths = [tuple(int(rng.choice(3, p=softmax(layer))) for layer in alpha) for _ in range(4)]
    method.learn(draw, draw.learning)
    assert told == list(dict.fromkeys(paths))
    macs = net.space.costs(paths).macs
    rewards = np.array(
        [0.1 * sum(path) * max(cost / 30_000, 1) ** -0.07 for path, cost in zip(paths, macs, strict=True)]
    )
    for i, layer in enumerate(method.alpha):
        gradient = np.zeros(3)
        for path, reward in zip(paths, rewards, strict=True):
            for op in range(3):
                gradient[op] -= (reward - rewards.mean()) * ((path[i] == op) - softmax(alpha[i])[op]) / 4
        np.testing.assert_allclose(layer.grad, gradient, rtol=1e-9, atol=1e-12)
    assert method.baseline == pytest.approx(rewards.mean())
    before = method.baseline
    method.learn(draw, draw.learning)
    assert method.baseline != before


def test_image_sizes_are_refused():
    space = Space(**{**tiny_space().model_dump(), "name": "sized", "sizes": [6, 8]})
    with pytest.raises(GreedyNASError, match="sized chooses among image sizes, which cannot be mixed"):
        Proxyless().check(space)
