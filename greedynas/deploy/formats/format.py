"""The interface of export formats, which convert a trained network into files and run these in their own runtime.

`greedynas export` converts the network, compares the reference precision with PyTorch on real images, measures accuracy
and latency, and records all of it. This is a complete format of a plugin:

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from greedynas.deploy.formats import FORMATS
from greedynas.deploy.runtimes.model import RuntimeModel, timed
from greedynas.deploy.sandbox.process import ModelProcess, Runtime
from greedynas.deploy.timing import Runner
from greedynas.models.model_file import Card, parse_card
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_bytes
from greedynas.runtime.packages import missing_packages, require_packages

CARD = "model.json"  # the card of formats whose files cannot contain it

Classifier = Callable[
    [Tensor], Tensor
]  # any number of inputs, float32 (n, channels, size, size) -> logits (n, classes)


@dataclass(frozen=True)
class Conversion:
    """A network that is converted to a format in one or more precisions.

    Attributes:
        network: The network, on the CPU and in evaluation mode.
        card: The card with the architecture, the classes and the preprocessing.
        calibration: A function that returns batches of training images, always the same ones, for quantisation.
        cache: Intermediate results that several precisions and formats share (`shared.py`), by names that begin with the
            name of the format.

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

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of one input."""
        return 1, self.card.image_channels, self.card.image_size, self.card.image_size


class Format(ABC):
    """The base class of export formats: a kind of file for trained networks, and the runtime for it.

    Attributes:
        name: The name for `--format`.
        suffix: The suffix of its files, in lower case, with the dot. `greedynas predict` recognises files by it.
        precisions: The precisions in which files are written. The first one is the reference, which is compared with
            PyTorch and must succeed. Others are left out if the conversion fails.
        packages: The packages that its runtime needs besides greedynas: the requirement for pip by the name of the import.
        converters: The packages that only the conversion needs.
        advice: What a user should know who installs the converters, as part of a message.
        runtime_name: The name of its runtime, for users.
        published: Whether the reference file of the chosen network is also written to the top of the run directory.
        card: Where the card is: "inside" the files, "beside" them as `model.json`, or "both".
        is_pytorch: Whether its runtime is PyTorch, so that a comparison is pointless.
        executes_code: Whether a file can execute code when it is opened. `greedynas predict` then asks for `--trust`.
        sandbox: The runtime that opens untrusted files in a process of their own; None: `load` opens them here.

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
    converters: ClassVar[Mapping[str, str]] = {}
    advice: ClassVar[str] = ""
    runtime_name: ClassVar[str] = ""
    published: ClassVar[bool] = False
    card: ClassVar[Literal["beside", "inside", "both"]] = "beside"
    is_pytorch: ClassVar[bool] = False
    executes_code: ClassVar[bool] = False
    sandbox: ClassVar[Runtime | None] = None

    @property
    @final
    def reference(self) -> str:
        """The precision that is compared with PyTorch."""
        return self.precisions[0]

    def file_name(self, precision: str) -> str:
        """Return the name of the file of a precision, which begins with `model.`."""
        return f"model{self.suffix}" if precision == self.reference else f"model.{precision}{self.suffix}"

    def companions(self, precision: str) -> tuple[str, ...]:
        """Return the names of additional files that are written beside the file of a precision."""
        return tuple(part.name for part in self.parts(Path(self.file_name(precision))))

    def parts(self, file: Path) -> tuple[Path, ...]:
        """Return the additional files that belong to a file of this format, whatever its name."""
        return ()

    @abstractmethod
    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        """Write the file of a precision and its companions, each atomically (`write_atomically`).

        Args:
            source: The network.
            precision: One of `precisions`. The reference comes first.
            file: The file, whose name is `file_name(precision)`.

        Raises:
            GreedyNASError: The network cannot be converted. A precision other than the reference is left out after any
                exception.
        """

    def open(self, file: Path, threads: int | None = None) -> Classifier | None:
        """Open a newly converted file in the format's own runtime on the CPU.

        By default, the model of `sandbox` opens it, in this process.

        Args:
            file: The file.
            threads: The number of CPU threads; None: the runtime's default.

        Returns:
            A function that takes any number of inputs and returns logits; None if this machine cannot run the file,
            which is then exported without being run.
        """
        model = self._opened(file, threads)
        return lambda images: torch.from_numpy(model.run(images.contiguous().numpy()))

    def _opened(self, file: Path, threads: int | None) -> RuntimeModel:
        if self.sandbox is None:
            raise NotImplementedError(f"the format {self.name!r} needs a method `open`")
        model: RuntimeModel = import_module(self.sandbox.module).Model(file, file.name)
        model.open(threads or 0)
        return model

    @abstractmethod
    def runtime(self) -> str:
        """Return the name and the version of the runtime, such as "onnxruntime 1.30.0"."""

    def runner(self, file: Path, image: Tensor, threads: int) -> Runner | None:
        """Return a function that runs a file once on one image and returns the milliseconds.

        Args:
            file: The file.
            image: One input, (1, channels, size, size).
            threads: The number of CPU threads.

        Returns:
            The function, which by default times the result of `open`; None if the file cannot be run or its latency has
            no meaning.
        """
        if self.sandbox is not None:
            return timed(self._opened(file, threads).once(image.contiguous().numpy()))
        classify = self.open(file, threads)
        if classify is None:
            return None
        return timed(lambda: classify(image))

    def load(self, file: Path, threads: int | None = None) -> tuple[Classifier, Card]:
        """Open an untrusted file for predictions.

        Formats with a `sandbox` open it in a process that is limited and cannot write files.

        Args:
            file: The file.
            threads: The number of CPU threads; None: the runtime's default.

        Returns:
            A function that takes inputs and returns logits, and the card, by default from `model.json` beside the file.

        Raises:
            GreedyNASError: There is no card, it does not fit the file, or this machine cannot run the file.
        """
        beside = file.with_name(CARD)
        if not beside.is_file():
            raise GreedyNASError(f"{file} has no card: {CARD} should lie beside it")
        card = parse_card(read_bytes(beside).decode("utf-8", errors="replace"), beside)
        opened = self._here(file, threads) if self.sandbox is None else self._in_process(file, card, threads)

        def classify(inputs: Tensor) -> Tensor:
            logits = opened(inputs)
            if tuple(logits.shape) != (len(inputs), len(card.class_names)):
                raise GreedyNASError(
                    f"{file} does not fit its card: it gives no logits of {len(card.class_names)} classes"
                )
            return logits

        return classify, card

    def _here(self, file: Path, threads: int | None) -> Classifier:
        """Open a file in this process; whatever its runtime raises becomes one line."""
        name = self.runtime_name or self.name
        if not file.is_file() and not file.is_dir():  # such as a pipe, which would be read for ever
            raise GreedyNASError(f"no such model: {file}")

        def guarded(run: Callable[[], Any]) -> Any:
            try:
                return run()
            except GreedyNASError:
                raise
            except Exception as error:  # runtimes raise types without a common base
                line = " ".join(str(error).split()) or type(error).__name__
                raise GreedyNASError(f"{name} cannot run {file}: {line:.200}") from None

        classify = guarded(lambda: self.open(file, threads))
        if classify is None:
            raise GreedyNASError(f"this machine cannot run {file}: it has no {name}")
        return lambda inputs: guarded(lambda: classify(inputs))

    def _in_process(self, file: Path, card: Card, threads: int | None) -> Classifier:
        assert self.sandbox is not None
        process = ModelProcess(file, self.sandbox, threads or torch.get_num_threads(), self.parts(file))
        process.open(card.image_channels, card.image_size, len(card.class_names))
        return lambda inputs: torch.from_numpy(process.classify(inputs.contiguous().numpy()))

    @final
    def is_installed(self, converting: bool = False) -> bool:
        """Return whether the packages of this format are installed; `converting` also needs converters."""
        return not missing_packages({**self.packages, **(self.converters if converting else {})})

    def check_packages(self, converting: bool = False) -> None:
        """Raise a GreedyNASError if packages of this format are not installed; `converting` also needs converters."""
        packages = {**self.packages, **(self.converters if converting else {})}
        require_packages(f"the format {self.name!r}", packages, self.advice if converting else "")


def make_format(name: str, converting: bool = False) -> Format:
    """Return the format with this name.

    Args:
        name: A name in `FORMATS`.
        converting: Whether the packages of its converter are needed, too.

    Returns:
        The format, whose packages are installed.

    Raises:
        GreedyNASError: There is no such format, its name differs from the registered one, or a package is missing.
    """
    made: Format = FORMATS[name]()
    if made.name != name:
        raise GreedyNASError(f"the format that is registered as {name!r} calls itself {made.name!r}")
    made.check_packages(converting)
    return made


def known_formats() -> Iterator[Format]:
    """Yield every format that can be loaded, built-in ones first. Their packages may be missing."""
    for name in FORMATS.names():
        with suppress(GreedyNASError):  # a plugin's format that cannot be loaded
            yield FORMATS[name]()


def format_of(file: Path) -> Format | None:
    """Return the format of a file by its suffix, or None if no format has this suffix."""
    return next((format for format in known_formats() if file.name.lower().endswith(format.suffix)), None)
