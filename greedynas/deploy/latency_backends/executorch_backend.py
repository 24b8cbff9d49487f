"""The timing of blocks in ExecuTorch (XNNPACK) on the CPU."""

import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from greedynas.deploy.formats.executorch_format import ExecuTorchFormat, lowered
from greedynas.deploy.formats.shared import silenced
from greedynas.deploy.latency_backends.backend import LatencyBackend, make_block_of, make_image
from greedynas.deploy.latency_backends.torch_backend import compose
from greedynas.deploy.runtimes.executorch_model import Model
from greedynas.deploy.runtimes.model import timed
from greedynas.deploy.timing import Runner
from greedynas.spaces.space import Layer


class ExecuTorchBackend(LatencyBackend):
    """The latency backend for ExecuTorch on the CPU, in fp32. Each graph takes seconds to convert."""

    suffix: ClassVar[str] = ".pte"
    packages: ClassVar[Mapping[str, str]] = {**ExecuTorchFormat.packages, **ExecuTorchFormat.converters}

    def __init__(self, device: str, threads: int):
        super().__init__(device, threads)
        self.backend = f"executorch {version('executorch')}, fp32"

    def parts(self, layer: Layer, ops: Sequence[str], activation: str) -> list[nn.Module]:
        return [make_block_of(layer, op, activation) for op in ops]

    def graph(self, parts: Sequence[nn.Module], layer: Layer, side_by_side: bool = False) -> bytes:
        with silenced():
            return lowered(torch.export.export(compose(parts, side_by_side), (make_image(layer),)))

    def runner(self, parts: Sequence[nn.Module], layer: Layer, side_by_side: bool = False) -> Runner:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "block.pte")
            file.write_bytes(self.graph(parts, layer, side_by_side))
            model = Model(file, file.name)
            model.open(self.threads or 1)
        return timed(model.once(make_image(layer).numpy()))
