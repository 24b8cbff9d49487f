"""Searchers look for the best path of a trained supernet within a budget."""

from greedynas.runtime.registry import Registry

SEARCHERS: Registry = Registry(
    "searcher",
    {
        "evolution": "greedynas.greedy.searchers.evolution:evolution",
        "model": "greedynas.greedy.searchers.model:model",
        "aging": "greedynas.greedy.searchers.aging:aging",
        "local": "greedynas.greedy.searchers.local:local",
        "reinforce": "greedynas.greedy.searchers.reinforce:reinforce",
        "derivation": "greedynas.greedy.searchers.derivation:derivation",
        "random": "greedynas.greedy.searchers.random:random",
    },
)
