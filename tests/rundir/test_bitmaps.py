import numpy as np
import pytest

from greedynas.rundir.schemas import pack_bits, unpack_bits


@pytest.mark.parametrize("count", [1, 7, 8, 9, 2000])
def test_bits_survive_the_round_trip(count):
    bits = np.random.default_rng(count).random(count) < 0.7
    text = pack_bits(bits)
    assert len(text) <= 4 * (count / 8 / 3 + 1)
    np.testing.assert_array_equal(unpack_bits(text, count), bits)


@pytest.mark.parametrize(("text", "says"), [("/w==", "has 1 bytes, 9 bits need 2"), ("no!", "is not base64")])
def test_invalid_texts_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        unpack_bits(text, 9)
