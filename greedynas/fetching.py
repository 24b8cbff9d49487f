"""What the settings in a run directory may make this machine do.

A run directory may be somebody else's, and its `config.yaml` is written by whoever packed it. Some data sets are fetched when
they are read, and written to the disk: with `data.download`, and always by the packages of Hugging Face and TensorFlow. None
of that is done because a file says so. It is done if the command line has named the images.
"""

from dataclasses import dataclass
from pathlib import Path

from greedynas.data import DataSettings
from greedynas.errors import GreedyNASError

FETCHING = ("hfds", "hfids", "tfds")  # kinds of data sets that their packages fetch, or unpack, whenever they are read
IMAGENET = "torch/imagenet"  # torchvision unpacks its archives where it finds no folders


@dataclass(frozen=True)
class Told:
    """What the command line says about the images of a run."""

    source: str | None = None
    root: str | None = None
    download: bool = False


def stored_settings(data: DataSettings, told: Told, where: Path | str) -> DataSettings:
    """Return the settings of a run's images, read from a file, with what the command line has told.

    Raises GreedyNASError if reading the images would write or fetch something that the command line does not name.
    """
    changes = {"source": told.source, "root": told.root}
    changes = {name: value for name, value in changes.items() if value is not None}
    data = data.model_copy(update={"download": told.download, **changes})
    if not is_fetched(data) or (told.source is not None and (data.root is None or told.root is not None)):
        return data
    root = "" if data.root is None else f" --data-root {data.root}"
    raise GreedyNASError(
        f"the images of {where} are {data.source}, which is fetched or unpacked when it is read; nothing is because a file "
        f"says so: add --data {data.source}{root} to the command if you want that"
    )


def is_fetched(data: DataSettings) -> bool:
    """Tell whether reading the images may write to the disk, or use the network."""
    if data.download or data.source.partition("/")[0] in FETCHING:
        return True
    root = Path(data.root or "data")
    return data.source == IMAGENET and not ((root / "meta.bin").is_file() and (root / "train").is_dir())
