"""The `data` section of a run's settings, and a check of what the settings of an untrusted run may do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from greedynas.data.specs import located
from greedynas.runtime.errors import GreedyNASError


class DataSettings(BaseModel):
    """The section `data` of the settings: the source of the images, and how they are split and augmented.

    Example:
        >>> import greedynas
        >>> settings = greedynas.DataSettings(source="photos/", val_images=12, augment="none")
        >>> len(greedynas.open_data(settings, image_size=16).val)
        12
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = ""  # the value of --data
    root: str | None = (
        None  # for data sets by name: the folder of their files (None: ./data, or the library's own cache)
    )
    download: bool = False
    val_images: int | float = 0.1  # held out of train: a number (int) or a fraction (float)
    test_images: int | float = 0.2  # the same, used if the source has neither a test nor a validation set
    augment: Literal["none", "pad_crop", "resized_crop"] = "pad_crop"  # none: no flips either
    pad: Annotated[int, Field(ge=0)] = 4  # pixels, for pad_crop
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08  # the smallest area, for resized_crop
    flip: bool = True  # random horizontal flips
    # Evaluation resizes the shorter side to image_size / crop_fraction and takes the centre; None: 1 up to 64 px, else 0.875
    crop_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    unreadable: Literal["skip", "refuse"] = "skip"
    class_weights: Literal["none", "balanced"] = "none"
    check_duplicates: bool = True
    memory_gb: Annotated[float, Field(ge=0)] | None = (
        None  # a split that fits stays in memory; None: a share of all memory
    )
    workers: Annotated[int, Field(ge=0)] | None = None  # processes that decode; None: as many as CPUs, at most 8

    @field_validator("val_images", "test_images")
    @classmethod
    def _count_or_fraction(cls, value: int | float) -> int | float:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError("a fraction must be between 0 and 1 (write an integer for a number of images)")
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1 image, or a fraction between 0 and 1")
        return value

    def located(self) -> "DataSettings":
        """Return these settings with absolute paths."""
        source, root = located(self.source, self.root)
        return self.model_copy(update={"source": source, "root": root})


FETCHING = ("hfds", "hfids", "tfds")  # kinds of data sets that are fetched or unpacked whenever they are read
IMAGENET = "torch/imagenet"  # torchvision unpacks its archives if it finds no folders


@dataclass(frozen=True)
class DataOptions:
    """The options of the command line that are about the images of a run."""

    source: str | None = None
    root: str | None = None
    download: bool = False


def stored_settings(data: DataSettings, options: DataOptions, where: Path | str) -> DataSettings:
    """Return the settings of a run's images, read from a file, with the options of the command line.

    Raises GreedyNASError if reading the images would write or fetch something that the command line does not name.
    """
    changes = {"source": options.source, "root": options.root}
    changes = {name: value for name, value in changes.items() if value is not None}
    data = data.model_copy(update={"download": options.download, **changes})
    if not is_fetched(data) or (options.source is not None and (data.root is None or options.root is not None)):
        return data
    root = "" if data.root is None else f" --data-root {data.root}"
    raise GreedyNASError(
        f"the images of {where} are {data.source}, which would be fetched or unpacked; a file of settings may not "
        f"cause that: add --data {data.source}{root} to the command to allow it"
    )


def is_fetched(data: DataSettings) -> bool:
    """Return whether reading the images may write to the disk or use the network."""
    if data.download or data.source.partition("/")[0] in FETCHING:
        return True
    root = Path(data.root or "data")
    return data.source == IMAGENET and not ((root / "meta.bin").is_file() and (root / "train").is_dir())
