"""The run directory: configuration, log, metrics, checkpoints. Loading it executes nothing that it contains."""

from pathlib import Path
from typing import Any

import torch
import yaml

from greedynas._version import __version__
from greedynas.data.datasets import Data, open_data
from greedynas.data.manifest import FILE as MANIFEST
from greedynas.data.manifest import read_manifest, refuse_other_identity, times_changed, write_manifest
from greedynas.data.settings import DataOptions, DataSettings, stored_settings
from greedynas.data.specs import FORMS, at_home, names_a_folder
from greedynas.greedy.samplers.sampler import make_sampler
from greedynas.models.shared_supernet import SharedSupernet
from greedynas.models.supernet import Supernet, fresh_supernet
from greedynas.rundir.run_directory import RunDirectory, differences, flatten, refuse_links, versions
from greedynas.rundir.schemas import VERSIONS
from greedynas.runtime import engine_mode
from greedynas.runtime.cpu.threads import fix_threads
from greedynas.runtime.devices import choose_device, cpu_has_bf16, prepare
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import TEMPORARY, read_json, write_atomically
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger as logger
from greedynas.runtime.yaml_files import read_yaml
from greedynas.settings.experiments import hooks_of
from greedynas.settings.loading import validated
from greedynas.settings.schema import Config

SCHEMA_VERSION = VERSIONS["run"]
# Settings that do not affect the results: they may differ when a run is resumed.
FREE = {"train.checkpoint_minutes", "train.checkpoint_steps", "train.keep_checkpoints", "data.workers", "device"}
FREE |= {"train.log_every", "train.accuracy_images"}
FREE |= {"threads", "callbacks", "data.root", "data.download"}  # `check_data` compares the images, not their folders


class Run(RunDirectory):
    """A run on disk, with its settings and the identity of its images."""

    named = DataOptions()  # the data settings of the command line

    @classmethod
    def start(cls, folder: Path, config: Config) -> "Run":
        """Start a run, or resume the one in the directory; settings that differ from its own are listed and refused."""
        _refuse_other_ranks(folder, config)
        if not ranks.is_first():
            return cls(folder)
        ours = {".lock", "log.txt", "config.yaml", f"config.yaml{TEMPORARY}", "plan.json", f"plan.json{TEMPORARY}"}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            refuse_links(folder)
            if not (folder / "config.yaml").exists() and {entry.name for entry in folder.iterdir()} - ours:
                raise GreedyNASError(f"{folder} is not empty and not a greedynas run; choose another --out")
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
    def open(cls, folder: Path, named: DataOptions | None = None) -> "Run":
        """Open an existing run; `named` are the data settings of the command line."""
        _refuse_other_ranks(folder, read_run_config(folder))
        run = cls(folder)
        run.named = named or DataOptions()
        return run

    def config(self) -> Config:
        return read_config(self.folder)

    def image_settings(self) -> DataSettings:
        """Return the data settings of this run, combined with those of the command line."""
        return stored_settings(self.config().data, self.named, self.folder)

    def check_data(self, data: Data) -> None:
        """Refuse other images than those that the run was started with; a new run records them in its manifest."""
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
        """Refuse other labels than those of a run of an older version, and warn if there is no record at all."""
        before, now = read_json(self.folder / "data.json"), data.labels_identity()
        changed = differences({key: before.get(key) for key in now}, now) if before else {}
        if changed:
            raise GreedyNASError(
                f"the data has changed since {self.folder} was started ({'; '.join(changed.values())}): restore it, "
                "or choose another --out"
            )
        if not before and (self.folder / "supernet").exists():
            logger.warning(
                "%s is missing, so nothing tells whether these are the images that the run was started with",
                self.folder / MANIFEST,
            )


def _refuse_other_ranks(folder: Path, config: Config) -> None:
    """Refuse ranks with another run directory or other settings.

    Machines may have the images in different folders: `refuse_other_machines` compares the images.
    """
    facts = {"run directory": str(folder.absolute()), **flattened(config)}
    if names_a_folder(config.data.source):
        facts = {key: value for key, value in facts.items() if not key.endswith(("data.source", "data.root"))}
    ranks.refuse_difference(facts, f"give every machine the same files, and the same {folder}")


def read_run_config(folder: Path) -> Config:
    """Return the settings of a run, without taking its lock."""
    if not (folder / "config.yaml").is_file():
        raise GreedyNASError(f"{folder} is not a run directory (it has no config.yaml); make one with greedynas train")
    return read_config(folder)


