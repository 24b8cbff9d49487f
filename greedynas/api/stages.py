"""The stages of a job as Python functions: what the verbs of the command line do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from greedynas.api.runs import RunRecord, open_images, open_run
from greedynas.data.datasets import Data
from greedynas.jobs import resolving
from greedynas.jobs.job import Baseline, run_job
from greedynas.models.supernet import Supernet
from greedynas.reporting import check_packages
from greedynas.rundir.callbacks import Callback
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.terminal import make_console
from greedynas.settings.loading import changed_section
from greedynas.settings.schema import AUTO, Config
from greedynas.spaces.budget import Limits, parse_limits
from greedynas.stages.export import export_stage
from greedynas.stages.retrain import retrain_stage
from greedynas.stages.run import read_run_config
from greedynas.stages.search import make_requests, search_stage, supernet_in
from greedynas.stages.train import train_stage

Folder = str | Path | RunRecord
Limit = str | int | float | Sequence[str] | None


def run(
    settings: str | Path | Config,
    out: str | Path,
    *,
    data: Any = None,
    flops: Limit = None,
    params: Limit = None,
    latency: Limit = None,
    latency_table: str | Path | None = None,
    hours: float | None = None,
    baseline: str | None = None,
    changes: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> RunRecord:
    """Run the whole job: train a supernet, search it, retrain what it finds, export that and write the report.

    The same call again goes on where an earlier one stopped.

    Args:
        settings: A preset ("auto", "fashion", "cifar10"…), a YAML file, or a `Config`.
        out: The run directory.
        data: What `open_data` takes as its source: a folder, a name, or torch data sets.
        flops: The most multiply-adds, such as "330M"; several values give a family of networks.
        params: The most parameters, such as "5M".
        latency: The longest latency, such as "80ms", by `latency_table` or measured on this machine.
        latency_table: The file of a latency table.
        hours: How long all of it may take. Epochs and the size of the search follow.
        baseline: A pretrained timm network that is fine-tuned beside the found one.
        changes: Settings by dotted key, such as {"train.max_epochs": 50}.
        quiet: Print nothing.

    Returns:
        The run, whose `.best` is the found network.

    Raises:
        GreedyNASError: If something about the input is wrong, before any work where that can be known.

    Example:
        >>> import greedynas
        >>> run = greedynas.run("auto", "runs/photos", data="photos/", flops="5M")
        >>> run.stage, run.best.arch.macs <= 5_000_000
        ('exported', True)
    """
    folder, console, limits = Path(out), _console(quiet), _limits(flops, params, latency)
    config, images = _settings(settings, data, changes, folder, console, limits, hours)
    table = None if latency_table is None else Path(latency_table)
    beside = None if baseline is None else Baseline(baseline)
    run_job(config, folder, limits, console, latency_table=table, baseline=beside, data=images)
    return open_run(folder)


def train(
    settings: str | Path | Config,
    out: str | Path,
    *,
    data: Any = None,
    changes: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> RunRecord:
    """Train a supernet in a run directory, or go on with it: the first stage of `run`.

    Args:
        settings: A preset, a YAML file, or a `Config`.
        out: The run directory.
        data: What `open_data` takes as its source.
        changes: Settings by dotted key, such as {"train.sampler": "uniform"}.
        callbacks: What watches the training, and may end it.
        quiet: Print nothing.

    Returns:
        The run.

    Raises:
        GreedyNASError: If something about the input is wrong.

    Example:
        >>> import greedynas
        >>> run = greedynas.train("auto", "runs/uniform", data="photos/", changes={"train.sampler": "uniform"})
        >>> run.stage
        'trained'
    """
    folder, console = Path(out), _console(quiet)
    config, images = _settings(settings, data, changes, folder, console, _limits(None, None, None), None)
    train_stage(config, folder, console, images, callbacks=callbacks)
    return open_run(folder)


def search_run(
    run: Folder,
    *,
    flops: Limit = None,
    params: Limit = None,
    latency: Limit = None,
    latency_table: str | Path | None = None,
    searcher: str = "evolution",
    objectives: Sequence[str] = (),
    name: str | None = None,
    changes: Mapping[str, Any] | None = None,
    seed: int | None = None,
    data: Any = None,
    quiet: bool = False,
) -> RunRecord:
    """Search the trained supernet of a run under a budget; the chosen networks are in `.models` afterwards.

    Args:
        run: The run directory.
        flops: The most multiply-adds, such as "60M"; several values give several searches.
        params: The most parameters.
        latency: The longest latency by `latency_table`.
        latency_table: The file of a latency table.
        searcher: "evolution", "random", or a registered one.
        objectives: Costs that are to be small besides a high accuracy.
        name: Of the search; by default it is made of the limits.
        changes: Settings of the search by key, such as {"generations": 10}.
        seed: Of the search; by default the run's.
        data: The images of the run, where they were not read from disk: the same torch data sets, or a `Data`.
        quiet: Print nothing.

    Returns:
        The run.

    Raises:
        GreedyNASError: If no path keeps the budget, or the supernet is not trained yet.

    Example:
        >>> import greedynas
        >>> run = greedynas.search_run("runs/photos", params="1K", name="small", quiet=True)
        >>> run.models["small"].arch.params <= 1000
        True
    """
    folder = _folder(run)
    settings = changed_section(read_run_config(folder), "search", dict(changes or {}))
    limits = _limits(flops, params, latency)
    requests = make_requests(folder, limits, searcher, tuple(objectives), True, name, [], seed, settings)
    table = None if latency_table is None else Path(latency_table)
    search_stage(folder, requests, table, _console(quiet), _images_of(folder, data))
    return open_run(folder)


def retrain(
    run: Folder,
    *,
    model: str | None = None,
    arch: str | None = None,
    name: str | None = None,
    pretrained: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
    seed: int | None = None,
    data: Any = None,
    quiet: bool = False,
) -> RunRecord:
    """Train a network of a run from scratch and test it: the chosen one, another one it found, or any other to compare.

    Args:
        run: The run directory.
        model: A network in `models/`; by default the chosen one.
        arch: Another network instead: "random", a path, a known network, "timm:NAME".
        name: Of the model, where it should not be the usual one.
        pretrained: Weights of a timm model: "cache" or a file.
        changes: Settings of the training by key, such as {"epochs": 100, "recipe": "rmsprop"}.
        seed: Of the training; by default the run's.
        data: The images of the run, where they were not read from disk: the same torch data sets, or a `Data`.
        quiet: Print nothing.

    Returns:
        The run.

    Raises:
        GreedyNASError: If there is no such network, or it was begun with other settings.

    Example:
        >>> import greedynas
        >>> run = greedynas.retrain("runs/photos", arch="random", quiet=True)
        >>> run.models["random"].test.images
        12
    """
    folder = _folder(run)
    settings = changed_section(read_run_config(folder), "retrain", dict(changes or {}))
    retrain_stage(
        folder,
        _console(quiet),
        settings=settings,
        model=model,
        arch=arch,
        name=name,
        pretrained=pretrained,
        seed=seed,
        data=_images_of(folder, data),
    )
    return open_run(folder)


def export(
    run: Folder,
    *,
    model: str | None = None,
    formats: Sequence[str] | None = None,
    data: Any = None,
    quiet: bool = False,
) -> RunRecord:
    """Export a trained network of a run for other tools, and measure each file.

    Args:
        run: The run directory.
        model: A network in `models/`; by default the chosen one.
        formats: Such as ["onnx", "safetensors"]; by default these two.
        data: The images of the run, where they were not read from disk: the same torch data sets, or a `Data`.
        quiet: Print nothing.

    Returns:
        The run.

    Raises:
        GreedyNASError: If the network is not trained yet, or a file differs from PyTorch.

    Example:
        >>> import greedynas
        >>> run = greedynas.export("runs/photos", quiet=True)
        >>> [file.file for file in run.best.export.files]
        ['model.onnx', 'model.fp16.onnx', 'model.int8.onnx', 'model.safetensors']
    """
    options: dict[str, Any] = {} if formats is None else {"formats": tuple(formats)}
    folder = _folder(run)
    export_stage(folder, _console(quiet), model=model, data=_images_of(folder, data), **options)
    return open_run(folder)


def report(run: Folder, *, quiet: bool = False) -> Path:
    """Write the report of a run, one page that opens offline, and return its file.

    Args:
        run: The run directory.
        quiet: Print nothing.

    Returns:
        The file, `report.html` in the run directory.

    Raises:
        GreedyNASError: If a file of the run directory is malformed.

    Example:
        >>> import greedynas
        >>> greedynas.report("runs/photos", quiet=True).name
        'report.html'
    """
    check_packages()
    from greedynas.reporting.report import report_stage

    return Path(report_stage(_folder(run), _console(quiet))["report"])


def load_supernet(run: Folder, *, device: str = "cpu") -> Supernet:
    """Return the trained supernet of a run.

    Args:
        run: The run directory.
        device: Where the weights go.

    Returns:
        The supernet in training mode, as it was left: `evaluate_paths` takes care of BatchNorm.

    Raises:
        GreedyNASError: If the run has no supernet that is fully trained.

    Example:
        >>> import greedynas
        >>> net = greedynas.load_supernet("runs/photos")
        >>> net.space.name
        'tiny'
    """
    return supernet_in(_folder(run), choose_device(device))


# What the functions share


def _folder(run: Folder) -> Path:
    return run.folder if isinstance(run, RunRecord) else Path(run)


def _console(quiet: bool) -> Console:
    return make_console(quiet=True) if quiet else make_console()


def _limits(flops: Limit, params: Limit, latency: Limit) -> Limits:
    given = {"macs": flops, "params": params, "latency_ms": latency}
    limits: Limits = {cost: (_values(value), None) for cost, value in given.items()}
    parse_limits(limits)  # what is malformed is refused at once
    return limits


def _values(limit: Limit) -> list[str] | None:
    if limit is None:
        return None
    return [str(limit)] if isinstance(limit, (str, int, float)) else [str(value) for value in limit]


def _settings(
    settings: str | Path | Config,
    data: Any,
    changes: Mapping[str, Any] | None,
    folder: Path,
    console: Console,
    limits: Limits,
    hours: float | None,
) -> tuple[Config, Data | None]:
    """Return the settings of a run, and its images where they were read for them or do not come from a place on disk."""
    named = isinstance(data, (str, Path))
    if data is not None and not named and (str(settings) == AUTO or hours is not None):
        raise GreedyNASError(
            "auto and hours look at images by their name: give the data set one with greedynas.register_dataset, and data=NAME"
        )
    places = {"data.source": str(data)} if named else {}
    if isinstance(settings, Config):
        if hours is not None or changes:
            raise GreedyNASError("hours and changes are for presets and files: change the Config itself")
        source = {"data": settings.data.model_copy(update={"source": str(data)})} if named else {}
        config, images = settings.model_copy(update=source), None
    else:
        config, images = resolving.settings_of(
            str(settings), {**(changes or {}), **places}, folder, console, parse_limits(limits), hours
        )
    if data is not None and not named:  # a later stage must not look for the preset's own images
        config = config.model_copy(update={"data": config.data.model_copy(update={"source": ""})})
        images = data if isinstance(data, Data) else open_images(data, config, folder, config.device)
    return config, images


def _images_of(folder: Path, data: Any) -> Data | None:
    """Return the images of a run that were handed over; None: the stage opens them itself."""
    if isinstance(data, Data):
        return data
    config = read_run_config(folder)
    if data is None:
        if not config.data.source:
            raise GreedyNASError(f"{folder} was trained on a data set that has no name: hand it over again with data=")
        return None
    return open_images(data, config, folder, config.device)
