"""The run directory: configuration, log, metrics, checkpoints. Nothing in it is executed when it is loaded."""

from pathlib import Path
from typing import Any

import torch
import yaml

from greedynas._version import __version__
from greedynas.data.datasets import Data, open_data
from greedynas.data.manifest import read_manifest, refuse_other_identity, times_changed, write_manifest
from greedynas.data.settings import DataSettings, Told, stored_settings
from greedynas.data.specs import FORMS, at_home, names_a_folder
from greedynas.models.supernet import Supernet, fresh_supernet
from greedynas.rundir.run_directory import RunDirectory, differences, flatten, refuse_links, versions
from greedynas.rundir.schemas import VERSIONS
from greedynas.runtime.devices import cpu_has_bf16
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import TEMPORARY, read_json, write_atomically
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger as logger
from greedynas.runtime.yaml_files import read_yaml
from greedynas.settings.experiments import hooks_of
from greedynas.settings.loading import validated
from greedynas.settings.schema import Config

SCHEMA_VERSION = VERSIONS["run"]
# Settings that do not change what is computed: they may differ when a run is resumed.
FREE = {"train.checkpoint_minutes", "train.checkpoint_steps", "train.keep_checkpoints", "data.workers", "device"}
FREE |= {"callbacks", "data.root", "data.download"}  # where images lie does not count: `check_data` compares the images


class Run(RunDirectory):
    """One run on disk, with its settings and the identity of its images."""

    named = Told()  # what the command line says about the images

    @classmethod
    def start(cls, folder: Path, config: Config) -> "Run":
        """A new run, or the same one again: other settings in a directory that has a run are refused with a list."""
        _refuse_other_ranks(folder, config)
        if not ranks.is_first():
            return cls(folder)
        ours = {".lock", "log.txt", "config.yaml", f"config.yaml{TEMPORARY}"}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            refuse_links(folder)
            if not (folder / "config.yaml").exists() and {entry.name for entry in folder.iterdir()} - ours:
                raise GreedyNASError(f"{folder} is not empty and not a greedynas run; name another --out")
            (folder / ".lock").touch()
        except OSError as error:
            raise GreedyNASError(f"cannot write to {folder}: {error.strerror}") from None
        run = cls(folder)
        try:
            if (folder / "config.yaml").exists():
                refuse_differences(folder, run.config(), config)
            write_atomically(folder / "config.yaml", config_text(config).encode())
            run._checkpoints.keep = config.train.keep_checkpoints
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, folder: Path, named: Told | None = None) -> "Run":
        """A run that exists; `named` is what the command line says about its images."""
        _refuse_other_ranks(folder, read_run_config(folder))
        run = cls(folder)
        run.named = named or Told()
        return run

    def config(self) -> Config:
        return read_config(self.folder)

    def image_settings(self) -> DataSettings:
        """Return how the images of this run are read, by its own settings and the command line."""
        return stored_settings(self.config().data, self.named, self.folder)

    def check_data(self, data: Data) -> None:
        """Refuse other images than the run began with; what they are is written down when it begins."""
        refuse_other_machines(data)
        if not ranks.is_first():
            return
        kept = read_manifest(self.folder)
        if kept is None:
            self._check_labels(data)
        else:
            refuse_other_identity(kept, data.manifest, self.folder)
        if kept is None or times_changed(kept, data.manifest):
            write_manifest(self.folder, data.manifest)

    def _check_labels(self, data: Data) -> None:
        """All that a run of an older version can be compared by."""
        before, now = read_json(self.folder / "data.json"), data.labels_identity()
        changed = differences({key: before.get(key) for key in now}, now) if before else {}
        if changed:
            raise GreedyNASError(
                f"the data is not the same as when {self.folder} was begun ({'; '.join(changed.values())}): bring it back, "
                "or name another --out"
            )


def _refuse_other_ranks(folder: Path, config: Config) -> None:
    """All ranks of a run must have the same directory and the same settings.

    Images may lie in another folder on another machine: they are compared themselves (`refuse_other_machines`).
    """
    facts = {"run directory": str(folder.absolute()), **flattened(config)}
    if names_a_folder(config.data.source):
        facts = {key: value for key, value in facts.items() if not key.endswith(("data.source", "data.root"))}
    ranks.refuse_difference(facts, f"give every machine the same files, and the same {folder}")


def read_run_config(folder: Path) -> Config:
    """The settings of a run, without taking its lock."""
    if not (folder / "config.yaml").is_file():
        raise GreedyNASError(f"{folder} is not a run directory (it has no config.yaml); greedynas train makes one")
    return read_config(folder)


