"""Conversions that several formats start from, made once per export."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch

from greedynas.deploy.formats.format import Conversion
from greedynas.deploy.onnx_files import make_onnx
from greedynas.runtime import signals

if TYPE_CHECKING:
    import onnx


def shared_onnx(source: Conversion) -> "onnx.ModelProto":
    """Return the network as ONNX in fp32 for any number of images. It must not be changed."""
    if "onnx" not in source.cache:
        source.cache["onnx"] = make_onnx(source.network, source.card)
    return source.cache["onnx"]


def shared_program(source: Conversion) -> Any:
    """Return the network as an exported program of PyTorch for one image. It must not be changed."""
    if "program" not in source.cache:
        with silenced():
            source.cache["program"] = torch.export.export(source.network, (example(source),))
    return source.cache["program"]


def example(source: Conversion, images: int = 1) -> torch.Tensor:
    """Return an input of zeros for a network."""
    return torch.zeros(images, *source.shape[1:])


def each_image(source: Conversion) -> Iterator[torch.Tensor]:
    """Yield the calibration images one by one, (1, channels, size, size)."""
    for batch in source.calibration():
        yield from batch.split(1)


@contextmanager
def silenced() -> Iterator[None]:
    """Hide the output and the warnings of a converter, compute no gradients, and let no signal interrupt its C++ code."""
    nothing = _Nothing()
    with (
        redirect_stdout(nothing),
        redirect_stderr(nothing),
        _root_logger_unchanged(),
        warnings.catch_warnings(),
        signals.unhurried(),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Hide log records up to warnings: notes on untested versions, or a traceback before the exception itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _Nothing(io.TextIOBase):
    """A stream for output that nobody reads. It stays open, because libraries keep it in their log handlers."""

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def _root_logger_unchanged() -> Iterator[None]:
    """Remove the handlers that libraries add to the root logger, through which our own messages would be printed twice."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.addHandler(logging.NullHandler())
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
