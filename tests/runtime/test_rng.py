import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from greedynas.runtime.rng import stream, torch_stream, uniforms

SEEDS = st.integers(0, 2**63 - 1)


@given(SEEDS, st.text(max_size=10), st.lists(st.integers(0, 2**40), max_size=3))
def test_a_stream_is_a_function_of_its_key(seed, purpose, counters):
    first, second = (stream(seed, purpose, *counters).random(8) for _ in range(2))
    assert (first == second).all()
    assert (stream(seed, purpose, *counters, 1).random(8) != first).all()
    assert (stream(seed, purpose + "x", *counters).random(8) != first).all()


def test_streams_do_not_change_the_global_generators():
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    stream(0, "paths").random()
    torch.randn(2, generator=torch_stream(0, "weights"))
    uniforms(0, "augment", 0, np.arange(4), 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()  # noqa: NPY002


def test_torch_streams_differ_by_purpose_and_counter():
    draws = [torch.randn(4, generator=torch_stream(0, *key)) for key in [("a",), ("b",), ("a", 1), ("a",)]]
    assert torch.equal(draws[0], draws[3])
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@given(SEEDS, st.integers(0, 1000), st.lists(st.integers(0, 2**40), min_size=1, max_size=20), st.integers(1, 30))
def test_a_samples_numbers_do_not_depend_on_its_batch(seed, epoch, samples, count):
    together = uniforms(seed, "augment", epoch, np.array(samples), count)
    assert together.shape == (len(samples), count)
    assert ((together >= 0) & (together < 1)).all()
    for i, sample in enumerate(samples):
        assert (uniforms(seed, "augment", epoch, np.array([sample]), count)[0] == together[i]).all()


def test_numbers_of_samples_are_uniform_and_independent():
    numbers = uniforms(3, "augment", 7, np.arange(20_000), 5)
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 0.001
    others = [uniforms(3, "augment", 8, np.arange(20_000), 5), uniforms(4, "augment", 7, np.arange(20_000), 5)]
    others += [uniforms(3, "order", 7, np.arange(20_000), 5), np.roll(numbers, 1, axis=0), np.roll(numbers, 1, axis=1)]
    for other in others:
        assert stats.pearsonr(numbers.ravel(), other.ravel()).pvalue > 0.001
    assert len(np.unique(numbers)) == numbers.size
