import math

import pytest

from greedynas import load_space
from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.schedule import Schedule, corrected_images, epochs_within, supplement_corrected_images
from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.state import TrainState
from greedynas.greedy.stopping import update_novelty, why_stop


def test_the_numbers_of_the_supplement():
    assert round(supplement_corrected_images() / 1e6, 1) == 89.7


def test_the_prediction_for_the_imagenet_preset():
    schedule = Schedule(TrainSettings(), 1_231_167)
    assert schedule.steps_per_epoch == 1202
    assert schedule.warmup == 10_000
    optimization, evaluation = schedule.predicted_images(46)
    assert round(corrected_images(optimization, evaluation) / 1e6, 1) == 83.8


def test_learning_rate_is_a_cosine_over_max_epochs():
    schedule = Schedule(TrainSettings(max_epochs=10, batch_size=10), 100)
    assert schedule.steps == 100
    assert schedule.lr(0) == pytest.approx(0.12)
    assert schedule.lr(50) == pytest.approx(0.06)
    assert schedule.lr(25) == pytest.approx(0.06 * (1 + math.cos(math.pi / 4)))
    assert 0 < schedule.lr(99) < 1e-4


def test_learning_rate_ends_at_a_share_of_the_initial_one():
    schedule = Schedule(TrainSettings(max_epochs=10, batch_size=10, lr=0.2, lr_end=0.5), 100)
    assert schedule.lr(0) == pytest.approx(0.2)
    assert schedule.lr(50) == pytest.approx(0.15)
    assert schedule.lr(99) == pytest.approx(0.1, abs=1e-4)
    constant = Schedule(TrainSettings(max_epochs=10, batch_size=10, lr=0.2, lr_end=1), 100)
    assert {constant.lr(step) for step in range(100)} == {0.2}


def test_learning_rate_warms_up():
    def rates(**more):
        schedule = Schedule(TrainSettings(max_epochs=10, batch_size=10, lr=0.2, **more), 100)
        return [schedule.lr(step) for step in range(100)]

    constant = rates(lr_end=1.0, lr_warmup=0.1)
    assert constant[:3] == pytest.approx([0.2 / 11, 0.4 / 11, 0.6 / 11])
    assert constant[10:] == pytest.approx([0.2] * 90)
    cosine, without = rates(lr_warmup=0.1), rates()
    assert cosine[10:] == without[10:]
    assert all(slow < fast for slow, fast in zip(cosine[:10], without, strict=False))


def test_epsilon_rises_from_the_end_of_warm_up_to_the_last_step():
    schedule = Schedule(TrainSettings(max_epochs=10, batch_size=10, warmup=20), 100)
    assert schedule.epsilon(0) == schedule.epsilon(20) == 0
    assert schedule.epsilon(99) == pytest.approx(0.8)
    assert schedule.epsilon(60) - schedule.epsilon(40) == pytest.approx(schedule.epsilon(80) - schedule.epsilon(60))
    off = Schedule(TrainSettings(max_epochs=10, batch_size=10, warmup=20, pool_sampling=False), 100)
    assert off.epsilon(99) == 0


def test_epsilon_with_few_steps_after_warm_up():
    def epsilon(warmup, step):
        return Schedule(TrainSettings(max_epochs=10, batch_size=10, warmup=warmup), 100).epsilon(step)

    assert (epsilon(98, 98), epsilon(98, 99)) == (0, pytest.approx(0.8))
    assert (epsilon(99, 99), epsilon(99, 100)) == (0, pytest.approx(0.8))


def test_an_epoch_has_at_least_one_step():
    schedule = Schedule(TrainSettings(max_epochs=3, batch_size=10), 7)
    assert (schedule.steps_per_epoch, schedule.steps) == (1, 3)
    assert schedule.predicted_images()[0] == 3 * 7


