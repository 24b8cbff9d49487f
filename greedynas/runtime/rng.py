"""Random numbers without global state: every stream is derived from (seed, purpose, counters).

A checkpoint then stores counters instead of generator states, filtering cannot disturb training, and the order of data
does not depend on workers or ranks.
"""

import zlib

import numpy as np
import torch
from numpy.typing import NDArray


def stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return the NumPy generator of a purpose and its counters: `stream(seed, "paths", filtering)`."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *counters])


def torch_stream(seed: int, purpose: str, *counters: int) -> torch.Generator:
    """Return the same as a torch generator on the CPU, where weights are initialised for every device."""
    return torch.Generator().manual_seed(int(stream(seed, purpose, *counters).integers(2**63)))


def uniforms(seed: int, purpose: str, epoch: int, samples: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return `count` uniform numbers in [0, 1) for each sample of an epoch: (len(samples), count).

    A sample's numbers depend on (seed, purpose, epoch, sample) alone, not on its batch: splitmix64 (Steele et al.,
    2014) over a counter, vectorised because the augmentation of a whole batch is drawn at once.
    """
    key = np.uint64(stream(seed, purpose, epoch).integers(2**64, dtype=np.uint64))
    counter = np.asarray(samples, dtype=np.uint64)[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
    z = (key + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
