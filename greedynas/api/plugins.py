"""The extension points of greedynas, with one function for each.

Each `register_…` takes a name and an implementation, or is used as a decorator. A plugin is a module that calls these
functions: the command line imports it with `--plugin MODULE`. Installed packages can use entry points instead (see
`greedynas.runtime.registry`). docs/extending.md has an example of each.
"""

from typing import Any

from greedynas.data.specs import DATASETS
from greedynas.deploy.formats import FORMATS
from greedynas.deploy.latency_backends import LATENCY_BACKENDS
from greedynas.greedy.searchers import SEARCHERS
from greedynas.greedy.settings import EVALUATORS, SAMPLERS
from greedynas.models.batchnorm import BN_MODES
from greedynas.rundir.callbacks import CALLBACKS
from greedynas.runtime.registry import Registry, registering
from greedynas.settings.experiments import EXPERIMENTS
from greedynas.settings.recipes import RECIPES
from greedynas.spaces.ops import OPS

_REGISTRIES: tuple[Registry[Any], ...] = (
    OPS,
    SAMPLERS,
    SEARCHERS,
    EVALUATORS,
    DATASETS,
    CALLBACKS,
    RECIPES,
    FORMATS,
    LATENCY_BACKENDS,
    BN_MODES,
    EXPERIMENTS,
)


def registered() -> dict[str, list[str]]:
    """Return the registered names of each extension point, including those of plugins and installed packages.

    Returns:
        The names of each kind, such as "sampler" or "format".

    Example:
        >>> import greedynas
        >>> greedynas.registered()["sampler"][:3]
        ['greedy', 'uniform', 'fair']
    """
    return {registry.kind: registry.names() for registry in _REGISTRIES}


def register_sampler(name: str, sampler: Any = None) -> Any:
    """Register a sampler, which chooses the paths that the next updates of a supernet train.

    Args:
        name: The name for `train.sampler` and `--sampler`.
        sampler: A function that takes a `Draw` and returns paths, each of which is trained by one update; or a subclass
            of `Sampler`. All randomness must come from `draw.rng`, so that a training can be resumed.

    Returns:
        The sampler, or a decorator.

    Example:
        >>> import greedynas
        >>> @greedynas.register_sampler("doctest-cheapest")
        ... def cheapest(draw):  # of four random paths, the one with the fewest multiply-adds
        ...     paths = draw.uniform(4)
        ...     return [paths[draw.space.costs(paths).macs.argmin()]]
        >>> "doctest-cheapest" in greedynas.registered()["sampler"]
        True
    """
    return registering(SAMPLERS, name, sampler)


def register_searcher(name: str, searcher: Any = None) -> Any:
    """Register a searcher, which chooses the paths to evaluate next on a trained supernet.

    Args:
        name: The name for `--searcher`.
        searcher: A generator function. It takes a `Plan`, yields lists of paths, and is sent the evaluated ones. Paths
            that violate a limit are rejected, and known ones are not evaluated again. All randomness must come from
            `plan.rng(n)`.

    Returns:
        The searcher, or a decorator.

    Example:
        >>> import greedynas
        >>> @greedynas.register_searcher("doctest-neighbours")
        ... def neighbours(plan):  # one change to the best path so far
        ...     found = yield plan.task.sample(plan.population, plan.rng(0))
        ...     for generation in range(1, plan.generations):
        ...         best, rng = max(found, key=lambda entry: entry.accuracy), plan.rng(generation)
        ...         paths = [list(best.path) for _ in range(plan.population)]
        ...         for path in paths:
        ...             layer = rng.integers(len(path))
        ...             path[layer] = rng.integers(plan.task.space.num_ops[layer])
        ...         found = found + (yield paths)
        >>> space = greedynas.load_space("macro")
        >>> result = greedynas.search(space, lambda paths: [sum(p) / 16 for p in paths], searcher="doctest-neighbours")
        >>> result.best.accuracy
        1.0
    """
    return registering(SEARCHERS, name, searcher)


def register_evaluator(name: str, evaluator: Any = None) -> Any:
    """Register an evaluator, which measures the accuracies of paths for a search.

    Args:
        name: The name for `search.evaluator`.
        evaluator: A function of (net, data, settings, seed, precision) that returns a function from paths to
            accuracies.

    Returns:
        The evaluator, or a decorator.

    Example:
        >>> import greedynas
        >>> @greedynas.register_evaluator("doctest-size")
        ... def by_size(net, data, settings, seed, precision):
        ...     return lambda paths: (net.space.costs(paths).macs / 1e9).tolist()
        >>> greedynas.registered()["evaluator"][0]
        'supernet'
    """
    return registering(EVALUATORS, name, evaluator)


