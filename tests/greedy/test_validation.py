"""Tests of the evaluation of paths on the validation images of a run: counts, random draws, and stored accuracies."""

import numpy as np
import pytest
import torch

from greedynas import CandidatePool, GreedyNASError
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.settings import SearchSettings, TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.validation import BEST, LARGEST, FilterLosses, SupernetAccuracies, watch_accuracy
from greedynas.models.batchnorm import BN_MODES
from greedynas.runtime.rng import stream
from greedynas.spaces.paths import most_expensive
from tests.helpers.supernet import with_lively_statistics
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_filtering_evaluates_as_its_settings_say(data, precision):
    net, state = new_net(), TrainState(CandidatePool(6), draws=3)
    losses = FilterLosses(net, data, TrainSettings(**{**SETTINGS, "bn_images": 3}), 7, state, precision)
    images, labels = data.val.eval_batch(data.val.balanced(6, stream(7, "filter images", 3)))

    def expected(bn_images, precision):
        return evaluate_paths(net, PATHS, images, labels, bn_images=bn_images, precision=precision)

    assert losses(PATHS) == pytest.approx(expected(3, precision).losses.tolist(), rel=1e-6)
    assert losses.accuracies(PATHS) == expected(3, precision).accuracies.tolist()
    for other in (expected(6, precision), expected(3, "fp32" if precision == "bf16" else "bf16")):
        assert losses(PATHS) != pytest.approx(other.losses.tolist(), rel=1e-6)


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_search_evaluates_given_images_with_its_calibration_images(data, precision):
    net, rows = with_lively_statistics(new_net()), np.array([1, 4, 5, 9])
    settings = SearchSettings(bn="recalibrate", calibration_images=9)
    found = SupernetAccuracies(net, data, settings, 5, precision).evaluate(PATHS, rows)
    drawn = stream(5, "calibration images of the search").choice(len(data.train), 9, replace=False)
    how = {"calibration": data.train.eval_batch(drawn)[0], "precision": precision}
    expected = evaluate_paths(net, PATHS, *data.val.eval_batch(rows), "recalibrate", **how)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)


# The accuracy that people watch


POOL = [((0, 0, 0, 0), 0.5), ((1, 2, 1, 0), 0.25), ((2, 1, 0, 2), 0.75)]


def watched(net, data, epoch, pool=(), precision="fp32", **changes):
    """Return the state after a look at the accuracy; it had 100 evaluated images before."""
    state = TrainState(CandidatePool(6), epoch=epoch, evaluation_images=100)
    for path, loss in pool:
        state.pool.update(path, loss)
    settings = TrainSettings(**{**SETTINGS, "accuracy_images": 8, **changes})
    watch_accuracy(net, data, settings, 7, state, precision)
    return state


@pytest.mark.parametrize("pool", [(), POOL])
@pytest.mark.parametrize("bn", BN_MODES.names())
def test_the_watched_accuracy_is_that_of_the_best_path_of_the_pool(data, bn, pool):
    net = with_lively_statistics(new_net())
    path, name = ((1, 2, 1, 0), BEST) if pool else (most_expensive(net.space), LARGEST)
    for epoch in range(12):  # accuracies on eight images agree by chance, but not in every epoch
        state = watched(net, data, epoch, pool, bn=bn)
        calibration = None
        if bn == "recalibrate":
            rng = stream(7, "calibration images of the accuracy", epoch)
            calibration, _ = data.train.eval_batch(rng.choice(len(data.train), 16, replace=False))
        images, labels = data.val.eval_batch(data.val.balanced(8, stream(7, "accuracy images", epoch)))
        expected = evaluate_paths(net, [path], images, labels, bn, bn_images=8, calibration=calibration)
        assert (state.accuracy, state.accuracy_of) == (expected.accuracies[0], name)
        assert state.evaluation_images == 100 + 8 + (16 if bn == "recalibrate" else 0)


@pytest.mark.parametrize(("bn_images", "batch_size", "together"), [(3, 10, 8), (10, 3, 8), (2, 4, 4), (4, 2, 4)])
def test_as_many_images_as_filtering_or_a_step_has_share_statistics(data, bn_images, batch_size, together):
    net = with_lively_statistics(new_net())
    for epoch in range(12):
        state = watched(net, data, epoch, bn_images=bn_images, batch_size=batch_size)
        images, labels = data.val.eval_batch(data.val.balanced(8, stream(7, "accuracy images", epoch)))
        parts = [(images[i :: 8 // together], labels[i :: 8 // together]) for i in range(8 // together)]
        path = [most_expensive(net.space)]
        expected = np.mean([evaluate_paths(net, path, *part, bn_images=8).accuracies[0] for part in parts])
        assert state.accuracy == pytest.approx(expected)


def test_the_watched_accuracy_takes_no_more_images_than_there_are(data):
    assert watched(new_net(), data, 1, accuracy_images=1000).evaluation_images == 100 + len(data.val)
    nothing = watched(new_net(), data, 1, accuracy_images=0)
    assert (nothing.accuracy, nothing.evaluation_images) == (None, 100)


def test_the_watched_accuracy_has_the_precision_of_evaluations(data):
    seen, net = [], new_net()
    net.classifier.register_forward_pre_hook(lambda module, given: seen.append(torch.is_autocast_enabled("cpu")))
    watched(net, data, 1, precision="fp32")
    watched(net, data, 1, precision="bf16")
    assert seen == [False, True]
