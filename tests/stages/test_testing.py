"""Tests of the content of `test.json`, whose numbers are counted again image by image."""

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from greedynas.data.transforms import denormalised, normalisation
from greedynas.rundir.schemas import Tested, unpack_bits
from greedynas.stages import testing
from greedynas.stages.testing import assess, predict_logits, top_accuracy
from tests.helpers.pictures import opened, paint


class Opinionated(nn.Module):
    """A random linear classifier of the pixels, with logits that are far apart."""

    def __init__(self, classes, size=8):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(3 * size * size, classes, generator=generator))

    def forward(self, images):
        return images.flatten(1) @ self.weight


def images_of(folder, counts, **settings):
    return opened(paint(folder, counts), 8, 3, **settings)


def rank_of_truth(network, images):
    """Return for each image the number of classes that the network prefers to the true one."""
    ranks = []
    for i in range(len(images)):
        picture, label = images.eval_batch([i])
        logits = network(picture)[0].tolist()
        ranks.append(sum(logit > logits[int(label)] for logit in logits))
    return np.array(ranks)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Return pictures of seven classes with different numbers of images: 9 of the first, 15 of the last."""
    counts = {letter: 9 + i for i, letter in enumerate("abcdefg")}
    return images_of(tmp_path_factory.mktemp("seven"), counts, val_images=7, test_images=7).train_and_val()


def test_top_1_and_top_5_are_counted_image_by_image(many):
    network = Opinionated(7)
    ranks = rank_of_truth(network, many)
    test = assess(network, many, list("abcdefg"), seed=0)
    assert test["images"] == len(many) == len(ranks)
    assert test["top1"] == pytest.approx((ranks < 1).mean())
    assert test["top5"] == pytest.approx((ranks < 5).mean())
    assert 0 < test["top1"] < (ranks < 4).mean() < test["top5"] < (ranks < 6).mean() < 1
    logits, labels = predict_logits(network, many)
    assert [top_accuracy(logits, labels, k) for k in range(1, 8)] == pytest.approx(
        [(ranks < k).mean() for k in range(1, 8)]
    )


@pytest.mark.parametrize(("classes", "has_top5"), [("abcde", False), ("abcdef", True)])
def test_top_5_is_given_for_more_than_five_classes(tmp_path, classes, has_top5):
    images = images_of(tmp_path, dict.fromkeys(classes, 4), val_images=len(classes), test_images=len(classes)).train
    assert (assess(Opinionated(len(classes)), images, list(classes), seed=0)["top5"] is not None) == has_top5


def test_all_images_are_evaluated_once_in_chunks(many, monkeypatch):
    monkeypatch.setattr(testing, "CHUNK", 10)
    network, seen = Opinionated(7), []
    network.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    network.train()
    logits, labels = predict_logits(network, many)
    assert max(seen) == 10
    assert sum(seen) == len(many)
    assert not network.training
    assert torch.equal(labels, many.labels)
    torch.testing.assert_close(logits, network(many.eval_batch()[0]).detach())


def test_the_rows_of_the_confusion_matrix_are_the_true_classes(many):
    network = Opinionated(7)
    test = assess(network, many, list("abcdefg"), seed=0)
    counted = np.zeros((7, 7), int)
    for i in range(len(many)):
        picture, label = many.eval_batch([i])
        counted[int(label), int(network(picture).argmax())] += 1
    assert test["confusion"] == counted.tolist()
    assert counted.tolist() != counted.T.tolist()
    rates = counted.diagonal() / counted.sum(1)
    assert test["per_class"] == pytest.approx(rates.tolist())
    assert test["macro"] == pytest.approx(rates.mean())
    assert abs(test["macro"] - test["top1"]) > 1e-3
    assert test["class_names"] == list("abcdefg")


def test_samples_are_random_images_and_the_most_confident_mistakes(many):
    network = Opinionated(7)
    samples = assess(network, many, list("abcdefg"), seed=0)["samples"]
    assert len(samples) == 24
    pictures, labels = many.eval_batch()
    probabilities = network(pictures).softmax(1).detach()
    confidence, predicted = probabilities.max(1)
    shown = [_place(sample, pictures) for sample in samples]
    assert len(set(shown)) == 24
    for place, sample in zip(shown, samples, strict=True):
        assert (sample["label"], sample["predicted"]) == (int(labels[place]), int(predicted[place]))
        assert sample["probability"] == pytest.approx(float(confidence[place]))
        best = probabilities[place].argsort(descending=True)[:5].tolist()
        assert [k for k, _ in sample["top"]] == best
        assert [p for _, p in sample["top"]] == pytest.approx(probabilities[place][best].tolist())
    # After twelve random images come the mistakes among the others, the most confident first.
    others = [i for i in range(len(many)) if i not in shown[:12] and predicted[i] != labels[i]]
    assert shown[12:] == sorted(others, key=lambda i: -float(confidence[i]))[:12]
    again, other = (assess(network, many, list("abcdefg"), seed=seed)["samples"] for seed in (0, 1))
    assert again == samples
    assert other[:12] != samples[:12]


def _place(sample, pictures):
    """Return the index of the image that a sample shows, the one with the same pixels."""
    head, data = sample["image"].split(",")
    assert head == "data:image/png;base64"
    shown = torch.from_numpy(np.array(Image.open(io.BytesIO(base64.b64decode(data)))))
    found = (
        (denormalised(pictures, *normalisation(pictures.shape[1])) == shown).all((1, 2, 3)).nonzero().flatten().tolist()
    )
    assert len(found) == 1
    return found[0]


class DataOptions(nn.Module):
    """A network that knows the class of each picture except those with a given wrong answer."""

    def __init__(self, images, wrong):
        super().__init__()
        self.pictures, labels = images.eval_batch()
        labels[wrong] = (labels[wrong] + 1) % 2
        self.logits = nn.functional.one_hot(labels, 2).float() * torch.linspace(1, 2, len(labels))[:, None]

    def forward(self, images):
        places = [(self.pictures == image).all((1, 2, 3)).nonzero().item() for image in images]
        return self.logits[places]


def test_correct_images_are_not_shown_as_mistakes(tmp_path):
    images = images_of(tmp_path, {"a": 20, "b": 20}, val_images=2, test_images=2).train
    none, few = (assess(DataOptions(images, wrong), images, ["a", "b"], seed=0) for wrong in ([], [3, 7, 11]))
    assert (none["top1"], len(none["samples"])) == (1, 12)
    mistakes = [sample for sample in few["samples"] if sample["label"] != sample["predicted"]]
    assert len(mistakes) == 3
    assert all(sample["label"] != sample["predicted"] for sample in few["samples"][12:])
    assert 12 < len(few["samples"]) <= 15


def test_grey_images_are_shown_in_grey(tmp_path):
    images = opened(paint(tmp_path, {"a": 4, "b": 4}), 8, 1, val_images=2, test_images=2).val
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    sample = assess(network, images, ["a", "b"], seed=0)["samples"][0]
    picture = Image.open(io.BytesIO(base64.b64decode(sample["image"].split(",")[1])))
    assert (picture.mode, picture.size) == ("L", (8, 8))


def test_few_images_are_all_shown(tmp_path):
    images = images_of(tmp_path, {"a": 4, "b": 4}, val_images=2, test_images=2).val
    assert len(assess(Opinionated(2), images, ["a", "b"], seed=0)["samples"]) == 2


def test_a_class_without_images_has_no_accuracy(tmp_path):
    paint(tmp_path / "train", {"a": 4, "b": 4})
    paint(tmp_path / "test", {"b": 3}, first=1)
    test = assess(Opinionated(2), opened(tmp_path, 8, 3, val_images=2).test(), ["a", "b"], seed=0)
    assert test["per_class"][0] is None
    assert test["per_class"][1] == pytest.approx(test["top1"]) == pytest.approx(test["macro"])


def test_large_images_are_shown_small(tmp_path):
    images = opened(paint(tmp_path, {"a": 4, "b": 4}, size=(140, 140)), 120, 3, val_images=2, test_images=2).val
    sample = assess(Opinionated(2, 120), images, ["a", "b"], seed=0)["samples"][0]
    assert Image.open(io.BytesIO(base64.b64decode(sample["image"].split(",")[1]))).size == (96, 96)


def test_the_report_can_read_which_images_are_correct(many):
    network = Opinionated(7)
    test = assess(network, many, list("abcdefg"), seed=0)
    right = rank_of_truth(network, many) == 0
    assert unpack_bits(test["correct"], len(many)).tolist() == right.tolist()
    assert Tested.model_validate_json(json.dumps(test)).images == len(many)
