"""Tests of the evaluation of paths on the validation images of a run: counts, random draws, and stored accuracies."""

import numpy as np
import pytest

from greedynas import CandidatePool, GreedyNASError
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.settings import SearchSettings, TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.validation import FilterLosses, SupernetAccuracies
from greedynas.runtime.rng import stream
from tests.helpers.training import SETTINGS, new_net

pytestmark = pytest.mark.usefixtures("one_thread")
PATHS = [(0, 0, 0, 0), (1, 2, 1, 0), (2, 1, 0, 2)]


def losses_of(data, draws=0, step=0, net=None, **changes):
    state = TrainState(CandidatePool(6), draws=draws, step=step)
    return FilterLosses(net or new_net(), data, TrainSettings(**{**SETTINGS, **changes}), 7, state, "fp32")


@pytest.mark.parametrize(("bn", "each"), [("batch", 6), ("running", 6), ("recalibrate", 6 + 16)])
def test_images_of_distinct_paths_are_counted(data, bn, each):
    losses = losses_of(data, bn=bn)
    assert losses.images == 0  # images are read on the first call
    losses(PATHS)
    assert losses.images == 3 * each
    losses([PATHS[0], PATHS[1], PATHS[0]])
    assert losses.images == 5 * each


def test_calibration_images_are_limited_to_the_training_images(data):
    losses = losses_of(data, bn="recalibrate", calibration_images=1000)
    losses(PATHS[:1])
    assert losses.images == 6 + len(data.train)


def test_all_calls_of_a_draw_use_the_same_images_and_another_draw_uses_others(data):
    net = new_net()
    first, again, other = (losses_of(data, draws, net=net) for draws in (3, 3, 4))
    whole = first(PATHS)
    assert [first([path])[0] for path in PATHS] == pytest.approx(whole)
    assert again(PATHS) == whole
    assert other(PATHS) != pytest.approx(whole)
    images, labels = data.val.eval_batch(data.val.balanced(6, stream(7, "filter images", 3)))
    expected = evaluate_paths(net, PATHS, images, labels, bn_images=6).losses
    assert whole == pytest.approx(expected.tolist())


def test_the_error_for_broken_weights_names_the_step(data):
    net = new_net()
    net.classifier.bias.data.fill_(np.nan)
    with pytest.raises(GreedyNASError, match="at step 31 on path 1210"):
        losses_of(data, step=31, net=net)(PATHS[1:])


def test_accuracies_are_of_all_validation_images_and_computed_once(data, monkeypatch):
    net, settings = new_net(), SearchSettings(bn_images=6)
    accuracies = SupernetAccuracies(net, data, settings, 0, "fp32")
    asked, evaluate = [], accuracies.evaluate
    monkeypatch.setattr(accuracies, "evaluate", lambda paths: asked.append(list(paths)) or evaluate(paths))
    images, labels = data.val.eval_batch(np.arange(len(data.val)))
    expected = evaluate_paths(net, PATHS, images, labels, bn_images=6).accuracies.tolist()
    assert accuracies(PATHS[:2]) == expected[:2]
    assert accuracies(PATHS[::-1]) == expected[::-1]
    assert accuracies([]) == []
    assert asked == [PATHS[:2], PATHS[2:]]
    assert accuracies.known == dict(zip(PATHS, expected, strict=True))
    assert (accuracies.images, accuracies.supernets) == (12, 1)


def test_a_copy_with_other_settings_has_no_stored_accuracies(data):
    accuracies = SupernetAccuracies(new_net(), data, SearchSettings(bn="running"), 0, "fp32")
    accuracies(PATHS)
    other = accuracies.with_settings(SearchSettings(bn="recalibrate", calibration_images=9), 0)
    assert (other.known, len(other.calibration), other.settings.bn) == ({}, 9, "recalibrate")
    assert (accuracies.calibration, accuracies.settings.bn) == (None, "running")
    assert set(accuracies.known) == set(PATHS)
