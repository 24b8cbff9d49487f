"""The `data` section of a run's settings, and what the settings of a stranger's run may make this machine do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from greedynas.data.specs import located
from greedynas.runtime.errors import GreedyNASError


class DataSettings(BaseModel):
    """The section `data` of the settings: where images come from, how they are split and augmented.

    Example:
        >>> import greedynas
        >>> settings = greedynas.DataSettings(source="photos/", val_images=12, augment="none")
        >>> len(greedynas.open_data(settings, image_size=16).val)
        12
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = ""  # what --data said
    root: str | None = None  # of data sets by name: where the files are (None: ./data, or the library's own cache)
    download: bool = False
    val_images: int | float = 0.1  # held out of train: how many (an int) or which fraction (a float)
    test_images: int | float = 0.2  # likewise, if the source has neither a test nor a validation set
    augment: Literal["none", "pad_crop", "resized_crop"] = "pad_crop"  # none: no flips either
    pad: Annotated[int, Field(ge=0)] = 4  # pixels, of pad_crop
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08  # the smallest area, of resized_crop
    flip: bool = True  # left to right, at random
    # Evaluation resizes the shorter side to image_size / crop_fraction and takes the centre; None: 1 up to 64 px, else 0.875
    crop_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    unreadable: Literal["skip", "refuse"] = "skip"
    class_weights: Literal["none", "balanced"] = "none"
    check_duplicates: bool = True
    memory_gb: Annotated[float, Field(ge=0)] | None = None  # a split that fits stays in memory; None: a share of all
    workers: Annotated[int, Field(ge=0)] | None = None  # processes that decode; None: as many as CPUs, at most 8

    @field_validator("val_images", "test_images")
    @classmethod
    def _count_or_fraction(cls, value: int | float) -> int | float:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError("a fraction lies between 0 and 1 (write an integer for a number of images)")
        if isinstance(value, int) and value < 1:
            raise ValueError("at least 1 image, or a fraction between 0 and 1")
        return value

    def located(self) -> "DataSettings":
        """Return these settings with paths that mean the same from every directory."""
        source, root = located(self.source, self.root)
        return self.model_copy(update={"source": source, "root": root})


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
