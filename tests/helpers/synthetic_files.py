"""Synthetic files in the format of published ones, made from our own tables and a seed.

Tests of how the package uses such files run on these in every checkout. Only tests of the published numbers need the
published files, which some checkouts have beside them.
"""

import itertools
import json
import math

import numpy as np
import yaml

from greedynas import Space, Stage, load_space
from greedynas.spaces.latency import Block, fixed_layers
from greedynas.spaces.paths import canonical

# A truth like NAS-Bench-Macro's


def true_accuracies(seed=0):
    """Return every path of `macro` and the accuracies of three trainings, which are equal for all paths of one network.

    Accuracy grows with the work of each layer and saturates, plus an unpredictable part for each network. Better
    networks vary less between trainings: by about 0.8 points at 70%, by 0.1 at 94%.
    """
    space, rng = load_space("macro"), np.random.default_rng(seed)
    paths = np.array(list(itertools.product(*(range(n) for n in space.num_ops))))
    gains = np.sort(rng.uniform(0.1, 1.0, (8, 3)), axis=1)  # by layer and op; identities have the lowest
    networks = {network: i for i, network in enumerate(dict.fromkeys(canonical(p, space) for p in paths.tolist()))}
    work = np.array([gains[np.arange(8), network].sum() for network in networks])
    luck = rng.normal(0, 0.25, len(networks))
    means = np.clip(94 - 24 * np.exp(-0.55 * (work - work.min())) + luck, 0, 94)
    trainings = means[:, None] + rng.normal(0, 1, (len(networks), 3)) * deviation(means)[:, None]
    rows = [networks[canonical(path, space)] for path in paths.tolist()]
    return paths, trainings[rows]


def deviation(accuracies):
    """Return the standard deviation of one training of a network with this accuracy."""
    return 0.1 + 0.7 * (94 - accuracies) / 24


def write_truth(file, seed=0):
    """Write a file with the keys, the fields and the size of `nas-bench-macro_cifar10.json`."""
    paths, trainings = true_accuracies(seed)
    costs = load_space("macro").costs(paths)
    entries = {
        "".join(map(str, path)): {
            "test_acc": runs,
            "mean_acc": float(np.mean(runs)),
            "std": float(np.std(runs)),
            "params": int(params),
            "flops": int(macs),
        }
        for path, runs, params, macs in zip(paths.tolist(), trainings.tolist(), costs.params, costs.macs, strict=True)
    }
    order = np.random.default_rng(seed).permutation(list(entries)).tolist()  # the published file is unordered, too
    file.write_text(json.dumps({key: entries[key] for key in order}))
    return file


# A latency table like ProxylessNAS's


def phone_space(**changes):
    """Return `mobilenet` as in ProxylessNAS: its first stage is 24 channels wide instead of 32."""
    space = load_space("mobilenet")
    first = space.stages[0]
    assert first.channels == 32
    stages = (Stage(**{**first.model_dump(), "channels": 24}), *space.stages[1:])
    return Space.model_validate({**space.model_dump(), "name": "phone", "stages": stages, **changes})


def phone_ms(block):
    """Return the latency of a block on this phone, which differs for every block and grows with its computation."""
    expand = int(block.op[2]) if block.op.startswith("MB") else 1
    kernel = int(block.op.rpartition("K")[2]) if "_K" in block.op else 1
    pixels = 1 if block.op == "FC" else math.ceil(block.in_size / block.stride) ** 2
    return 0.1 + pixels * expand * (block.in_channels * kernel**2 + block.in_channels * block.out_channels) / 4e6


def write_phone_table(file):
    """Write a YAML file with the keys of `pixel1_latency_proxyless.yaml`: all MB ops of every layer, no identities, no
    SE."""
    space, entries = phone_space(), {}
    for layer in (*space.layers, *fixed_layers(space)):
        for op in layer.ops:
            if op != "ID":
                block = Block.of(layer, op)
                entries[_key(block)] = {"mean": phone_ms(block), "var": 0.04, "count": 100 + len(entries)}
    file.write_text(yaml.safe_dump(entries))
    return file


def _key(block):
    size, after = block.in_size, math.ceil(block.in_size / block.stride)
    shapes = f"-input:{size}x{size}x{block.in_channels}-output:"
    if block.op == "FC":
        return f"Logits{shapes}{block.out_channels}"
    shapes += f"{after}x{after}x{block.out_channels}"
    if not block.op.startswith("MB"):
        return {"CONV_K3": "Conv", "CONV_K1": "Conv_1"}[block.op] + shapes
    expand, kernel = block.op[2:].split("_K")
    skip = int(block.stride == 1 and block.in_channels == block.out_channels)
    return f"expanded_conv{shapes}-expand:{expand}-kernel:{kernel}-stride:{block.stride}-idskip:{skip}"
