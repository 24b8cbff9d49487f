"""The interface of latency backends, which convert the blocks of a space to their own form and time graphs of them.

A plugin adds a backend:

    from greedynas.deploy.latency_backends import LATENCY_BACKENDS
    from greedynas.deploy.latency_backends.backend import LatencyBackend, make_block_of, make_image

    class OpenVino(LatencyBackend):
        packages = {"openvino": "openvino"}

        def __init__(self, device, threads): ...
        def parts(self, layer, ops, activation): ...
        def runner(self, parts, layer, side_by_side=False): ...

    LATENCY_BACKENDS.register("openvino", OpenVino)
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from greedynas.deploy.latency_backends import LATENCY_BACKENDS
from greedynas.deploy.timing import Runner
from greedynas.models.blocks import initialise, make_block
from greedynas.runtime.devices import cpu_name
from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.runtime.packages import require_packages
from greedynas.runtime.rng import torch_stream
from greedynas.spaces.space import Layer


class LatencyBackend(ABC):
    """The base class of latency backends. A part is a block in the backend's own form.

    Args:
        device: One of `devices`.
        threads: The number of CPU threads.

    Attributes:
        devices: The devices on which it can compute.
        suffix: The suffix of the files that `graph` returns, for backends that write them.
        packages: The packages that it needs besides greedynas: the requirement for pip by the name of the import.
        backend: Its name, version and, where there are several, its precision, for the latency table.
        device: The name of the processor or GPU, for the table.
        threads: The number of CPU threads, for the table; None if it does not matter.

    Example:
        >>> import greedynas
        >>> class Constant(greedynas.LatencyBackend):
        ...     backend = "constant"
        ...     def parts(self, layer, ops, activation):
        ...         return list(ops)
        ...     def runner(self, parts, layer, side_by_side=False):
        ...         return lambda: float(len(parts))
        >>> Constant("cpu", threads=1).threads
        1
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    suffix: ClassVar[str] = ""
    packages: ClassVar[Mapping[str, str]] = {}
    backend: str
    device: str
    threads: int | None

    def __init__(self, device: str, threads: int):
        self.device, self.threads = cpu_name(), threads

    @abstractmethod
    def parts(self, layer: Layer, ops: Sequence[str], activation: str) -> list[Any]:
        """Return the blocks of a layer, one for each op.

        Args:
            layer: The layer with its input and output channels, its stride and the size of its input.
            ops: The names of ops; "FC" is the classifier. `make_block_of` returns a module for each.
            activation: The activation of the space.

        Returns:
            The blocks in the backend's own form, in the order of `ops`.
        """

    @abstractmethod
    def runner(self, parts: Sequence[Any], layer: Layer, side_by_side: bool = False) -> Runner:
        """Return a function that runs parts once on one image and returns the milliseconds.

        Args:
            parts: Results of `parts` for any layers; a part that occurs several times has separate weights each time.
            layer: The layer whose input is fed to the first part (or to all parts, with `side_by_side`).
            side_by_side: Whether all parts get the same input and their outputs are added; otherwise each part gets the
                output of the previous one.
        """

    def graph(self, parts: Sequence[Any], layer: Layer, side_by_side: bool = False) -> bytes:
        """Return the file of a graph of parts, for devices elsewhere (`latency_kit`); by default there is none."""
        raise GreedyNASError(f"{self.backend} writes no files for other devices")


def open_backend(name: str, device: str = "cpu", threads: int = 1) -> LatencyBackend:
    """Return the latency backend with this name, ready to measure.

    Args:
        name: A name in `LATENCY_BACKENDS`.
        device: The device, such as cpu or cuda.
        threads: The number of CPU threads.

    Raises:
        GreedyNASError: There is no such backend, it does not support the device, its packages are not installed, or the
            number of threads is out of range.
    """
    kind = LATENCY_BACKENDS[name]
    if device not in kind.devices:
        if device not in ("cpu", "cuda"):
            raise unknown("device", device, list(dict.fromkeys(["cpu", "cuda", *kind.devices])))
        where = " or ".join("the CPU" if one == "cpu" else one for one in kind.devices)
        instead = "; for a GPU use --backend torch" if device == "cuda" else ""
        raise GreedyNASError(f"{name} can be timed only on {where}{instead}")
    if not 1 <= threads <= 1024:
        raise GreedyNASError(f"threads must be from 1 to 1024, got {threads}")
    require_packages(f"the latency backend {name!r}", kind.packages)
    return kind(device, threads)


def make_block_of(layer: Layer, op: str, activation: str) -> nn.Module:
    """Return a block of a layer with fresh weights, in evaluation mode; "FC" is the classifier with its pooling."""
    block = _Classifier(layer) if op == "FC" else make_block(op, layer, activation)
    initialise(block, torch_stream(0, "latency"))
    return block.eval()


def make_image(layer: Layer) -> Tensor:
    """Return a random input of a layer."""
    shape = (1, layer.in_channels, layer.in_size, layer.in_size)
    return torch.randn(shape, generator=torch_stream(0, "latency"))


class _Classifier(nn.Module):
    """The pooling and the linear layer, as in `Network`."""

    def __init__(self, layer: Layer):
        super().__init__()
        self.linear = nn.Linear(layer.in_channels, layer.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))
