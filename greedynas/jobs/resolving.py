"""The settings that a run starts with: a preset with changes, or those that `auto` and `--hours` choose."""

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from greedynas.data.datasets import Data
from greedynas.data.settings import DataSettings
from greedynas.data.specs import names_a_folder
from greedynas.jobs.auto import AUTO, auto_config, smaller_sizes
from greedynas.jobs.estimates import fit_hours, share_of_epochs
from greedynas.jobs.machine_speed import Pace, known_pace
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.settings.loading import changed, changed_section, load_preset, resolved
from greedynas.settings.schema import EXTENDING, Asked, Config, extends
from greedynas.spaces.budget import Budget, without_latency
from greedynas.stages.run import FREE, flattened, read_data, read_run_config

ENOUGH_EPOCHS = 0.5  # of the usual epochs: where --hours allows fewer, `auto` takes smaller images
WATCHED = 1000  # validation images of the accuracy after every epoch
PLACES_ALONE = ("data.root", "data.download")  # which are never taken from a run directory
PLACES = ("data.source", "data.root")  # settings that name the folder of the images


def load_config(source: str | Path, changes: dict[str, Any] | None = None, section: str = "train") -> Config:
    """Return the settings of a preset, a YAML file or `auto`, with changes by dotted key.

    Args:
        source: The name of a preset, or a YAML file.
        changes: Settings by key. A bare key such as `lr` belongs to `section`, or else to the only section that has it.
        section: The section that bare keys belong to.

    Returns:
        The complete settings.

    Raises:
        GreedyNASError: If a preset or setting does not exist, or a value is not allowed.

    Example:
        >>> import greedynas
        >>> greedynas.load_config("imagenet", {"lr": 0.1}).train.lr
        0.1
    """
    if str(source) == AUTO:
        return auto_config(changes or {}, section=section)[0]
    return load_preset(source, changes, section)


def settings_of(
    preset: str,
    changes: dict[str, Any],
    folder: Path | None,
    console: Console,
    budgets: list[Budget] | None = None,
    hours: float | None = None,
) -> tuple[Config, Data | None]:
    """Return the settings, and the data if it was read to choose them, because reading it again may take minutes.

    A run in `folder` that is resumed keeps its settings, because another measurement might lead to different ones. With
    several ranks the first one chooses; the data that it has read is not returned, because the other ranks lack it.
    """
    chosen = partial(_settings_of, preset, changes, folder, console, budgets, hours)
    if ranks.size() == 1:
        config, data = chosen()
        return watched(config, changes), data
    if preset != AUTO and hours is None:
        mine = load_config(preset, changes)  # every rank has its own file
        ranks.refuse_difference(flattened(mine), f"give every machine the same {preset}")
    config = Config.model_validate(ranks.on_first(lambda: chosen()[0].model_dump(mode="json")))
    return watched(config, changes), None


def watched(config: Config, changes: dict[str, Any] | None = None) -> Config:
    """Return the settings with a report of an accuracy after every epoch of the supernet, unless they choose it.

    Studies leave it out, because they compare the costs of trainings.
    """
    if config.train.accuracy_images or "train.accuracy_images" in resolved(dict(changes or {}), "train"):
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"accuracy_images": WATCHED})})


def _settings_of(
    preset: str,
    changes: dict[str, Any],
    folder: Path | None,
    console: Console,
    budgets: list[Budget] | None,
    hours: float | None,
) -> tuple[Config, Data | None]:
    changes = resolved(changes, "train")
    if preset != AUTO and hours is None:
        return load_config(preset, changes), None
    fixed = {key: value for key, value in changes.items() if not extends(key)}
    asked = Asked(preset=preset, hours=hours, changes=fixed)
    if folder is not None and (folder / "config.yaml").is_file():
        return _settings_in(folder, asked, changes), None
    priced = without_latency(budgets or [])
    budget = max(priced, key=lambda one: (one.max_macs or 0, one.max_params or 0), default=None)
    smallest = min((one.max_macs for one in priced if one.max_macs is not None), default=None)
    networks = max(1, len(priced))
    config, reasons = _chosen(preset, changes, budget, smallest)
    data = None
    if hours is not None:
        data, pace = _measured(config, folder, budget)
        if (largest := _largest_size(config, data, pace, hours, networks, changes)) is not None and preset == AUTO:
            config, reasons = _chosen(preset, changes, budget, smallest, largest)
            data, pace = _measured(config, folder, budget)
        device = choose_device(config.device)
        config, more = fit_hours(config, data, device, hours, budget, networks, keep=changes, pace=pace)
        reasons = [*reasons, *more]
    for reason in reasons:
        console.print(f"  {reason}", highlight=False, markup=False)
    return config.model_copy(update={"asked": asked, "reasons": tuple(reasons)}), data