def read_config(folder: Path) -> Config:
    data = read_yaml(folder / "config.yaml", "config file")
    if "schema_version" not in data:
        raise GreedyNASError(f"{folder} is not a run directory (its config.yaml is not that of a greedynas run)")
    if data.pop("schema_version") != SCHEMA_VERSION:
        raise GreedyNASError(
            f"{folder} was made by greedynas {_version_in(data)}, whose runs this version ({__version__}) cannot "
            "resume: use that version, or start a new run in another --out"
        )
    data.pop("versions", None)
    config = validated(data, f"{folder}/config.yaml")
    # A run directory may come from another person: only the command line can allow downloads.
    return config.model_copy(update={"data": config.data.model_copy(update={"download": False})})


def _version_in(data: dict[str, Any]) -> str:
    """Return the version in a config of unknown structure."""
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
    """Refuse machines whose images differ from those of the first one; one rank of each machine has read them."""
    digest = data.identity()["digest"] if ranks.local_rank() == 0 else None
    if len({seen for seen in ranks.gather_values(digest) if seen is not None}) > 1:
        raise GreedyNASError("the machines of this run do not have the same images: give each of them the same files")


def refuse_differences(folder: Path, old: Config, new: Config) -> None:
    # Further searches and models only add to a run.
    extends = ("search.", "retrain.")
    changed = differences(old.model_dump(mode="json"), new.model_dump(mode="json"))
    if names_a_folder(old.data.source) and names_a_folder(new.data.source):
        changed.pop("data.source", None)  # the images are compared, not their folders
    refused = "; ".join(text for key, text in changed.items() if key not in FREE and not key.startswith(extends))
    if refused:
        raise GreedyNASError(
            f"{folder} holds a run with other settings: {refused:.600}. Choose another --out, or use the same settings"
        )


def flattened(config: Config) -> dict[str, Any]:
    """Return the settings by their dotted names."""
    return dict(flatten(config.model_dump(mode="json")))


def supernet_of(config: Config, num_classes: int, device: torch.device) -> Supernet:
    """Return a supernet with its initial weights, to train it or to load the weights of a run into it."""
    space, kind = config.space.adapt(num_classes=num_classes), hooks_of(config.experimental).supernet
    wanted = make_sampler(config.train.sampler).supernet
    if space.base is not None or wanted is SharedSupernet:  # the ops of a layer are slices of one block
        kind = SharedSupernet
    net = fresh_supernet(space, config.seed, kind=kind, zero_residuals=config.train.zero_residuals)
    return net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def read_data(config: Config, device: torch.device, folder: Path | None = None) -> Data:
    """Open the images of a configuration; a run in `folder` accepts only the images that it was started with."""
    if not config.data.source:
        raise GreedyNASError(f"name the data with --data: {FORMS}")
    if folder is not None:
        refuse_nesting(config.data.source, folder)
        refuse_moved(config.data.source, folder)
    return open_data(
        config.data,
        space=config.space,
        seed=config.seed,
        device=device,
        folder=folder,
    )


def refuse_nesting(source: str, folder: Path) -> None:
    """Refuse a run directory inside of the images, where its files might be read as images, and the reverse."""
    if not names_a_folder(source) or not (images := at_home(source)).is_dir():
        return
    images, run = images.resolve(), folder.resolve()
    if run.is_relative_to(images):
        raise GreedyNASError(f"--out {folder} lies inside of --data {source}: name a directory outside of the images")
    if images.is_relative_to(run):
        raise GreedyNASError(f"--data {source} lies inside of --out {folder}: name a directory that holds no images")


def refuse_moved(source: str, folder: Path) -> None:
    """Refuse a run whose images are no longer in their folder, and say what to do."""
    if names_a_folder(source) and (folder / "config.yaml").is_file() and not at_home(source).exists():
        raise GreedyNASError(
            f"the images of {folder} are not in {source}: move them back, or repeat its train (or run) command with "
            "--data and their new folder (search, retrain and export take --data too)"
        )


def read_run_data(run: Run, config: Config, device: torch.device) -> Data:
    """Open the images of a run, which may come from another person: only what the command line names is downloaded."""
    return read_data(config.model_copy(update={"data": run.image_settings()}), device, run.folder)


def choose_precisions(config: Config, device: torch.device) -> tuple[str, str]:
    """Return the precisions of training and evaluation.

    `auto` means bf16 on GPUs and on CPUs that compute in it, otherwise fp32. With plain PyTorch (`engine: off`), training in
    bf16 is slower than in fp32 on a CPU.
    """
    native = device.type == "cuda" or (device.type == "cpu" and cpu_has_bf16())
    quick = native and (device.type == "cuda" or config.engine != "off")
    training = config.precision if config.precision != "auto" else ("bf16" if quick else "fp32")
    evaluation = config.eval_precision if config.eval_precision != "auto" else ("bf16" if native else "fp32")
    return training, evaluation


def set_up(config: Config) -> torch.device:
    """Set this process up as the settings say, and return the device."""
    device = choose_device(config.device)
    engine_mode.use(config.engine)
    if config.threads is not None:
        fix_threads(config.threads)
    prepare(device)
    return device
