"""greedynas: a small image classifier for your data and hardware budget (GreedyNAS, CVPR 2020).

Everything that `dir(greedynas)` lists is public and documented. Nothing is imported before it is used, so that
`import greedynas` and the command line answer at once.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from greedynas._version import __version__ as __version__

if TYPE_CHECKING:
    from greedynas.api.describing import describe as describe
    from greedynas.api.plugins import register_batchnorm_mode as register_batchnorm_mode
    from greedynas.api.plugins import register_callback as register_callback
    from greedynas.api.plugins import register_dataset as register_dataset
    from greedynas.api.plugins import register_evaluator as register_evaluator
    from greedynas.api.plugins import register_format as register_format
    from greedynas.api.plugins import register_latency_backend as register_latency_backend
    from greedynas.api.plugins import register_recipe as register_recipe
    from greedynas.api.plugins import register_sampler as register_sampler
    from greedynas.api.plugins import register_searcher as register_searcher
    from greedynas.api.plugins import registered as registered
    from greedynas.api.runs import RunRecord as RunRecord
    from greedynas.api.runs import open_run as open_run
    from greedynas.api.runs import runs as runs
    from greedynas.api.stages import export as export
    from greedynas.api.stages import load_supernet as load_supernet
    from greedynas.api.stages import report as report
    from greedynas.api.stages import retrain as retrain
    from greedynas.api.stages import run as run
    from greedynas.api.stages import search_run as search_run
    from greedynas.api.stages import train as train
    from greedynas.data.datasets import Data as Data
    from greedynas.data.datasets import open_data as open_data
    from greedynas.data.settings import DataSettings as DataSettings
    from greedynas.deploy.formats.format import Conversion as Conversion
    from greedynas.deploy.formats.format import Format as Format
    from greedynas.deploy.latency_backends.backend import LatencyBackend as LatencyBackend
    from greedynas.deploy.latency_import import import_latency as import_latency
    from greedynas.deploy.latency_measurement import measure_latency as measure_latency
    from greedynas.deploy.prediction import Prediction as Prediction
    from greedynas.deploy.prediction import predict as predict
    from greedynas.greedy.evaluation import Evaluation as Evaluation
    from greedynas.greedy.evaluation import evaluate_paths as evaluate_paths
    from greedynas.greedy.filtering import Filtered as Filtered
    from greedynas.greedy.filtering import filter_paths as filter_paths
    from greedynas.greedy.methods.method import Method as Method
    from greedynas.greedy.pool import CandidatePool as CandidatePool
    from greedynas.greedy.samplers.learning import Learning as Learning
    from greedynas.greedy.samplers.sampler import Draw as Draw
    from greedynas.greedy.samplers.sampler import Sampler as Sampler
    from greedynas.greedy.search import search as search
    from greedynas.greedy.searchers.task import Found as Found
    from greedynas.greedy.searchers.task import Plan as Plan
    from greedynas.greedy.searchers.task import Searched as Searched
    from greedynas.greedy.settings import SearchSettings as SearchSettings
    from greedynas.greedy.settings import TrainSettings as TrainSettings
    from greedynas.greedy.state import TrainState as TrainState
    from greedynas.greedy.training import train_supernet as train_supernet
    from greedynas.jobs.resolving import load_config as load_config
    from greedynas.models.model_file import Card as Card
    from greedynas.models.model_file import load_network as load_network
    from greedynas.models.network import Network as Network
    from greedynas.models.network import build_network as build_network
    from greedynas.models.supernet import Mixture as Mixture
    from greedynas.models.supernet import Supernet as Supernet
    from greedynas.models.timm_models import register_timm_models as register_timm_models
    from greedynas.rundir.callbacks import Callback as Callback
    from greedynas.runtime.errors import GreedyNASError as GreedyNASError
    from greedynas.runtime.registry import load_plugin as load_plugin
    from greedynas.settings.recipes import Recipe as Recipe
    from greedynas.settings.recipes import ResolvedRecipe as ResolvedRecipe
    from greedynas.settings.schema import Config as Config
    from greedynas.settings.schema import RetrainSettings as RetrainSettings
    from greedynas.spaces.budget import Budget as Budget
    from greedynas.spaces.budget import parse_count as parse_count
    from greedynas.spaces.budget import parse_latency as parse_latency
    from greedynas.spaces.drawing import draw_path as draw_path
    from greedynas.spaces.latency import LatencyTable as LatencyTable
    from greedynas.spaces.latency import load_latency_table as load_latency_table
    from greedynas.spaces.ops import register_op as register_op
    from greedynas.spaces.paths import canonical as canonical
    from greedynas.spaces.paths import compact as compact
    from greedynas.spaces.paths import op_names as op_names
    from greedynas.spaces.paths import parse_path as parse_path
    from greedynas.spaces.space import Fixed as Fixed
    from greedynas.spaces.space import Space as Space
    from greedynas.spaces.space import Stage as Stage
    from greedynas.spaces.space import load_space as load_space
    from greedynas.spaces.space import space_names as space_names
    from greedynas.spaces.zoo import KnownNetwork as KnownNetwork
    from greedynas.spaces.zoo import known_networks as known_networks

# OpenMP's threads wait for each other by spinning. With another busy process on a small machine, that made training a
# hundred times slower (2,200 ms per step instead of 18, on 2 cores). With this setting they sleep after a short time,
# which costs 20% on an idle machine. It is read when torch is loaded: import greedynas first.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# Public names by the module that has them.
_PUBLIC = {
    "api.describing": ["describe"],
    "api.plugins": [
        "register_batchnorm_mode",
        "register_callback",
        "register_dataset",
        "register_evaluator",
        "register_format",
        "register_latency_backend",
        "register_recipe",
        "register_sampler",
        "register_searcher",
        "registered",
    ],
    "api.runs": ["RunRecord", "open_run", "runs"],
    "api.stages": ["export", "load_supernet", "report", "retrain", "run", "search_run", "train"],
    "data.datasets": ["Data", "open_data"],
    "data.settings": ["DataSettings"],
    "deploy.formats.format": ["Conversion", "Format"],
    "deploy.latency_backends.backend": ["LatencyBackend"],
    "deploy.latency_import": ["import_latency"],
    "deploy.latency_measurement": ["measure_latency"],
    "deploy.prediction": ["Prediction", "predict"],
    "greedy.evaluation": ["Evaluation", "evaluate_paths"],
    "greedy.filtering": ["Filtered", "filter_paths"],
    "greedy.methods.method": ["Method"],
    "greedy.pool": ["CandidatePool"],
    "greedy.samplers.learning": ["Learning"],
    "greedy.samplers.sampler": ["Draw", "Sampler"],
    "greedy.search": ["search"],
    "greedy.searchers.task": ["Found", "Plan", "Searched"],
    "greedy.settings": ["SearchSettings", "TrainSettings"],
    "greedy.state": ["TrainState"],
    "greedy.training": ["train_supernet"],
    "jobs.resolving": ["load_config"],
    "models.model_file": ["Card", "load_network"],
    "models.network": ["Network", "build_network"],
    "models.supernet": ["Mixture", "Supernet"],
    "models.timm_models": ["register_timm_models"],
    "rundir.callbacks": ["Callback"],
    "runtime.errors": ["GreedyNASError"],
    "runtime.registry": ["load_plugin"],
    "settings.recipes": ["Recipe", "ResolvedRecipe"],
    "settings.schema": ["Config", "RetrainSettings"],
    "spaces.budget": ["Budget", "parse_count", "parse_latency"],
    "spaces.drawing": ["draw_path"],
    "spaces.latency": ["LatencyTable", "load_latency_table"],
    "spaces.ops": ["register_op"],
    "spaces.paths": ["canonical", "compact", "op_names", "parse_path"],
    "spaces.space": ["Fixed", "Space", "Stage", "load_space", "space_names"],
    "spaces.zoo": ["KnownNetwork", "known_networks"],
}
_PLACES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        value = getattr(import_module(f"greedynas.{_PLACES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'greedynas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
