"""Test helpers shared by `tests.stages.test_retrain` and others."""

import torch

from greedynas import build_network
from greedynas.runtime.rng import torch_stream
from tests.helpers.training import tiny_space

DATA = {"val_images": 12, "test_images": 6, "workers": 0, "pad": 1}


def new_network(dropout=0.0, seed=0):
    network = build_network("2111", tiny_space(), dropout=dropout, generator=torch_stream(seed, "retrain init"))
    return network.to(memory_format=torch.channels_last)
