"""Tests of `experimental.snapshots`: paths are evaluated on several supernets of one training."""

import hashlib
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save as save_file

from greedynas.experimental.snapshots import snapshot_steps
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.validation import SupernetAccuracies
from greedynas.jobs.estimates import _search
from greedynas.rundir.checkpoints import read_checkpoint
from greedynas.settings.experiments import hooks_of
from greedynas.settings.schema import Config
from greedynas.stages import search
from greedynas.stages.run import Run
from greedynas.stages.trained_supernet import load_supernet
from greedynas.studies.supernets import load_trained, rank_paths
from tests.helpers.snapshots import FOUR, PATHS, checkpoints, killed_and_resumed, plain_accuracies
from tests.helpers.training import SETTINGS, recorded, same_tensors, snapshot, tiny_space, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(data, tmp_path):
    recorded(tmp_path / "run", data, **FOUR)
    return tmp_path / "run"


def configured(snapshots=4, **settings):
    """Return the settings of `run` with evaluation in full precision."""
    train, several = {**SETTINGS, "max_epochs": FOUR["max_epochs"], **settings}, {"snapshots": snapshots}
    fixed = {"name": "tiny", "space": tiny_space(), "device": "cpu", "eval_precision": "fp32"}
    return Config(**fixed, train=train, experimental=several)


def steps_of(config, data):
    return hooks_of(config.experimental).lasting_steps(Schedule(config.train, len(data.train)))


@given(st.integers(1, 40), st.integers(1, 500), st.integers(0, 60), st.integers(1, 12))
def test_snapshots_are_evenly_spaced_from_warm_up_to_the_end(epochs, images, warmup, count):
    settings = TrainSettings(**{**SETTINGS, "max_epochs": epochs, "warmup": warmup})
    schedule = Schedule(settings, images)
    steps = sorted(snapshot_steps(schedule, count))
    assert len(steps) < count
    assert all(min(warmup, schedule.steps) <= step < schedule.steps for step in steps)
    if schedule.steps - warmup >= count:
        gaps = np.diff([warmup, *steps, schedule.steps])
        assert len(gaps) == count
        assert gaps.max() - gaps.min() <= 1


def test_snapshots_are_taken_at_equal_distances_after_warm_up():
    def snapshots(count, images=100, **settings):
        return sorted(snapshot_steps(Schedule(TrainSettings(max_epochs=10, batch_size=10, **settings), images), count))

    assert snapshots(3, warmup=10) == [40, 70]
    assert snapshots(1, warmup=10) == []
    assert snapshots(20, images=10, warmup=0) == list(range(1, 10))  # not before the first step
    assert snapshots(2, warmup=200) == []


def test_the_checkpoints_of_snapshots_are_kept(data, run):
    steps = len(data.train) // SETTINGS["batch_size"] * FOUR["max_epochs"]
    expected = sorted(steps_of(configured(), data))
    assert len(expected) == 3
    assert list(checkpoints(run)) == [*expected, steps]


def test_training_itself_does_not_change(data, run):
    plain, _ = train(data, max_epochs=FOUR["max_epochs"])
    weights, _ = read_checkpoint(list(checkpoints(run).values())[-1])
    trained = {name.removeprefix("net."): tensor for name, tensor in weights.items() if name.startswith("net.")}
    assert same_tensors(plain.state_dict(), trained)


def test_a_killed_training_keeps_the_same_snapshots(data, run, tmp_path, monkeypatch):
    """It is killed between two snapshots, and right after one."""
    for stop_after in (checkpoints(run).keys() - {max(checkpoints(run))}) | {max(checkpoints(run)) - 1}:
        folder = tmp_path / f"killed-{stop_after}"
        killed_and_resumed(folder, data, stop_after, monkeypatch, **FOUR)
        assert list(checkpoints(folder)) == list(checkpoints(run))
        for step, file in checkpoints(folder).items():
            assert same_tensors(read_checkpoint(file)[0], read_checkpoint(checkpoints(run)[step])[0])