def test_predicted_images_are_counted_step_by_step():
    """The expected numbers come from a loop over the steps; the paths of a filtering last for k steps."""
    for warmup, k, filtering in ((7, 3, True), (4, 3, True), (0, 1, False), (9, 1, True), (0.3, 4, True)):
        settings = TrainSettings(
            max_epochs=4, batch_size=10, warmup=warmup, m=6, k=k, filtering=filtering,
            filter_images=20, bn="recalibrate", calibration_images=30,
        )  # fmt: skip
        schedule = Schedule(settings, 100)
        filterings = [0]  # counted before each step
        waiting = 0
        for step in range(40):
            due = schedule.filters(step) and waiting == 0
            waiting = k - 1 if due else max(waiting - 1, 0)
            filterings.append(filterings[-1] + due)
        assert [schedule.filterings(steps) for steps in range(41)] == filterings
        paths = 6 if filtering else k
        assert schedule.predicted_images(3) == (300, filterings[30] * paths * (20 + 30))
        assert schedule.predicted_images() == (400, filterings[40] * paths * (20 + 30))
        batch = Schedule(settings.model_copy(update={"bn": "batch"}), 100)
        assert batch.predicted_images() == (400, filterings[40] * paths * 20)
        few = Schedule(settings.model_copy(update={"calibration_images": 300}), 100)
        assert few.predicted_images() == (400, filterings[40] * paths * (20 + 100))


def test_predicted_images_of_uniform_and_fair_sampling():
    uniform, fair = (Schedule(TrainSettings(max_epochs=4, batch_size=10, sampler=s), 100) for s in ("uniform", "fair"))
    assert uniform.predicted_images(space=load_space("macro")) == (400, 0)
    assert fair.predicted_images(space=load_space("macro")) == (1200, 0)
    assert fair.predicted_images() == (400, 0)


@pytest.mark.parametrize("epochs", [1, 2, 3, 8])
def test_the_exact_cost_of_some_epochs_allows_that_number(epochs):
    settings = TrainSettings(batch_size=10, sampler="uniform")
    assert epochs_within(settings, 100, epochs * 100, load_space("macro")) == epochs
    assert epochs_within(settings, 100, epochs * 100 - 1, load_space("macro")) == epochs - 1


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (17, 17), (0.25, 25), (0.0, 0), (1.0, 100)])
def test_warm_up_is_given_in_steps_or_as_a_share(warmup, steps):
    schedule = Schedule(TrainSettings(max_epochs=10, batch_size=10, warmup=warmup), 100)
    assert schedule.warmup == steps
    assert not schedule.filters(steps - 1)
    assert schedule.filters(steps)


def test_switches_that_need_the_losses_of_paths():
    def filters(**settings):
        return Schedule(TrainSettings(warmup=0, **settings), 10_000).filters(0)

    assert filters()
    assert filters(filtering=False)  # the pool still needs them
    assert not filters(filtering=False, pool_sampling=False, stopping=False)
    assert not filters(sampler="uniform")
    assert not filters(sampler="fair")


def history(stopping=True):
    """Return the pools of size 4 at the ends of epochs, and the epoch after which training stops."""
    settings = TrainSettings(pool_size=5, alpha=0.2, stopping=stopping, max_epochs=6)
    pool = CandidatePool(5)
    state = TrainState(pool)
    paths_by_epoch = [
        [0, 1],
        [0, 1],
        [2, 3, 4],
        [5, 6],
        [7],
        [8],
    ]  # losses decrease, so new paths replace others
    stopped_at = None
    for epoch, names in enumerate(paths_by_epoch, 1):
        for name in names:
            pool.update((name,), 10.0 - name)
        state.epoch = epoch
        update_novelty(state)
        assert state.previous_pool == sorted(pool)
        if stopped_at is None and why_stop(state, settings) is not None:
            stopped_at = epoch, state.novelty
    return stopped_at


def test_training_stops_in_the_epoch_where_the_pool_is_steady_and_not_before_it_is_full():
    # Epoch 2 brings nothing new, but the pool is not full; 3 fills it (3/5 new), 4 brings 2/5, 5 one of five: 0.2.
    assert history() == (5, pytest.approx(0.2))


def test_without_stopping_training_runs_to_the_end():
    assert history(stopping=False)[0] == 6
