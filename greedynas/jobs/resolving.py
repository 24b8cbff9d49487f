"""The settings that a run starts with: a preset with changes, or what `auto` and `--hours` choose for data and machine."""

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from greedynas.data.datasets import Data
from greedynas.data.settings import DataSettings
from greedynas.data.specs import names_a_folder
from greedynas.jobs.auto import AUTO, auto_config
from greedynas.jobs.estimates import fit_hours
from greedynas.jobs.machine_speed import known_pace
from greedynas.runtime.devices import choose_device
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from greedynas.settings.loading import changed_section, load_preset, resolved
from greedynas.settings.schema import EXTENDING, Asked, Config, extends
from greedynas.spaces.budget import Budget, without_latency
from greedynas.stages.run import flattened, read_data, read_run_config

PLACES = ("data.source", "data.root")  # settings that say where images are


def load_config(source: str | Path, changes: dict[str, Any] | None = None, section: str = "train") -> Config:
    """Return the settings of a preset, a YAML file or `auto`, with changes by dotted key.

    Args:
        source: The name of a preset, or a YAML file.
        changes: Settings by key. A bare key such as `lr` means the one of `section`, else the only section that has it.
        section: The section that bare keys belong to.

    Returns:
        The complete settings.

    Raises:
        GreedyNASError: If there is no such preset or setting, or a value cannot be.

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
    """The settings, and the data if they were read for them: reading them again may take minutes.

    What was chosen when the run in `folder` was started stays as it is when it goes on: measured again, it might come out
    differently. Of several ranks the first one chooses; the data that it read alone are not those of all ranks."""
    chosen = partial(_settings_of, preset, changes, folder, console, budgets, hours)
    if ranks.size() == 1:
        return chosen()
    if preset != AUTO and hours is None:
        mine = load_config(preset, changes)  # every rank has its own file
        ranks.refuse_difference(flattened(mine), f"give every machine the same {preset}")
    return Config.model_validate(ranks.on_first(lambda: chosen()[0].model_dump(mode="json"))), None


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
    reasons: list[str] = []
    if preset == AUTO:
        config, reasons = auto_config(changes, budget=budget)
    else:
        config = load_config(preset, changes)
    data = None
    if hours is not None:
        device = choose_device(config.device)
        data = read_data(config, device, folder)
        pace = known_pace(config, data, device, budget)
        config, more = fit_hours(config, data, device, hours, budget, max(1, len(priced)), keep=changes, pace=pace)
        reasons = [*reasons, *more]
    for reason in reasons:
        console.print(f"  {reason}", highlight=False, markup=False)
    return config.model_copy(update={"asked": asked, "reasons": tuple(reasons)}), data


def told_places(data: DataSettings, changes: dict[str, Any]) -> DataSettings:
    """Return the settings of a run's images with the places that the command line names, and no others."""
    places = {"root": changes.get("data.root"), "download": changes.get("data.download", False)}
    places |= {"source": changes["data.source"]} if "data.source" in changes else {}
    return DataSettings.model_validate({**data.model_dump(), **places})


def _settings_in(folder: Path, asked: Asked, changes: dict[str, Any]) -> Config:
    config = read_run_config(folder)
    if config.asked is None or _but_for_places(config.asked) != _but_for_places(asked):
        before = "other settings" if config.asked is None else config.asked.told()
        raise GreedyNASError(f"{folder} was started with {before}, not {asked.told()}; name another --out")
    config = config.model_copy(update={"data": told_places(config.data, asked.changes)})
    for section in EXTENDING:
        mine = {key: value for key, value in changes.items() if key.startswith(f"{section}.")}
        if mine:
            config = config.model_copy(update={section: changed_section(config, section, mine)})
    return config


def _but_for_places(asked: Asked) -> Asked:
    """Return what was asked for without where the images lie: they are compared themselves."""
    kept = {key: value for key, value in asked.changes.items() if key not in PLACES}
    source = asked.changes.get("data.source")
    if isinstance(source, str) and not names_a_folder(source):
        kept["data.source"] = source
    return asked.model_copy(update={"changes": kept})