def test_search_and_studies_average_over_all_snapshots(data, run):
    each = [plain_accuracies(data, file) for file in checkpoints(run).values()]
    assert len(each) == 4
    assert np.ptp(each, axis=0).max() > 0  # the snapshots must differ
    config = configured()
    with Run.open(run) as opened:
        opened.check_data(data)
        net, state, _, _ = load_supernet(opened, config, data)
        plain = SupernetAccuracies(net, data, config.search, 0, "fp32")
        schedule = Schedule(config.train, len(data.train))
        accuracies = hooks_of(config.experimental).accuracies(plain, opened.supernet, schedule, state.step)
    before = snapshot(net)
    np.testing.assert_allclose(accuracies(PATHS), np.mean(each, axis=0))
    np.testing.assert_allclose(plain(PATHS), each[-1])
    assert same_tensors(net.state_dict(), before)
    trained = load_trained(run, config, data)
    result, _ = rank_paths(trained, PATHS)
    np.testing.assert_allclose(result.accuracies, np.mean(each, axis=0))
    assert result.images == 4 * len(PATHS) * len(data.val)
    last = load_trained(run, config, data, list(checkpoints(run).values())[-1])  # a named checkpoint is one supernet
    np.testing.assert_allclose(rank_paths(last, PATHS)[0].accuracies, each[-1])


def test_a_damaged_snapshot_is_skipped_with_a_warning(data, run, caplog):
    files = list(checkpoints(run).values())
    files[1].write_bytes(files[1].read_bytes()[:-1])
    trained = load_trained(run, configured(), data)
    assert len(trained.accuracies.earlier) == 2
    assert files[1].name in caplog.text
    expected = np.mean([plain_accuracies(data, file) for file in (files[0], *files[2:])], axis=0)
    np.testing.assert_allclose(rank_paths(trained, PATHS)[0].accuracies, expected)


# With an alpha of 1, training stops at the end of the first epoch with a full pool, which is the step of a snapshot.
STOPPED = {**FOUR, "stopping": True, "alpha": 1.0}


def test_a_training_that_stops_at_a_snapshot_counts_its_last_step_once(data, tmp_path):
    recorded(tmp_path / "run", data, **STOPPED)
    config, files = configured(stopping=True, alpha=1.0), checkpoints(tmp_path / "run")
    assert max(files) in steps_of(config, data)
    assert len(files) == 2
    expected = np.mean([plain_accuracies(data, file) for file in files.values()], axis=0)
    trained = load_trained(tmp_path / "run", config, data)
    result, _ = rank_paths(trained, PATHS)
    np.testing.assert_allclose(result.accuracies, expected)
    assert result.images == 2 * len(PATHS) * len(data.val)
    # The search in the same run
    limits = dict.fromkeys(("macs", "params", "latency_ms"), (None, None))
    few = ["population=2", "generations=1"]
    requests = search.make_requests(tmp_path / "run", limits, "random", (), True, None, few, None)
    (found,) = search.search_stage(tmp_path / "run", requests, None, Console(file=io.StringIO()), data)
    assert (found["supernet_step"], found["supernets"]) == (max(files), 2)


def test_the_last_complete_checkpoint_counts_once_if_the_newest_is_damaged(data, run):
    *earlier, newest = checkpoints(run).values()
    newest.write_bytes(newest.read_bytes()[:-1])
    trained = load_trained(run, configured(), data)
    assert len(trained.accuracies.earlier) == len(earlier) - 1
    expected = np.mean([plain_accuracies(data, file) for file in earlier], axis=0)
    np.testing.assert_allclose(rank_paths(trained, PATHS)[0].accuracies, expected)


def test_two_checkpoints_of_a_step_count_once(data, run):
    """A crash after writing a checkpoint and before removing the one that it replaces leaves both."""
    tensors, state = read_checkpoint(list(checkpoints(run).values())[1])
    before = len(load_trained(run, configured(), data).accuracies.earlier)
    twice = save_file(tensors, {"state": json.dumps({**state, "seconds": 12345.0})})
    digest = hashlib.sha256(twice).hexdigest()[:16]
    (run / "supernet" / f"step-{state['step']:09d}-{digest}.safetensors").write_bytes(twice)
    assert len(load_trained(run, configured(), data).accuracies.earlier) == before == 3


def test_the_estimate_counts_snapshots(data):
    from types import SimpleNamespace

    pace = SimpleNamespace(evaluation=0.5)
    plain, several = (_search(configured(snapshots=n), data, pace, 1) for n in (1, 4))
    assert several.seconds == 4 * plain.seconds
    assert several.evaluation_images == 4 * plain.evaluation_images
    assert several.what.endswith("and 4 supernets")
