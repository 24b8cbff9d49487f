"""The timing of blocks in LiteRT on the CPU."""

import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from torch import nn

from greedynas.deploy.formats.litert_format import LiteRtFormat, convert_module
from greedynas.deploy.formats.shared import silenced
from greedynas.deploy.latency_backends.backend import LatencyBackend, make_block_of, make_image
from greedynas.deploy.latency_backends.torch_backend import compose
from greedynas.deploy.runtimes.litert_model import Model
from greedynas.deploy.runtimes.model import timed
from greedynas.deploy.timing import Runner
from greedynas.spaces.space import Layer


class LiteRtBackend(LatencyBackend):
    """The latency backend for LiteRT on the CPU with XNNPACK, in fp32. Each graph takes seconds to convert."""

    suffix: ClassVar[str] = ".tflite"
    packages: ClassVar[Mapping[str, str]] = {**LiteRtFormat.packages, **LiteRtFormat.converters}

    def __init__(self, device: str, threads: int):
        super().__init__(device, threads)
        self.backend = f"ai-edge-litert {version('ai-edge-litert')}, fp32"

    def parts(self, layer: Layer, ops: Sequence[str], activation: str) -> list[nn.Module]:
        return [make_block_of(layer, op, activation) for op in ops]

    def graph(self, parts: Sequence[nn.Module], layer: Layer, side_by_side: bool = False) -> bytes:
        with silenced():
            return convert_module(compose(parts, side_by_side), make_image(layer))

    def runner(self, parts: Sequence[nn.Module], layer: Layer, side_by_side: bool = False) -> Runner:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "block.tflite")
            file.write_bytes(self.graph(parts, layer, side_by_side))
            model = Model(file, file.name)
            model.open(self.threads or 1)
        return timed(model.once(make_image(layer).numpy()))