def read_config(folder: Path) -> Config:
    data = read_yaml(folder / "config.yaml", "config file")
    if data.pop("schema_version", None) != SCHEMA_VERSION:
        raise GreedyNASError(
            f"{folder} was made by greedynas {_version_in(data)}, whose run directories this one ({__version__}) cannot go on "
            "with: use that version, or begin the run anew in another --out"
        )
    data.pop("versions", None)
    config = validated(data, f"{folder}/config.yaml")
    # A run directory may be somebody else's: it is the command line that allows downloads.
    return config.model_copy(update={"data": config.data.model_copy(update={"download": False})})


def _version_in(data: dict[str, Any]) -> str:
    """Return the version that a config names, of which nothing is known but that it is YAML."""
    versions = data.get("versions")
    return (
        str(versions.get("greedynas", "of another version"))[:40]
        if isinstance(versions, dict)
        else "of another version"
    )


def config_text(config: Config) -> str:
    data = {"schema_version": SCHEMA_VERSION, **config.model_dump(mode="json"), "versions": versions()}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def refuse_other_machines(data: Data) -> None:
    """Refuse machines with other images than the first one has. One rank of each has read them."""
    digest = data.identity()["digest"] if ranks.local_rank() == 0 else None
    if len({seen for seen in ranks.gather_words(digest) if seen is not None}) > 1:
        raise GreedyNASError("the machines of this run do not have the same images: give each of them the same files")


def refuse_differences(folder: Path, old: Config, new: Config) -> None:
    # Other searches and other models only add to a run.
    extends = ("search.", "retrain.")
    changed = differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    if names_a_folder(old.data.source) and names_a_folder(new.data.source):
        changed.pop("data.source", None)  # the images are compared, not where they lie
    told = "; ".join(text for key, text in changed.items() if key not in FREE and not key.startswith(extends))
    if told:
        raise GreedyNASError(
            f"{folder} holds a run with other settings: {told:.600}. Name another --out, or use the same settings"
        )


def flattened(config: Config) -> dict[str, Any]:
    """Return the settings by their dotted names."""
    return dict(flatten(config.model_dump(mode="json")))


def supernet_of(config: Config, num_classes: int, device: torch.device) -> Supernet:
    """What training starts from, or what weights of a run are loaded into."""
    space, kind = config.space.adapt(num_classes=num_classes), hooks_of(config.experimental).supernet
    net = fresh_supernet(space, config.seed, kind=kind, zero_residuals=config.train.zero_residuals)
    return net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def read_data(config: Config, device: torch.device, folder: Path | None = None) -> Data:
    """Open the images of a configuration; those of the run in `folder`, if there is one, must be the ones it began with."""
    if not config.data.source:
        raise GreedyNASError(f"name the data with --data: {FORMS}")
    if folder is not None:
        refuse_nesting(config.data.source, folder)
        refuse_moved(config.data.source, folder)
    return open_data(
        config.data,
        image_size=config.space.image_size,
        image_channels=config.space.image_channels,
        seed=config.seed,
        device=device,
        folder=folder,
    )


def refuse_nesting(source: str, folder: Path) -> None:
    """Refuse a run directory among the images, where its files would be taken for some, and images inside of one."""
    if not names_a_folder(source) or not (images := at_home(source)).is_dir():
        return
    images, run = images.resolve(), folder.resolve()
    if run.is_relative_to(images):
        raise GreedyNASError(f"--out {folder} lies inside of --data {source}: name a directory outside of the images")
    if images.is_relative_to(run):
        raise GreedyNASError(f"--data {source} lies inside of --out {folder}: name a directory that holds no images")


def refuse_moved(source: str, folder: Path) -> None:
    """Say what to do where the images of a run are not in their place any more."""
    if names_a_folder(source) and (folder / "config.yaml").is_file() and not at_home(source).exists():
        raise GreedyNASError(
            f"the images of {folder} are not in {source}: bring them back, or give its train (or run) command again with "
            "--data and the place where they are now (search, retrain and export take --data too)"
        )


def read_run_data(run: Run, config: Config, device: torch.device) -> Data:
    """Open the images of a run directory, which may be somebody else's: nothing is fetched that the command line did not name."""
    return read_data(config.model_copy(update={"data": run.image_settings()}), device, run.folder)


def choose_precisions(config: Config, device: torch.device) -> tuple[str, str]:
    """(training, evaluation). bf16 where it pays: on GPUs, and for evaluation on CPUs that compute in it."""
    training = config.precision if config.precision != "auto" else ("bf16" if device.type == "cuda" else "fp32")
    if config.eval_precision != "auto":
        return training, config.eval_precision
    return training, "bf16" if device.type == "cuda" or (device.type == "cpu" and cpu_has_bf16()) else "fp32"
