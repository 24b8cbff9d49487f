"""Searchers: how the paths of a trained supernet are searched for the best one within a budget."""

from greedynas.runtime.registry import Registry

SEARCHERS: Registry = Registry(
    "searcher",
    {
        "evolution": "greedynas.greedy.searchers.evolution:evolution",
        "random": "greedynas.greedy.searchers.random:random",
    },
)
