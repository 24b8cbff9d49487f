"""Yes or no for each of many images, as one line of text: 50,000 test images take 8 kB of a JSON file."""

import base64
import binascii
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.bool_]


def pack_bits(bits: Sequence[bool] | Bits) -> str:
    """Return the bits, eight to a byte, in base64."""
    return base64.b64encode(np.packbits(np.asarray(bits, dtype=bool)).tobytes()).decode("ascii")


def unpack_bits(text: str, count: int) -> Bits:
    """Return the `count` bits that `pack_bits` has written; raise ValueError if the text does not hold that many."""
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    except binascii.Error as error:
        raise ValueError(f"is not base64: {error}") from None
    if len(packed) != -(-count // 8):
        raise ValueError(f"has {len(packed)} bytes, {count} bits need {-(-count // 8)}")
    return np.unpackbits(packed, count=count).astype(bool)
