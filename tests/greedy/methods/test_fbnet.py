"""FBNet against a reference in float64 with fixed noise."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from greedynas.greedy.methods import fbnet
from greedynas.greedy.methods.fbnet import FBNet
from tests.helpers.method_references import (
    double_net,
    draw_of,
    entropy,
    expected_cost,
    mixed_logits,
    prepared,
    some_alpha,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("target", [None, 30_000, 10**9])
@pytest.mark.parametrize("progress", [0.0, 0.3])
def test_the_gradient_of_theta_is_that_of_the_product_form(data, monkeypatch, target, progress):
    net = double_net()
    noise = iter(some_alpha(net.space, seed=5))
    monkeypatch.setattr(fbnet, "gumbel", lambda rng, count: next(noise))
    draw = draw_of(net, data, "fbnet", target=target and {"max_macs": target}, progress=progress)
    theta = some_alpha(net.space)
    heat = 5.0 * math.exp(-0.045 * 90 * progress)
    leaves = [torch.tensor(layer, requires_grad=True) for layer in theta]
    noisy = [(layer + torch.tensor(g)) / heat for layer, g in zip(leaves, some_alpha(net.space, seed=5), strict=True)]
    shares = [torch.exp(layer) / torch.exp(layer).sum() for layer in noisy]
    images, labels = draw.learning._validation_batch()
    loss = entropy(mixed_logits(net, images, shares), labels)
    if target == 30_000:
        loss = loss * (1 + torch.log(expected_cost(net.space, shares) / target)) ** 0.6
    loss.backward()

    method = prepared(FBNet(), draw, theta)
    method.learn(draw, draw.learning)
    for layer, leaf in zip(method.alpha, leaves, strict=True):
        torch.testing.assert_close(layer.grad, leaf.grad, rtol=1e-9, atol=1e-12)


def test_the_noise_is_that_of_gumbel_and_new_for_every_step(data):
    drawn = fbnet.gumbel(np.random.default_rng(0), 20_000)
    assert stats.kstest(drawn, stats.gumbel_r.cdf).pvalue > 0.01
    net = double_net()
    draw = draw_of(net, data, "fbnet")
    method = prepared(FBNet(), draw, some_alpha(net.space))
    first, second = (method.choose(draw, draw.learning)[0][0].shares for _ in range(2))
    assert all(float(sum(layer.values())) == pytest.approx(1) for layer in first)
    assert first[0][0] != second[0][0]


def test_samples_become_decisions_as_the_temperature_falls(data):
    net = double_net()
    largest = []
    for progress in (0.0, 1.0):
        draw = draw_of(net, data, "fbnet", progress=progress)
        method = prepared(FBNet(), draw, some_alpha(net.space))
        shares = [method.noisy_shares(draw, draw.learning) for _ in range(50)]
        largest.append(np.mean([layer.max().item() for sample in shares for layer in sample]))
    assert largest[0] < 0.5 < 0.9 < largest[1]