def register_dataset(name: str, dataset: Any = None) -> Any:
    """Register a data set under a name that `--data` takes.

    Args:
        name: The name for `--data`.
        dataset: A function without arguments that returns a torch `Dataset` of (image, label), or a mapping of such
            data sets with the keys "train", "val" and "test".

    Returns:
        The function, or a decorator.

    Example:
        >>> import greedynas, numpy
        >>> @greedynas.register_dataset("doctest-noise")
        ... def noise():
        ...     pixels = numpy.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), numpy.uint8)
        ...     return [(image, number % 3) for number, image in enumerate(pixels)]
        >>> greedynas.open_data("doctest-noise", image_size=16).class_names
        ['0', '1', '2']
    """
    return registering(DATASETS, name, dataset)


def register_callback(name: str, callback: Any = None) -> Any:
    """Register a callback, which observes trainings, logs them elsewhere, or ends them.

    Args:
        name: The name for `callbacks` in the settings and `--callback`.
        callback: A subclass of `Callback`, of which an object is created for each training.

    Returns:
        The class, or a decorator.

    Example:
        >>> import greedynas
        >>> @greedynas.register_callback("doctest-three-epochs")
        ... class ThreeEpochs(greedynas.Callback):
        ...     def stop(self, state):
        ...         return "three epochs are enough" if state.epoch >= 3 else None
        >>> "doctest-three-epochs" in greedynas.registered()["callback"]
        True
    """
    return registering(CALLBACKS, name, callback)


def register_recipe(name: str, recipe: Any = None) -> Any:
    """Register a recipe, which defines how a found network is trained from scratch.

    Args:
        name: The name for `retrain.recipe` and `--recipe`.
        recipe: A `greedynas.Recipe` with numbers, an optimizer and a learning-rate schedule.

    Returns:
        The recipe, or a decorator.

    Example:
        >>> import greedynas
        >>> from greedynas.stages.recipes import cosine_schedule, sgd_optimizer
        >>> numbers = {"epochs": 100, "batch_size": 128, "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
        >>> recipe = greedynas.register_recipe("doctest-cifar", greedynas.Recipe(numbers, sgd_optimizer, cosine_schedule))
        >>> greedynas.RetrainSettings(recipe="doctest-cifar").recipe
        'doctest-cifar'
    """
    return registering(RECIPES, name, recipe)


def register_format(name: str, format: Any = None) -> Any:
    """Register an export format together with the runtime that runs its files.

    Args:
        name: The name for `--format`, which is also the attribute `name` of the class.
        format: A subclass of `greedynas.Format`, which converts a network and opens the files that it has written.

    Returns:
        The class, or a decorator.

    Example:
        >>> import greedynas, torch
        >>> @greedynas.register_format("doctest-pt2")
        ... class Exported(greedynas.Format):
        ...     name, suffix = "doctest-pt2", ".pt2"
        ...     def convert(self, source, precision, file):
        ...         image = torch.zeros(1, 3, source.card.image_size, source.card.image_size)
        ...         torch.export.save(torch.export.export(source.network, (image,)), file)
        ...     def open(self, file, threads=None):
        ...         return torch.export.load(file).module()
        ...     def runtime(self):
        ...         return f"torch {torch.__version__}"
        >>> "doctest-pt2" in greedynas.registered()["format"]
        True
    """
    return registering(FORMATS, name, format)


def register_latency_backend(name: str, backend: Any = None) -> Any:
    """Register a latency backend, which times the blocks of a space for `greedynas latency measure`.

    Args:
        name: The name for `--backend`.
        backend: A subclass of `greedynas.LatencyBackend`.

    Returns:
        The class, or a decorator.

    Example:
        >>> import greedynas
        >>> from greedynas.deploy.latency_backends.backend import make_block_of
        >>> @greedynas.register_latency_backend("doctest-constant")
        ... class Constant(greedynas.LatencyBackend):
        ...     backend = "constant"
        ...     def parts(self, layer, ops, activation):
        ...         return [make_block_of(layer, op, activation) for op in ops]
        ...     def runner(self, parts, layer, side_by_side=False):
        ...         return lambda: float(len(parts))
        >>> table = greedynas.measure_latency(greedynas.load_space("tiny.yaml"), "doctest-constant", repeats=1)
        >>> table.backend
        'constant'
    """
    return registering(LATENCY_BACKENDS, name, backend)


def register_batchnorm_mode(name: str, mode: Any = None) -> Any:
    """Register a BatchNorm mode, which provides the statistics for the evaluation of a path.

    Args:
        name: The name for `train.bn`, `search.bn` and `evaluate_paths(bn=...)`.
        mode: A subclass of `greedynas.models.batchnorm.BatchNormMode`.

    Returns:
        The class, or a decorator.

    Example:
        >>> import greedynas
        >>> from greedynas.models.batchnorm import BatchNormMode
        >>> @greedynas.register_batchnorm_mode("doctest-running")
        ... class Running(BatchNormMode):
        ...     pass
        >>> "doctest-running" in greedynas.registered()["BatchNorm mode"]
        True
    """
    return registering(BN_MODES, name, mode)
