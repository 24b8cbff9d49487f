"""DARTS against a reference in float64: the mixed output, the gradients of α and those of the weights."""

import numpy as np
import pytest
import torch

from greedynas.greedy.methods.darts import Darts
from greedynas.greedy.steps import supernet_optimizer, train_step
from greedynas.models.supernet import Mixture
from tests.helpers.method_references import (
    adam_step,
    double_net,
    draw_of,
    entropy,
    expected_cost,
    mixed_logits,
    prepared,
    some_alpha,
)
from tests.helpers.training import same_tensors, snapshot

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("target", [None, {"max_macs": 30_000}, {"max_params": 1_500, "max_macs": 30_000}])
def test_the_gradient_of_alpha_is_that_of_the_mixed_loss_and_the_expected_cost(data, target):
    net = double_net()
    draw = draw_of(net, data, target=target, cost_weight=0.7)
    alpha = some_alpha(net.space)
    images, labels = draw.learning._validation_batch()
    assert len(images) == 10  # of 12 validation images
    leaves = [torch.tensor(layer, requires_grad=True) for layer in alpha]
    shares = [torch.exp(layer) / torch.exp(layer).sum() for layer in leaves]
    loss = entropy(mixed_logits(net, images, shares), labels)
    for cost, limit in (target or {}).items():
        expected = expected_cost(net.space, shares, cost.removeprefix("max_"))
        assert expected.item() > limit
        loss = loss + 0.7 * torch.log(expected / limit)
    loss.backward()

    method, before = prepared(Darts(), draw, alpha), snapshot(net)
    method.learn(draw, draw.learning)
    for layer, leaf, start in zip(method.alpha, leaves, alpha, strict=True):
        torch.testing.assert_close(layer.grad, leaf.grad, rtol=1e-9, atol=1e-12)
        moved = adam_step(start, leaf.grad.numpy(), 3e-4 * 195, (0.5, 0.999), 1e-3)
        np.testing.assert_allclose(layer.detach(), moved, rtol=1e-7)
    assert same_tensors(before, net.state_dict())  # neither weights nor running statistics
    assert all(parameter.grad is None for parameter in net.parameters())
    assert draw.learning.optimization_images == 3 * 10


def test_costs_below_the_target_have_no_gradient(data):
    net = double_net()
    gradients = []
    for target in (None, {"max_macs": 10**9}):
        draw = draw_of(net, data, target=target)
        method = prepared(Darts(), draw, some_alpha(net.space))
        method.learn(draw, draw.learning)
        gradients.append([layer.grad for layer in method.alpha])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_the_update_of_the_weights_trains_the_mixture(data):
    net = double_net()
    draw = draw_of(net, data)
    alpha = some_alpha(net.space)
    method = prepared(Darts(), draw, alpha)
    [[mixture]] = method.choose(draw, draw.learning)
    assert isinstance(mixture, Mixture)
    assert list(mixture) == [int(np.argmax(layer)) for layer in alpha]
    images, labels = next(iter(data.train.train_batches(0, 10)))
    reference = double_net()
    shares = [torch.tensor(np.exp(layer) / np.exp(layer).sum()) for layer in alpha]
    x = reference.stem(images)
    for layer, weights in zip(reference.layers, shares, strict=True):
        x = sum(weights[i] * op(x) for i, op in enumerate(layer))
    loss = entropy(reference.classifier(reference.head(x).mean((2, 3))), labels)
    loss.backward()
    optimizer = supernet_optimizer(net, draw.settings)
    found = train_step(net, optimizer, images, labels, [mixture], 0.0, draw.settings, None, "fp32")
    torch.testing.assert_close(found.double(), loss.detach().double(), rtol=1e-6, atol=0)
    for parameter, wanted in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-8, atol=1e-12)
    assert draw.learning.optimization_images == 2 * 10  # besides the one path that every update counts
