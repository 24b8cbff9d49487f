"""Tests of the loss that weights images by their class, and of its effect on training and on the choice of networks."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from greedynas import CandidatePool, build_network, evaluate_paths
from greedynas.data.class_weights import balanced_weights, image_weights, macro_accuracy
from greedynas.greedy.filtering import filter_paths
from greedynas.greedy.settings import SearchSettings, TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.validation import FilterLosses, SupernetAccuracies, evaluate_on_validation
from greedynas.models.losses import classification_loss, distillation_loss, teacher_logits
from greedynas.reporting.report import write_report
from greedynas.runtime.rng import stream, torch_stream
from greedynas.settings.schema import Config, RetrainSettings
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import make_recipe
from greedynas.stages.retrain import on_validation
from greedynas.stages.search import make_requests, search_stage
from greedynas.stages.testing import predict_logits
from greedynas.stages.train import train_stage
from tests.helpers.pictures import paint
from tests.helpers.retraining import new_network
from tests.helpers.search import DATA, console
from tests.helpers.training import SETTINGS, new_net, opened, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")


def labels_of(*counts):
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


@pytest.mark.parametrize("imbalance", [10, 60, 1000])
@pytest.mark.parametrize("classes", [2, 5])
def test_the_loss_is_lowest_for_the_right_class_for_all_weights(imbalance, classes):
    """Beyond an imbalance of 9 C + 1, PyTorch's weighted and smoothed loss is lowest for the rarest class."""
    labels = labels_of(imbalance * 20, *[20] * (classes - 1))
    weights = balanced_weights(labels, classes).double()
    smoothed = torch.full((classes, classes), 0.1 / classes, dtype=torch.float64) + 0.9 * torch.eye(classes).double()
    logits = smoothed.log().requires_grad_()
    classification_loss(logits, torch.arange(classes), weights, 0.1).backward()
    assert logits.grad.abs().max() < 1e-7
    # PyTorch's own loss has its minimum at another class.
    theirs = (smoothed[0] * weights).softmax(0) if imbalance > 9 * classes + 1 else None
    assert theirs is None or theirs.argmax() != 0


@given(st.lists(st.integers(1, 200), min_size=2, max_size=5), st.integers(1, 16), st.integers(0, 100))
def test_every_class_has_the_same_share_of_an_epoch_at_every_batch_size(counts, batch, seed):
    labels = labels_of(*counts)
    weights = balanced_weights(labels, len(counts)).double()
    shares = torch.zeros(len(counts), dtype=torch.float64)
    for chosen in torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).split(batch):
        logits = torch.zeros(len(chosen), len(counts), dtype=torch.float64, requires_grad=True)
        classification_loss(logits, labels[chosen], weights).backward()
        pull = -logits.grad.gather(1, labels[chosen, None]).squeeze(1) * len(chosen)  # gradient of the own class
        shares.index_add_(0, labels[chosen], pull)
    np.testing.assert_allclose(shares / shares.sum(), 1 / len(counts), rtol=1e-5)


def test_weights_have_a_mean_of_one_over_the_images_and_are_zero_for_absent_classes():
    labels = labels_of(300, 0, 20, 5)
    weights = balanced_weights(labels, 4)
    assert weights[1] == 0
    assert weights[labels].double().mean().item() == pytest.approx(1, rel=1e-6)
    sums = torch.zeros(4).double().index_add(0, labels, weights[labels].double())
    torch.testing.assert_close(sums[[0, 2, 3]], torch.full((3,), 325 / 3).double(), rtol=1e-6, atol=0)


def test_the_last_classes_may_have_no_images():
    assert balanced_weights(labels_of(3, 1), 4).tolist() == pytest.approx([2 / 3, 2, 0, 0])


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_without_weights_all_images_count_equally(smoothing):
    labels = torch.tensor([0, 2, 1, 0, 0])
    log_p = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    right = -log_p.gather(1, labels[:, None]).mean()
    expected = (1 - smoothing) * right - smoothing * log_p.mean()
    torch.testing.assert_close(classification_loss(log_p, labels, None, smoothing), expected)
    torch.testing.assert_close(classification_loss(log_p, labels, torch.ones(3), smoothing), expected)


def test_soft_targets_and_labels_give_the_same_loss():
    weights, labels = torch.tensor([0.2, 1.0, 9.0]), torch.tensor([0, 2, 1, 0, 0])
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    hard = classification_loss(logits, labels, weights, 0.1)
    torch.testing.assert_close(classification_loss(logits, F.one_hot(labels, 3).float(), weights, 0.1), hard)
    plain = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(hard, (plain * weights[labels]).sum() / 5)
    mixed = 0.3 * F.one_hot(labels, 3).float() + 0.7 * F.one_hot(labels.flip(0), 3).float()
    expected = 0.3 * weights[labels] + 0.7 * weights[labels.flip(0)]
    torch.testing.assert_close(image_weights(mixed, weights), expected)
    each = F.cross_entropy(logits, mixed, reduction="none")
    torch.testing.assert_close(classification_loss(logits, mixed, weights), (each * expected).mean())


