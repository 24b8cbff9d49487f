"""Test helpers shared by `tests.deploy.test_latency` and others."""

from greedynas.spaces.latency import Block, Entry, fill, fixed_layers


def blocks_of(space):
    return {Block.of(layer, op): layer for layer in (*space.layers, *fixed_layers(space)) for op in layer.ops}


def made_up(space, lack=(), **about):
    """Return a table with a different number in every entry, without timings of the ops in `lack`."""
    timings = {block: Entry(ms=1 + i / 7, count=5) for i, block in enumerate(blocks_of(space)) if block.op not in lack}
    return fill(space, timings, **({"device": "abacus", "backend": "beads", "threads": 1} | about))
