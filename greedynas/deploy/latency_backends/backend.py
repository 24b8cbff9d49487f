"""What a latency backend is: it brings the blocks of a space into its own form, and times graphs that it makes of them.

A plugin adds one:

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
    """What computes when latencies are measured. A part is a block in the backend's own form.

    Args:
        device: One of `devices`.
        threads: CPU threads.

    Attributes:
        devices: The devices on which it can compute.
        packages: What it needs besides greedynas: what pip installs, by the name that is imported.
        backend: Its name and version, for the latency table.
        device: The name of the processor or GPU, for the table.
        threads: CPU threads, for the table; None where they do not matter.

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
            layer: Says how many channels go in and come out, the stride and the size of the image.
            ops: Names of ops; "FC" is the classifier. `make_block_of` makes a module of each.
            activation: The activation of the space.

        Returns:
            The blocks in the backend's own form, in the order of `ops`.
        """

    @abstractmethod
    def runner(self, parts: Sequence[Any], layer: Layer, side_by_side: bool = False) -> Runner:
        """Return what runs parts once on one image and returns milliseconds.

        Args:
            parts: Parts of `parts`, of any layers; a part may be there several times, and then has weights of its own in
                each place.
            layer: The layer whose input is fed to the first part (to all parts, where they are side by side).
            side_by_side: Whether all parts get the same input and their outputs are added, instead of each part getting the
                output of the one before.
        """


def open_backend(name: str, device: str = "cpu", threads: int = 1) -> LatencyBackend:
    """Return the latency backend of this name, ready to measure.

    Args:
        name: A name in `LATENCY_BACKENDS`.
        device: Where it computes, such as cpu or cuda.
        threads: CPU threads.

    Raises:
        GreedyNASError: There is no such backend, it does not compute on this device, its packages are not installed, or the
            number of threads makes no sense.
    """
    kind = LATENCY_BACKENDS[name]
    if device not in kind.devices:
        if device not in ("cpu", "cuda"):
            raise unknown("device", device, list(dict.fromkeys(["cpu", "cuda", *kind.devices])))
        where = " or ".join("the CPU" if one == "cpu" else one for one in kind.devices)
        instead = "; for a GPU use --backend torch" if device == "cuda" else ""
        raise GreedyNASError(f"{name} is timed on {where}{instead}")
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
    """Return one made-up input of a layer."""
    shape = (1, layer.in_channels, layer.in_size, layer.in_size)
    return torch.randn(shape, generator=torch_stream(0, "latency"))


class _Classifier(nn.Module):
    """Pooling and the linear layer, as in `Network`."""

    def __init__(self, layer: Layer):
        super().__init__()
        self.linear = nn.Linear(layer.in_channels, layer.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))
