"""greedynas: a small image classifier for your data and hardware budget (GreedyNAS, CVPR 2020)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from greedynas.budget import Budget
from greedynas.errors import GreedyNASError
from greedynas.known import KnownNetwork, known_networks
from greedynas.latency import LatencyTable, import_latency, load_latency_table
from greedynas.paths import canonical, compact, op_names, parse_path
from greedynas.pool import CandidatePool
from greedynas.registration import register_with_timm
from greedynas.sampling import filter_paths
from greedynas.space import Fixed, Space, Stage, load_space, space_names

if TYPE_CHECKING:
    from greedynas.evaluation import evaluate_paths
    from greedynas.evolution import search
    from greedynas.network import Network, build_network
    from greedynas.supernet import Supernet
    from greedynas.timing import measure_latency
    from greedynas.trained import Card, load_network
    from greedynas.training import train_supernet

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "CandidatePool",
    "Card",
    "Fixed",
    "GreedyNASError",
    "KnownNetwork",
    "LatencyTable",
    "Network",
    "Space",
    "Stage",
    "Supernet",
    "build_network",
    "canonical",
    "compact",
    "evaluate_paths",
    "filter_paths",
    "import_latency",
    "known_networks",
    "load_latency_table",
    "load_network",
    "load_space",
    "measure_latency",
    "op_names",
    "parse_path",
    "search",
    "space_names",
    "train_supernet",
]

# What needs torch is imported when it is first asked for: `greedynas describe` answers at once.
_LAZY = {
    "Card": "trained",
    "Network": "network",
    "Supernet": "supernet",
    "build_network": "network",
    "evaluate_paths": "evaluation",
    "load_network": "trained",
    "measure_latency": "timing",
    "search": "evolution",
    "train_supernet": "training",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"greedynas.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'greedynas' has no attribute {name!r}")


register_with_timm()
