"""The loading of settings: presets and config files are YAML, and `--set key=value` changes a single value."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from greedynas.data.settings import DataOptions, stored_settings
from greedynas.runtime.errors import GreedyNASError, first_problem, unknown
from greedynas.runtime.yaml_files import parse_value, read_yaml
from greedynas.settings.experiments import EXPERIMENTS
from greedynas.settings.schema import AUTO, Config

PRESETS = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Return the names of the built-in presets and `auto`, whose settings are chosen for the data."""
    return sorted([AUTO, *(file.stem for file in PRESETS.glob("*.yaml"))])


def load_preset(source: str | Path, changes: dict[str, Any] | None = None, section: str = "train") -> Config:
    """Return the settings of a preset or a YAML file, with changes by (dotted) key.

    A bare key such as `lr` means the setting in `section`, or else in the only section that has it. The preset `auto`
    is handled by `jobs.resolving`.
    """
    if str(source) in preset_names():
        data = read_yaml(PRESETS / f"{source}.yaml", "config file")
    elif Path(source).is_file():
        data = read_yaml(Path(source), "config file")
    else:
        raise unknown("preset", str(source), [*preset_names(), "or a YAML file"])
    of_a_run = "schema_version" in data
    for key in ("schema_version", "versions"):  # also the config.yaml of a run can be loaded
        data.pop(key, None)
    changes = changes or {}
    config = changed({"name": Path(source).stem, **data}, changes, str(source), section)
    return _of_a_run(config, changes, str(source), section) if of_a_run else config


def _of_a_run(config: Config, changes: dict[str, Any], source: str, section: str) -> Config:
    """Return the settings of an existing run. It may be untrusted, so only the changes can ask for downloads."""
    places = resolved(changes, section)
    told = DataOptions(places.get("data.source"), places.get("data.root"), bool(places.get("data.download")))
    return config.model_copy(update={"data": stored_settings(config.data, told, source)})


def changed(data: dict[str, Any], changes: dict[str, Any], source: str, section: str = "train") -> Config:
    """Return the settings of a config file with changes by (dotted) key."""
    places = {tuple(key.split(".")): value for key, value in resolved(changes, section).items()}
    for path, value in places.items():
        place = data
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise GreedyNASError(f"{'.'.join(path[:-1])} in {source} is not a section")
        place[path[-1]] = value
    return validated(data, source)


def changed_section(config: Config, section: str, changes: dict[str, Any]) -> Any:
    """Return one section of a run's settings with changes. Changes to other sections are refused."""
    current = getattr(config, section)
    for key in changes:
        path = resolve_key(key, section)
        if path[0] != section:
            raise GreedyNASError(f"{'.'.join(path)} is fixed in this run; only {section}.* can be set here")
    values = {resolve_key(key, section)[1]: value for key, value in changes.items()}
    try:
        return type(current).model_validate({**current.model_dump(), **values})
    except ValidationError as error:
        raise GreedyNASError(first_problem(error, section)) from None


def validated(data: dict[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden" and problem["loc"][0] != "space":
            raise GreedyNASError(f"{source}: {_unknown_setting(key)}") from None
        raise GreedyNASError(f"{source}: {first_problem(error)}") from None


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Return values by key from assignments such as `["lr=0.1", "data.flip=false"]`. Values are read as YAML."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise GreedyNASError(f"--set takes key=value, got {assignment!r}")
        try:
            value = parse_value(text)
        except ValueError as error:
            raise GreedyNASError(f"--set {key.strip()}: cannot read the value {text!r:.100} ({error!s:.200})") from None
        if repr(changes.setdefault(key.strip(), value)) != repr(value):  # repr, because NaN does not equal itself
            raise GreedyNASError(f"--set {key.strip()} is given twice: {changes[key.strip()]!r:.60} and {value!r:.60}")
    return changes


def all_keys() -> list[str]:
    """Return the dotted names of all settings."""
    keys = []
    for name, field in Config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        keys += [name] if inner is None or name == "space" else [f"{name}.{key}" for key in inner]
    return [*keys, *(f"experimental.{name}" for name in EXPERIMENTS.names())]


def resolve_key(key: str, section: str) -> list[str]:
    keys = all_keys()
    # A bare key never means the fine-tuning of a base, which has the keys of `retrain`.
    candidates = [name for name in keys if name == key or (name.endswith(f".{key}") and not name.startswith("adapt."))]
    for exact in (key, f"{section}.{key}"):
        if exact in keys:
            return exact.split(".")
    if len(candidates) == 1:
        return candidates[0].split(".")
    if candidates:
        raise GreedyNASError(f"setting {key!r} is ambiguous: {' or '.join(candidates)}")
    head, _, name = key.partition(".")
    raise EXPERIMENTS.unknown(name) if head == "experimental" and name else GreedyNASError(_unknown_setting(key))


def resolved(changes: dict[str, Any], section: str) -> dict[str, Any]:
    """Return changes by the full names of their settings, and refuse two different values for the same setting."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        name = ".".join(resolve_key(key, section))
        if repr(found.setdefault(name, value)) != repr(value):
            raise GreedyNASError(f"{name} is set twice: {found[name]!r:.60} and {value!r:.60}")
    return found


def _unknown_setting(key: str) -> str:
    keys = all_keys()
    short = {name.rpartition(".")[2]: name for name in keys}
    near = get_close_matches(key, keys, n=1) or [short[name] for name in get_close_matches(key, list(short), n=1)]
    hint = f"; did you mean {near[0]!r}?" if near else f"; settings: {', '.join(keys)}"
    return f"unknown setting {key!r}{hint}"
