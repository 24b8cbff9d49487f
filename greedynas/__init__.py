"""greedynas: a small image classifier for your data and hardware budget (GreedyNAS, CVPR 2020)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from greedynas._version import __version__ as __version__
from greedynas.deploy.latency_import import import_latency
from greedynas.greedy.filtering import filter_paths
from greedynas.greedy.pool import CandidatePool
from greedynas.models.timm_hook import register_with_timm
from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.budget import Budget
from greedynas.spaces.latency import LatencyTable, load_latency_table
from greedynas.spaces.paths import canonical, compact, op_names, parse_path
from greedynas.spaces.space import Fixed, Space, Stage, load_space, space_names
from greedynas.spaces.zoo import KnownNetwork, known_networks

if TYPE_CHECKING:
    from greedynas.deploy.latency_measurement import measure_latency
    from greedynas.greedy.evaluation import evaluate_paths
    from greedynas.greedy.search import search
    from greedynas.greedy.training import train_supernet
    from greedynas.models.model_file import Card, load_network
    from greedynas.models.network import Network, build_network
    from greedynas.models.supernet import Supernet

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
    "Card": "models.model_file",
    "Network": "models.network",
    "Supernet": "models.supernet",
    "build_network": "models.network",
    "evaluate_paths": "greedy.evaluation",
    "load_network": "models.model_file",
    "measure_latency": "deploy.latency_measurement",
    "search": "greedy.search",
    "train_supernet": "greedy.training",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"greedynas.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'greedynas' has no attribute {name!r}")


register_with_timm()
