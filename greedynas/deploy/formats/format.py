"""What an export format is: it converts a trained network into files, and runs them in the format's own runtime.

`greedynas export` converts, compares the reference precision with PyTorch on real images, measures accuracy and latency, and
records all of it. A format of a plugin needs no more than this:

    from greedynas.deploy.formats import FORMATS
    from greedynas.deploy.formats.format import Format

    class ExportedProgram(Format):
        name, suffix, runtime_name = "torch_export", ".pt2", "torch.export"

        def convert(self, source, precision, file):
            images, buffer = next(source.calibration())[:2], io.BytesIO()
            program = torch.export.export(source.network, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
            torch.export.save(program, buffer)
            write_atomically(file, buffer.getvalue())

        def open(self, file, threads=None):
            return torch.inference_mode()(torch.export.load(file).module())

        def runtime(self):
            return f"torch {torch.__version__}"

    FORMATS.register("torch_export", ExportedProgram)
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from torch import Tensor, nn

from greedynas.deploy.formats import FORMATS
from greedynas.deploy.timing import Runner
from greedynas.models.model_file import Card, parse_card
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_bytes
from greedynas.runtime.packages import require_packages

CARD = "model.json"  # the card beside the files of formats that cannot hold it

Classifier = Callable[
    [Tensor], Tensor
]  # any number of inputs, float32 (n, channels, size, size) -> logits (n, classes)


@dataclass(frozen=True)
class Conversion:
    """A network that is to be converted to a format, precision after precision.

    Attributes:
        network: The network, on the CPU and in evaluation mode.
        card: What the network is, what its outputs mean, and how images become its input.
        calibration: Returns batches of training images as the network gets them, always the same ones: for quantisation.
        cache: What the conversions to several precisions have in common, under names of the format's choice.

    Example:
        >>> import greedynas
        >>> network, card = greedynas.load_network("runs/photos")
        >>> source = greedynas.Conversion(network, card, calibration=lambda: iter(()))
        >>> source.card.image_size
        16
    """

    network: nn.Module
    card: Card
    calibration: Callable[[], Iterator[Tensor]]
    cache: dict[str, Any] = field(default_factory=dict)


class Format(ABC):
    """A kind of file that holds a trained network, and the runtime that runs it.

    Attributes:
        name: What `--format` calls it.
        suffix: How the names of its files end, in lower case, with the dot. `greedynas predict` knows files by it.
        precisions: The precisions in which it is written. The first one is the reference, which is compared with PyTorch;
            without it there is no export. Others are left out where they cannot be made.
        packages: What it needs besides greedynas: what pip installs, by the name that is imported.
        runtime_name: What people call its runtime.
        published: Whether the reference file of the chosen network is also put at the top of the run directory.
        card: Where the card is: "inside" the files, "beside" them as `model.json`, or "both".
        is_pytorch: Whether its runtime is PyTorch itself, so that there is nothing to compare.

    Example:
        >>> import greedynas, torch
        >>> class Exported(greedynas.Format):
        ...     name, suffix = "exported", ".pt2"
        ...     def convert(self, source, precision, file):
        ...         image = torch.zeros(1, source.card.image_channels, source.card.image_size, source.card.image_size)
        ...         torch.export.save(torch.export.export(source.network, (image,)), file)
        ...     def open(self, file, threads=None):
        ...         return torch.export.load(file).module()
        ...     def runtime(self):
        ...         return f"torch {torch.__version__}"
        >>> Exported().file_name("fp32")
        'model.pt2'
    """

    name: str
    suffix: str
    precisions: ClassVar[tuple[str, ...]] = ("fp32",)
    packages: ClassVar[Mapping[str, str]] = {}
    runtime_name: ClassVar[str] = ""
    published: ClassVar[bool] = False
    card: ClassVar[Literal["beside", "inside", "both"]] = "beside"
    is_pytorch: ClassVar[bool] = False

    @property
    @final
    def reference(self) -> str:
        """Return the precision that is compared with PyTorch."""
        return self.precisions[0]

    def file_name(self, precision: str) -> str:
        """Return the name of the file of a precision; it begins with `model.`."""
        return f"model{self.suffix}" if precision == self.reference else f"model.{precision}{self.suffix}"

    def companions(self, precision: str) -> tuple[str, ...]:
        """Return the names of further files that belong to the file of a precision and are written beside it."""
        return ()

    @abstractmethod
    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        """Write the file of a precision, and its companions beside it, each atomically (`write_atomically`).

        Args:
            source: The network.
            precision: One of `precisions`. The reference comes first.
            file: The file, whose name is `file_name(precision)`.

        Raises:
            GreedyNASError: The network cannot be converted. Of precisions other than the reference, any exception leaves the
                precision out.
        """

    @abstractmethod
    def open(self, file: Path, threads: int | None = None) -> Classifier | None:
        """Open a file that was just converted, in the format's own runtime on the CPU.

        Args:
            file: The file.
            threads: CPU threads; None: as many as the runtime likes.

        Returns:
            What turns any number of inputs into logits; None where this machine cannot run the file, which then is
            converted and not run.
        """

    @abstractmethod
    def runtime(self) -> str:
        """Return the name and the version of the runtime, such as "onnxruntime 1.30.0"."""

    def runner(self, file: Path, image: Tensor, threads: int) -> Runner | None:
        """Return what runs a file once on one image and returns milliseconds.

        Args:
            file: The file.
            image: One input, (1, channels, size, size).
            threads: CPU threads.

        Returns:
            The runner, here one that times what `open` returns; None where the file cannot be run or has no latency of its
            own.
        """
        classify = self.open(file, threads)
        if classify is None:
            return None

        def run() -> float:
            start = time.perf_counter_ns()
            classify(image)
            return (time.perf_counter_ns() - start) / 1e6

        return run

    def load(self, file: Path, threads: int | None = None) -> tuple[Classifier, Card]:
        """Open a file that may be somebody else's, for predictions.

        Formats whose files can do harm in their runtime replace this by something that limits it, as ONNX does.

        Args:
            file: The file.
            threads: CPU threads; None: as many as the runtime likes.

        Returns:
            What turns inputs into logits, and the card, here that of `model.json` beside the file.

        Raises:
            GreedyNASError: There is no card, it does not fit the file, or this machine cannot run the file.
        """
        beside = file.with_name(CARD)
        if not beside.is_file():
            raise GreedyNASError(f"{file} has no card: {CARD} should lie beside it")
        card = parse_card(read_bytes(beside).decode("utf-8", errors="replace"), beside)
        opened = self.open(file, threads)
        if opened is None:
            raise GreedyNASError(f"this machine cannot run {file}: it has no {self.runtime_name or self.name}")

        def classify(inputs: Tensor) -> Tensor:
            logits = opened(inputs)
            if tuple(logits.shape) != (len(inputs), len(card.class_names)):
                raise GreedyNASError(
                    f"{file} does not fit its card: it gives no logits of {len(card.class_names)} classes"
                )
            return logits

        return classify, card

    @final
    def check_packages(self) -> None:
        """Refuse this format in one line if its packages are not installed."""
        require_packages(f"the format {self.name!r}", self.packages)


def make_format(name: str) -> Format:
    """Return the format of this name.

    Args:
        name: A name in `FORMATS`.

    Returns:
        The format, whose packages are installed.

    Raises:
        GreedyNASError: There is no such format, it has another name than it is registered under, or a package is missing.
    """
    made: Format = FORMATS[name]()
    if made.name != name:
        raise GreedyNASError(f"the format that is registered as {name!r} calls itself {made.name!r}")
    made.check_packages()
    return made


def known_formats() -> Iterator[Format]:
    """Yield every format that can be loaded, those that ship first. Their packages may be missing."""
    for name in FORMATS.names():
        with suppress(GreedyNASError):  # of somebody's package that does not work
            yield FORMATS[name]()


def format_of(file: Path) -> Format | None:
    """Return the format of a file by the suffix of its name; None where no format has such files."""
    return next((format for format in known_formats() if file.name.lower().endswith(format.suffix)), None)
