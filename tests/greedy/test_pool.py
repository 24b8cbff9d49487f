import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from greedynas.greedy.pool import CandidatePool
from tests.helpers.pool import Reference

PATHS = st.tuples(*[st.integers(0, 2)] * 3)
UPDATES = st.lists(st.tuples(PATHS, st.integers(0, 5).map(float) | st.floats(0, 10)), max_size=80)


@given(st.integers(1, 12), UPDATES)
def test_the_pool_equals_the_reference_after_every_update(size, updates):
    pool, reference = CandidatePool(size), Reference(size)
    for path, loss in updates:
        pool.update(path, loss)
        reference.update(path, loss)
        assert len(pool) <= size
        assert dict(pool.best()) == dict(reference.entries)
        assert set(pool) == {path for path, _ in reference.entries}
        assert [loss for _, loss in pool.best()] == sorted(loss for _, loss in reference.entries)
        assert pool.full == (len(reference.entries) == size)


def test_the_pool_equals_the_reference_over_thousands_of_updates():
    rng = np.random.default_rng(0)
    pool, reference = CandidatePool(50), Reference(50)
    for _ in range(5000):
        path, loss = tuple(rng.integers(0, 3, 4).tolist()), float(rng.integers(0, 1000))
        pool.update(path, loss)
        reference.update(path, loss)
        assert dict(pool.best()) == dict(reference.entries)


@pytest.mark.timed
def test_a_million_updates_take_a_few_seconds():
    rng = np.random.default_rng(0)
    paths = [tuple(path) for path in rng.integers(0, 7, (1_000_000, 5)).tolist()]
    losses = rng.random(1_000_000).tolist()
    pool = CandidatePool(1000)
    start = time.perf_counter()
    for path, loss in zip(paths, losses, strict=True):
        pool.update(path, loss)
    assert time.perf_counter() - start < 10
    assert len(pool) == 1000


@given(st.integers(1, 8), UPDATES, UPDATES)
def test_a_restored_pool_behaves_like_the_original(size, before, after):
    pool = CandidatePool(size)
    for path, loss in before:
        pool.update(path, loss)
    copy = CandidatePool.from_state(json.loads(json.dumps(pool.state())))
    for path, loss in after:
        pool.update(path, loss)
        copy.update(path, loss)
    assert copy.best() == pool.best()
    assert list(copy) == list(pool)  # sampling depends on the order
    if len(pool):
        assert copy.sample(np.random.default_rng(0)) == pool.sample(np.random.default_rng(0))


def test_a_restored_pool_knows_the_order_of_entry():
    """The newest of several paths with equal losses is removed, also if the others entered before saving."""
    pool = CandidatePool(3)
    for i in range(3):
        pool.update((i,), 1.0)
    pool = CandidatePool.from_state(json.loads(json.dumps(pool.state())))
    pool.update((3,), 1.0)
    assert list(pool) == [(0,), (1,), (2,)]
    pool.update((4,), 0.5)  # removes the newest of the three with the worst loss
    assert list(pool) == [(0,), (1,), (4,)]


def test_repeated_updates_take_no_more_memory():
    pool, rng = CandidatePool(5), np.random.default_rng(0)
    for i in range(2000):
        pool.update((i % 5,), rng.random())
    assert len(pool) == 5
    assert len(pool._heap) < 100


def test_best_losses_and_membership():
    pool = CandidatePool(4)
    for i, loss in enumerate([3.0, 1.0, 2.0, 1.0]):
        pool.update((i,), loss)
    assert pool.best(2) == [((1,), 1.0), ((3,), 1.0)]
    assert pool.best(0) == []
    assert pool.best() == [((1,), 1.0), ((3,), 1.0), ((2,), 2.0), ((0,), 3.0)]
    assert pool.losses() == [3.0, 1.0, 2.0, 1.0]
    assert (3,) in pool
    assert (4,) not in pool


def test_draws_are_uniform():
    pool, rng = CandidatePool(10), np.random.default_rng(0)
    for i in range(30):
        pool.update((i,), float(-i))
    draws = [pool.sample(rng)[0] for _ in range(5000)]
    assert set(draws) == set(range(20, 30))
    assert stats.chisquare(np.unique(draws, return_counts=True)[1]).pvalue > 0.001


def test_novelty_is_the_share_of_new_paths():
    pool = CandidatePool(4)
    for i in range(4):
        pool.update((i,), float(i))
    assert pool.novelty([]) == 1
    assert pool.novelty([(0,), (1,), (2,), (3,)]) == 0
    assert pool.novelty([(0,), (1,), (9,)]) == 0.5
    assert CandidatePool(4).novelty([]) == 1
    alone = CandidatePool(1)
    alone.update((0,), 1.0)
    assert alone.novelty([(0,)]) == 0


def test_a_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        CandidatePool(0)