def _chosen(
    preset: str, changes: dict[str, Any], budget: Budget | None, smallest: int | None, largest: int | None = None
) -> tuple[Config, list[str]]:
    """Return the settings of a preset and the reasons for them, with image sizes of at most `largest` in `auto`.

    `budget` is the largest of several, `smallest` the lowest limit on multiply-adds.
    """
    if preset != AUTO:
        return load_config(preset, changes), []
    return auto_config(changes, budget=budget, largest=largest, smallest=smallest)


def _measured(config: Config, folder: Path | None, budget: Budget | None) -> tuple[Data, Pace]:
    """Return the data of a run, and the pace of this machine with it."""
    device = choose_device(config.device)
    data = read_data(config, device, folder)
    return data, known_pace(config, data, device, budget)


def _largest_size(
    config: Config, data: Data, pace: Pace, hours: float, networks: int, changes: dict[str, Any]
) -> int | None:
    """Return the image size that leaves enough epochs in the given time, or None if the present one does.

    Times are assumed to be proportional to the multiply-adds of the space.
    """
    smaller = [] if "image_size" in changes else smaller_sizes(config.space)
    share = share_of_epochs(config, data, pace, hours, networks)
    if not smaller or share >= ENOUGH_EPOCHS:
        return None
    costs = {size: sum(config.space.adapt(image_size=size).cost_tables["macs"].range) for size in smaller}
    now = sum(config.space.adapt(image_size=config.space.image_size).cost_tables["macs"].range)
    quick = [size for size in smaller if share * now / costs[size] >= ENOUGH_EPOCHS]
    return max(quick, default=min(smaller))


def with_places(data: DataSettings, changes: dict[str, Any]) -> DataSettings:
    """Return a run's data settings, with the folder and the download permission of the command line alone."""
    places = {"root": changes.get("data.root"), "download": changes.get("data.download", False)}
    places |= {"source": changes["data.source"]} if "data.source" in changes else {}
    return DataSettings.model_validate({**data.model_dump(), **places})


def _settings_in(folder: Path, asked: Asked, changes: dict[str, Any]) -> Config:
    config = read_run_config(folder)
    if config.asked is None or _but_for_places(config.asked) != _but_for_places(asked):
        before = "other settings" if config.asked is None else config.asked.told()
        raise GreedyNASError(f"{folder} was started with {before}, not {asked.told()}; choose another --out")
    bookkeeping = {key: value for key, value in asked.changes.items() if key in FREE and key not in PLACES_ALONE}
    if bookkeeping:
        config = changed(config.model_dump(mode="json"), bookkeeping, f"{folder}/config.yaml")
    config = config.model_copy(update={"data": with_places(config.data, asked.changes)})
    for section in EXTENDING:
        mine = {key: value for key, value in changes.items() if key.startswith(f"{section}.")}
        if mine:
            config = config.model_copy(update={section: changed_section(config, section, mine)})
    return config


def _but_for_places(asked: Asked) -> Asked:
    """Return a request without bookkeeping and without the folder of the images, which are compared themselves."""
    kept = {key: value for key, value in asked.changes.items() if key not in PLACES and key not in FREE}
    source = asked.changes.get("data.source")
    if isinstance(source, str) and not names_a_folder(source):
        kept["data.source"] = source
    return asked.model_copy(update={"changes": kept})
