"""Samplers: which paths the next updates of a supernet train. The paper's greedy one, and those it is compared with."""

from greedynas.runtime.registry import Registry

SAMPLERS: Registry = Registry(
    "sampler",
    {
        "greedy": "greedynas.greedy.samplers.greedy:Greedy",
        "uniform": "greedynas.greedy.samplers.uniform:Uniform",
        "fair": "greedynas.greedy.samplers.fair:Fair",
    },
)
