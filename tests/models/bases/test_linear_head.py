"""The linear classifier on frozen features."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from greedynas.models.bases.linear_head import fit_classifier, fit_linear_head
from tests.helpers.bases import SMALL, timm_network

pytestmark = pytest.mark.usefixtures("one_thread")


def clusters(counts, dimensions=6, spread=1.0, seed=0):
    """Return features around one centre for each class, on very different scales, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    centres = 3 * torch.randn(len(counts), dimensions, generator=torch.Generator().manual_seed(9))
    features = centres[labels] + spread * torch.randn(len(labels), dimensions, generator=generator)
    return features * torch.logspace(-3, 3, dimensions) + 100, labels


def test_separable_features_are_classified_whatever_their_scale():
    features, labels = clusters([30, 30, 30])
    head = fit_linear_head(features, labels, 3)
    unseen, wanted = clusters([20, 20, 20], seed=1)
    with torch.no_grad():
        assert (head(features).argmax(1) == labels).all()
        assert (head(unseen).argmax(1) == wanted).float().mean() > 0.95
    assert (head.in_features, head.out_features, head.weight.dtype) == (6, 3, torch.float32)


def test_the_classifier_is_the_minimum_of_the_loss():
    """Check that no step in any direction lowers the loss."""
    features, labels = clusters([15, 25], spread=4.0)
    features = (features - features.mean(0)) / features.std(0)  # as they are standardised inside
    head = fit_linear_head(features, labels, 2).double()
    loss = F.cross_entropy(head(features.double()), labels) + 1e-3 * head.weight.square().sum()
    loss.backward()
    assert max(parameter.grad.abs().max() for parameter in head.parameters()) < 1e-4


def test_the_same_features_give_the_same_classifier():
    features, labels = clusters([10, 12])
    first, second = (fit_linear_head(features, labels, 2) for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)


def test_weights_of_images_move_the_border():
    """Check classes that overlap: the rare one is found where its images count more."""
    features, labels = clusters([200, 10], dimensions=2, spread=6.0)
    weights = torch.where(labels == 1, 20.0, 1.0)
    with torch.no_grad():
        plain = fit_linear_head(features, labels, 2)(features).argmax(1)
        weighted = fit_linear_head(features, labels, 2, weights)(features).argmax(1)
    recalls = [(found[labels == 1] == 1).float().mean() for found in (plain, weighted)]
    assert recalls[1] > recalls[0] + 0.2


def test_features_that_never_vary_and_classes_without_images_do_no_harm():
    features, labels = clusters([10, 10])
    features[:, 0] = 7.0
    head = fit_linear_head(features, labels, 3)
    with torch.no_grad():
        logits = head(features)
    assert logits.isfinite().all()
    assert (logits.argmax(1) == labels).all()


def test_a_network_gets_a_classifier_for_its_features(data):
    """Check that only the classifier changes, and that it is the one fitted to the network's own features."""
    network = timm_network(SMALL, num_classes=3)
    before = copy.deepcopy(network.state_dict())
    fit_classifier(network, data.train)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert network.training
    network.eval()
    images, labels = data.train.eval_batch(np.arange(len(data.train)))
    with torch.no_grad():
        features = network.forward_head(network.forward_features(images), pre_logits=True)
        expected = fit_linear_head(features, labels, 3)(features)
        torch.testing.assert_close(network(images), expected, rtol=1e-3, atol=1e-3)
