"""The stages of a job as Python functions, like the verbs of the command line."""

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
from greedynas.stages.search import make_requests, search_stage
from greedynas.stages.train import train_stage
from greedynas.stages.trained_supernet import supernet_in

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
    ram: Limit = None,
    flash: Limit = None,
    hours: float | None = None,
    baseline: str | None = None,
    changes: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> RunRecord:
    """Run the whole job: train a supernet, search it, retrain and export the found networks, and write the report.

    Repeating a call resumes an interrupted job.

    Args:
        settings: A preset ("auto", "fashion", "cifar10"…), a YAML file, or a `Config`.
        out: The run directory.
        data: The images in any form that `open_data` takes: a folder, a name, or torch data sets.
        flops: The limit on multiply-adds, such as "330M"; several values give a family of networks.
        params: The limit on parameters, such as "5M".
        latency: The limit on latency, such as "80ms", by `latency_table` or measured on this machine.
        latency_table: The file of a latency table.
        ram: The limit on the peak of int8 activations, such as "256K".
        flash: The limit on int8 parameters, such as "1M".
        hours: The time for the whole job, into which epochs and the size of the search are fitted.
        baseline: A pretrained timm network that is fine-tuned to compare it with the found one.
        changes: Settings by dotted key, such as {"train.max_epochs": 50}.
        quiet: Print nothing.

    Returns:
        The run, whose `.best` is the found network.

    Raises:
        GreedyNASError: If the input is wrong, before any work if possible.

    Example:
        >>> import greedynas
        >>> run = greedynas.run("auto", "runs/photos", data="photos/", flops="5M")
        >>> run.stage, run.best.arch.macs <= 5_000_000
        ('exported', True)
    """
    folder, console, limits = Path(out), _console(quiet), _limits(flops, params, latency, ram, flash)
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
    """Train a supernet in a run directory, or resume its training: the first stage of `run`.

    Args:
        settings: A preset, a YAML file, or a `Config`.
        out: The run directory.
        data: The images in any form that `open_data` takes.
        changes: Settings by dotted key, such as {"train.sampler": "uniform"}.
        callbacks: Callbacks that observe the training and may end it.
        quiet: Print nothing.

    Returns:
        The run.

    Raises:
        GreedyNASError: If the input is wrong.

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
    ram: Limit = None,
    flash: Limit = None,
    searcher: str | None = None,
    objectives: Sequence[str] = (),
    name: str | None = None,
    changes: Mapping[str, Any] | None = None,
    seed: int | None = None,
    data: Any = None,
    now: bool = False,
    quiet: bool = False,
) -> RunRecord:
    """Search the trained supernet of a run under a budget; the chosen networks are in `.models` afterwards.

    Args:
        run: The run directory.
        flops: The limit on multiply-adds, such as "60M"; several values give several searches.
        params: The limit on parameters.
        latency: The limit on latency, by `latency_table`.
        latency_table: The file of a latency table.
        ram: The limit on the peak of int8 activations, such as "256K".
        flash: The limit on int8 parameters, such as "1M".
        searcher: "evolution", "model", "aging", "local", "reinforce", "derivation", "random", or a registered one. By
            default that of the settings: "evolution", and "derivation" after a method with architecture parameters.
        objectives: Costs to minimise besides maximising the accuracy.
        name: The name of the search; by default it is made from the limits.
        changes: Settings of the search by key, such as {"generations": 10}.
        seed: The seed of the search; by default that of the run.
        data: The images of the run, if they were not read from disk: the same torch data sets, or a `Data`.
        now: Whether to search the newest checkpoint of a supernet whose training is not finished.
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
    limits = _limits(flops, params, latency, ram, flash)
    requests = make_requests(folder, limits, searcher, tuple(objectives), True, name, [], seed, settings, now)
    table = None if latency_table is None else Path(latency_table)
    search_stage(folder, requests, table, _console(quiet), _images_of(folder, data), now=now)
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
    """Train a network of a run from scratch and test it: the chosen one, another found one, or any other to compare.

    Args:
        run: The run directory.
        model: A network in `models/`; by default the chosen one.
        arch: Another network instead: "random", a path, a known network, or "timm:NAME".
        name: The name of the model, if it should not be the default one.
        pretrained: Weights of a timm model: "cache" or a file.
        changes: Settings of the training by key, such as {"epochs": 100, "recipe": "rmsprop"}.
        seed: The seed of the training; by default that of the run.
        data: The images of the run, if they were not read from disk: the same torch data sets, or a `Data`.
        quiet: Print nothing.

    Returns:
        The run.

    Raises:
        GreedyNASError: If the network does not exist, or its training was started with other settings.

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
    precisions: Sequence[str] | None = None,
    data: Any = None,
    quiet: bool = False,
) -> RunRecord:
    """Export a trained network of a run for other tools, and measure each file.

    Args:
        run: The run directory.
        model: A network in `models/`; by default the chosen one.
        formats: The formats, by default ["onnx", "safetensors"].
        precisions: The precisions besides the reference of each format, such as ["int8"]; by default all.
        data: The images of the run, if they were not read from disk: the same torch data sets, or a `Data`.
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
    options |= {"precisions": None if precisions is None else tuple(precisions)}
    folder = _folder(run)
    export_stage(folder, _console(quiet), model=model, data=_images_of(folder, data), **options)
    return open_run(folder)


def report(run: Folder, *, quiet: bool = False) -> Path:
    """Write the report of a run as one page that opens offline, and return its file.

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
        device: The device of the weights.

    Returns:
        The supernet in training mode; `evaluate_paths` takes care of BatchNorm.

    Raises:
        GreedyNASError: If the run has no fully trained supernet.

    Example:
        >>> import greedynas
        >>> net = greedynas.load_supernet("runs/photos")
        >>> net.space.name
        'tiny'
    """
    return supernet_in(_folder(run), choose_device(device))


# Helpers


def _folder(run: Folder) -> Path:
    return run.folder if isinstance(run, RunRecord) else Path(run)


def _console(quiet: bool) -> Console:
    return make_console(quiet=True) if quiet else make_console()


def _limits(flops: Limit, params: Limit, latency: Limit, ram: Limit = None, flash: Limit = None) -> Limits:
    given = {"macs": flops, "params": params, "latency_ms": latency, "ram": ram, "flash": flash}
    limits: Limits = {cost: (_values(value), None) for cost, value in given.items()}
    parse_limits(limits)  # refuses malformed limits at once
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
    """Return the settings of a run, and its images if they were read to choose the settings or are not on disk."""
    named = isinstance(data, (str, Path))
    if data is not None and not named and (str(settings) == AUTO or hours is not None):
        raise GreedyNASError(
            "auto and hours need a data set with a name: register it with greedynas.register_dataset, and pass data=NAME"
        )
    places = {"data.source": str(data)} if named else {}
    if isinstance(settings, Config):
        if hours is not None or changes:
            raise GreedyNASError("hours and changes apply to presets and files only: change the Config itself")
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
    """Return the given images of a run, or None if the stage opens them itself."""
    if isinstance(data, Data):
        return data
    config = read_run_config(folder)
    if data is None:
        if not config.data.source:
            raise GreedyNASError(f"{folder} was trained on a data set without a name: pass the data set again as data=")
        return None
    return open_images(data, config, folder, config.device)