def test_parts_of_a_batch_add_up_to_the_batch():
    """Ranks compute such parts, and each rank may have other classes."""
    weights, labels = torch.tensor([0.1, 3.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    whole = classification_loss(logits, labels, weights, 0.1)
    parts = [
        classification_loss(logits[part], labels[part], weights, 0.1) * len(labels[part]) / 6
        for part in (slice(4), slice(4, 6))
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_distillation_loss_follows_its_formula(temperature):
    logits, wanted = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    found = distillation_loss(logits, wanted, temperature)
    p, q = (wanted / temperature).softmax(1), (logits / temperature).softmax(1)
    assert found.item() == pytest.approx(temperature**2 * (p * (p / q).log()).sum(1).mean().item(), rel=1e-4)


def test_without_a_temperature_it_is_one():
    logits, wanted = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    assert distillation_loss(logits, wanted) == distillation_loss(logits, wanted, 1.0)


def test_the_logits_of_a_teacher_are_in_full_precision_and_have_no_gradient():
    teacher, images = torch.nn.Linear(4, 3), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    exact, rounded = teacher_logits(teacher, images, "fp32"), teacher_logits(teacher, images, "bf16")
    torch.testing.assert_close(exact, teacher(images).detach())
    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.float32)
    assert torch.equal(rounded, rounded.bfloat16().float())  # computed in bf16
    assert not torch.equal(exact, rounded)
    assert not exact.requires_grad


def two_tone(folder, counts):
    """Write dark images of one class and bright ones of another, and return the folder."""
    rng = np.random.default_rng(0)
    for (name, count), (low, high) in zip(counts.items(), [(0, 110), (140, 250)], strict=True):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(low, high, (8, 8, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


@pytest.mark.parametrize("mixup", [0.0, 0.2])
def test_easily_separable_classes_are_learnt_at_an_imbalance_of_sixty(tmp_path, mixup):
    data = opened(
        two_tone(tmp_path, {"dark": 480, "light": 8}), class_weights="balanced", val_images=61, test_images=61
    )
    network = build_network("2111", tiny_space(), num_classes=2, generator=torch_stream(0, "retrain init"))
    recipe = make_recipe(RetrainSettings(epochs=6, batch_size=16, lr=0.2, label_smoothing=0.1, mixup=mixup))
    images = data.train_and_val()
    network, _ = retrain(network, images, recipe, class_weights=data.weights_for(images))
    logits, labels = predict_logits(network, data.test())
    assert macro_accuracy(logits.argmax(1) == labels, labels, 2) > 0.95


# Filtering, search and the choice of networks on balanced data


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    folder = paint(tmp_path_factory.mktemp("uneven"), {"a": 60, "b": 9, "c": 12}, size=(10, 9))
    found = opened(folder, class_weights="balanced", val_images=26, test_images=6)
    assert torch.bincount(found.val.labels).tolist() == [19, 3, 4]
    return found


PATHS = [(1, 2, 0, 1), (2, 2, 2, 2), (0, 1, 2, 0)]


def by_hand(net, path, images, labels):
    """Return a path's loss and accuracy, averaged over classes, with the BatchNorm statistics of these images."""
    net.train()
    with torch.no_grad():
        logits = net(images, path)
    losses = F.cross_entropy(logits, labels, reduction="none")
    right = (logits.argmax(1) == labels).double()
    present = labels.unique()
    return [float(torch.stack([value[labels == c].mean() for c in present]).mean()) for value in (losses, right)]


def test_balanced_evaluation_averages_over_classes(uneven):
    images, labels = uneven.val.eval_batch()
    expected = [by_hand(new_net(), path, images, labels) for path in PATHS]
    found = evaluate_paths(new_net(), PATHS, images, labels, bn_images=1000, balanced=True)
    np.testing.assert_allclose(np.stack([found.losses, found.accuracies], axis=1), expected, rtol=1e-4)
    plain = evaluate_paths(new_net(), PATHS, images, labels, bn_images=1000)
    assert np.abs(plain.losses - found.losses).min() > 1e-4
    assert plain.images == found.images
    absent = evaluate_paths(new_net(), PATHS[:1], images[labels != 1], labels[labels != 1], bn_images=99, balanced=True)
    np.testing.assert_allclose(absent.losses, by_hand(new_net(), PATHS[0], images[labels != 1], labels[labels != 1])[0])


def test_chunks_that_lack_a_class_do_not_change_the_weights(uneven):
    net = new_net()
    assert uneven.balanced
    found, expected = (
        evaluate_on_validation(net, PATHS, uneven, SearchSettings(bn="running", bn_images=images))
        for images in (4, 1000)
    )
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert found.accuracies.tolist() == pytest.approx(expected.accuracies.tolist(), abs=1e-12)


def test_filtering_ranks_by_the_balanced_loss_where_classes_are_balanced(uneven):
    settings = TrainSettings(**{**SETTINGS, "filter_images": 20, "bn_images": 100, "bn": "batch"})
    losses = {}
    for balanced in (True, False):
        data = uneven if balanced else replace(uneven, class_weights=None)
        net = new_net()
        evaluate = FilterLosses(net, data, settings, 0, TrainState(CandidatePool(6)), "fp32")
        filtered = filter_paths(net.space, evaluate, settings.m, settings.k, stream(0, "p"))
        losses[balanced] = dict(filtered.kept + filtered.rejected)
    chosen = uneven.val.balanced(20, stream(0, "filter images", 0))
    images, labels = uneven.val.eval_batch(chosen)
    assert len(set(torch.bincount(labels).tolist())) > 1  # the rare classes have too few images
    for path, loss in losses[True].items():
        assert loss == pytest.approx(by_hand(new_net(), path, images, labels)[0], rel=1e-4)
        assert loss != pytest.approx(losses[False][path], rel=1e-4)


def test_the_search_uses_balanced_accuracy(uneven):
    net = new_net()
    accuracies = SupernetAccuracies(net, uneven, SearchSettings(bn_images=1000), 0, "fp32")(PATHS)
    images, labels = uneven.val.eval_batch()
    assert accuracies == pytest.approx([by_hand(new_net(), path, images, labels)[1] for path in PATHS])


def test_rare_classes_make_a_balanced_accuracy_as_uncertain_as_fewer_images_would(uneven):
    evaluator = SupernetAccuracies(new_net(), uneven, SearchSettings(), 0, "fp32")
    assert evaluator.images == pytest.approx(
        9 / (1 / 19 + 1 / 3 + 1 / 4)
    )  # variances p (1 - p) / n of the classes add up
    plain = SupernetAccuracies(new_net(), replace(uneven, class_weights=None), SearchSettings(), 0, "fp32")
    assert plain.images == 26


def test_the_best_of_several_networks_has_the_best_balanced_accuracy(uneven):
    measured = on_validation(new_network(), uneven)
    logits, labels = predict_logits(new_network(), uneven.val)
    assert measured["val_macro"] == macro_accuracy(logits.argmax(1) == labels, labels, 3)
    losses = F.cross_entropy(logits, labels, reduction="none")
    assert measured["val_loss"] == pytest.approx(np.mean([losses[labels == c].mean() for c in range(3)]), rel=1e-5)


def test_the_report_says_that_accuracies_are_averaged_over_classes(tmp_path):
    photos = paint(tmp_path / "photos", {"a": 40, "b": 9, "c": 12}, size=(10, 9))
    for weights, sentence in (("balanced", True), ("none", False)):
        chosen = {**DATA, "source": str(photos), "class_weights": weights}
        config = Config(name="tiny", space=tiny_space(), data=chosen, train={**SETTINGS, "max_epochs": 1})
        run = tmp_path / weights
        train_stage(config, run, console())
        limits = {"macs": (["60K"], None), "params": (None, None), "latency_ms": (None, None)}
        few = SearchSettings(population=3, generations=2)
        search_stage(run, make_requests(run, limits, "evolution", (), True, None, [], None, few), None, console())
        metric = json.loads((run / "searches" / "macs-60K" / "search.json").read_text()).get("metric")
        assert metric == ("balanced accuracy" if sentence else None)
        page = write_report(run).read_text()
        assert ("on validation images, averaged over classes" in page) == sentence
        assert ("accuracies that are means over classes" in page) == sentence


def test_equal_balanced_accuracies_are_equal_to_the_last_digit(uneven):
    """A network that always predicts the same class has a balanced accuracy of one third, whatever the class."""
    net, accuracies = new_net(), []
    settings = SearchSettings(bn="running", bn_images=100)
    for answer in range(3):
        torch.nn.init.zeros_(net.classifier.weight)
        net.classifier.bias.data = torch.eye(net.space.num_classes)[answer]
        accuracies += evaluate_on_validation(net, PATHS, uneven, settings).accuracies.tolist()
    assert accuracies == [round(1 / 3, 12)] * 9
