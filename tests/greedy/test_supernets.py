"""Several supernets one after the other in one training (`train.supernets`)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.schedule import Schedule, epochs_within
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.steps import TrainingStep, make_optimizer
from greedynas.greedy.stopping import why_stop
from greedynas.greedy.training import begin_anew
from greedynas.jobs.estimates import _supernet
from greedynas.models.ema import AveragedWeights
from greedynas.rundir.checkpoints import read_checkpoint
from greedynas.settings.schema import Config
from greedynas.studies.supernets import load_trained, rank_paths
from tests.helpers.graphs import Recorded
from tests.helpers.snapshots import PATHS, checkpoints, killed_and_resumed, plain_accuracies
from tests.helpers.training import SETTINGS, new_net, recorded, rows_of, same_tensors, tiny_space, train

pytestmark = pytest.mark.usefixtures("one_thread")

TWO = {"supernets": 2, "max_epochs": 6, "warmup": 0.25, "checkpoint_steps": 1, "keep_checkpoints": 1000}


def weights_of(file, prefix="net."):
    tensors, _ = read_checkpoint(file)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# What is due when


@given(
    epochs=st.integers(1, 40),
    count=st.integers(1, 6),
    images=st.integers(1, 300),
    warmup=st.one_of(st.floats(0, 1), st.integers(0, 50)),
    snapshots=st.integers(1, 4),
)
def test_each_supernet_has_the_schedule_of_a_training_of_its_own(epochs, count, images, warmup, snapshots):
    settings = TrainSettings(**{**SETTINGS, "warmup": warmup, "snapshots": snapshots})
    schedule = Schedule(settings.model_copy(update={"max_epochs": epochs, "supernets": count}), images)
    assert [step for steps in schedule.supernets for step in steps] == list(range(schedule.steps))
    lengths = [len(steps) // schedule.steps_per_epoch for steps in schedule.supernets]
    assert len(lengths) == min(count, epochs)
    assert max(lengths) - min(lengths) <= 1
    kept, predicted = set(), np.zeros(2, int)
    for steps, length in zip(schedule.supernets, lengths, strict=True):
        alone = Schedule(settings.model_copy(update={"max_epochs": length}), images)
        assert alone.steps == len(steps)
        for step in steps:
            mine = schedule.lr(step), schedule.epsilon(step), schedule.filters(step)
            assert mine == (alone.lr(i := step - steps.start), alone.epsilon(i), alone.filters(i))
        kept |= {steps.start + step for step in alone.snapshots} | {steps.stop}
        predicted += alone.predicted_images()
    assert schedule.snapshots == kept - {schedule.steps}
    assert schedule.predicted_images() == tuple(predicted)


def test_the_cost_of_several_warm_ups_is_counted():
    settings = TrainSettings(**{**SETTINGS, "warmup": 20, "supernets": 4, "filter_images": 100})
    corrected = 40_000.0
    affordable = epochs_within(settings, 1000, corrected, 3)
    costs = [
        Schedule(settings.model_copy(update={"max_epochs": affordable + more}), 1000).predicted_images()
        for more in (0, 1)
    ]
    assert costs[0][0] + costs[0][1] / 3.33 <= corrected < costs[1][0] + costs[1][1] / 3.33


def test_a_steady_pool_ends_the_last_supernet_alone():
    schedule = Schedule(TrainSettings(**{**SETTINGS, **TWO, "stopping": True}), 100)
    state = TrainState(CandidatePool(5), novelty=0.0)
    stops = []
    for state.epoch in range(1, 7):
        stops.append(why_stop(state, schedule) is not None)
    assert stops == [False] * 3 + [True] * 3


# Training


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("supernets") / "run"
    recorded(folder, data, **TWO)
    return folder


def test_the_first_is_that_of_a_training_of_its_own_and_the_second_another(data, run):
    alone, _ = train(data, **{**TWO, "supernets": 1, "max_epochs": 3})
    end, start = max(checkpoints(run)), max(checkpoints(run)) // 2
    assert same_tensors(alone.state_dict(), weights_of(checkpoints(run)[start]))
    longer, _ = train(data, **{**TWO, "supernets": 1})
    assert not same_tensors(longer.state_dict(), weights_of(checkpoints(run)[end]))


def test_the_second_starts_from_fresh_weights_without_memory(data, run):
    start = max(checkpoints(run)) // 2
    # After one step the ops that it did not train are as they were made, and another seed's than the first supernet's.
    one = weights_of(checkpoints(run)[start + 1])
    first = new_net().state_dict()
    weights = [name for name in one if name.startswith("layers.") and name.endswith("conv.weight")]
    assert not any(torch.equal(one[name], first[name]) for name in weights)
    momenta = weights_of(checkpoints(run)[start + 1], "momentum.")
    assert sum(not tensor.any() for tensor in momenta.values()) > len(momenta) / 4
    norms = weights_of(checkpoints(run)[start + 1])
    counted = [int(tensor) for name, tensor in norms.items() if name.endswith("num_batches_tracked")]
    assert set(counted) == {0, 1}


def test_the_pool_and_epsilon_start_again(run):
    rows = rows_of(run)["filter"]
    start = max(checkpoints(run)) // 2
    first, second = ([row for row in rows if (row["step"] >= start) == late] for late in (False, True))
    assert first[0]["pool_size"] == second[0]["pool_size"] == SETTINGS["k"]
    assert first[-1]["pool_size"] > SETTINGS["k"]
    assert first[0]["epsilon"] == second[0]["epsilon"] == 0
    assert [row["epsilon"] for row in first] == [row["epsilon"] for row in second]


def test_a_killed_training_goes_on_as_if_it_had_not_been(data, run, tmp_path, monkeypatch):
    """Killed right before the second begins, right after, and within it."""
    steps = max(checkpoints(run))
    for stop_after in (steps // 2, steps // 2 + 1, steps - 1):
        folder = tmp_path / f"killed-{stop_after}"
        killed_and_resumed(folder, data, stop_after, monkeypatch, **TWO)
        last = [weights_of(checkpoints(place)[steps]) for place in (folder, run)]
        assert same_tensors(*last)
        assert [row["pi"] for row in rows_of(folder)["epoch"]] == [row["pi"] for row in rows_of(run)["epoch"]]


def test_averages_do_not_remember_the_supernet_before(data, tmp_path):
    folder = tmp_path / "averaged"
    recorded(folder, data, **TWO, ema=0.9)
    steps = max(checkpoints(folder))
    after_one = checkpoints(folder)[steps // 2 + 1]
    live, averaged = weights_of(after_one), weights_of(after_one, "ema.")
    untrained = [name for name in averaged if torch.equal(live[name], averaged[name])]
    before = weights_of(checkpoints(folder)[steps // 2], "ema.")
    convolutions = [name for name in untrained if name.startswith("layers.") and name.endswith("conv.weight")]
    assert convolutions
    assert not any(torch.equal(before[name], averaged[name]) for name in convolutions)


def test_recorded_steps_are_told_of_the_fresh_weights(data, monkeypatch):
    Recorded.made = []
    monkeypatch.setattr("greedynas.greedy.steps.GraphedTraining", Recorded)
    monkeypatch.setattr("greedynas.greedy.steps.worth_recording", lambda images: True)
    train(data, **{**TWO, "supernets": 3})
    assert [recorder.refreshed for recorder in Recorded.made] == [2]


def test_all_stays_where_recorded_steps_write_it(data):
    net = new_net().train()
    settings = TrainSettings(**SETTINGS)
    optimizer = make_optimizer(net, settings)
    images, labels = data.train.eval_batch(np.arange(20))
    TrainingStep(net, optimizer, settings, None, "fp32")(images, labels, [PATHS[1]], 0.1)
    buffers = [memory["momentum_buffer"] for memory in optimizer.state.values()]
    assert any(buffer.any() for buffer in buffers)
    places = [tensor.data_ptr() for tensor in net.state_dict().values()]
    fresh = new_net()
    begin_anew(net, fresh, optimizer, AveragedWeights(net, 0), TrainState(CandidatePool(5)))
    assert not any(buffer.any() for buffer in buffers)
    assert same_tensors(net.state_dict(), fresh.state_dict())
    assert [tensor.data_ptr() for tensor in net.state_dict().values()] == places


def test_it_works_without_momentum(data):
    _, state = train(data, **{**TWO, "momentum": 0.0})
    assert state.epoch == TWO["max_epochs"]


# What comes after it


def test_search_and_studies_average_over_the_supernets(data, run):
    steps = max(checkpoints(run))
    ends = [plain_accuracies(data, checkpoints(run)[step]) for step in (steps // 2, steps)]
    config = Config(name="tiny", space=tiny_space(), train={**SETTINGS, **TWO}, device="cpu")
    trained = load_trained(run, config, data)
    trained.precision = "fp32"
    np.testing.assert_allclose(rank_paths(trained, PATHS)[0].accuracies, np.mean(ends, axis=0))


def test_the_plan_counts_them(data):
    pace = SimpleNamespace(step=0.5, waiting=0.0, filtering=2.0)
    config = Config(name="tiny", space=tiny_space(), train={**SETTINGS, **TWO}, device="cpu")
    stage = _supernet(config, data, pace)
    schedule = Schedule(config.train, len(data.train))
    assert stage.what.startswith("2 supernets, 6 epochs")
    assert stage.seconds == 0.5 * schedule.steps + 2.0 * schedule.filterings(schedule.steps)
