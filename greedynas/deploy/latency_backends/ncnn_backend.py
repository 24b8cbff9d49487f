"""The timing of blocks in NCNN on the CPU."""

import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from greedynas.deploy.formats.ncnn_format import run_pnnx
from greedynas.deploy.latency_backends.backend import make_image
from greedynas.deploy.latency_backends.onnxruntime_backend import OnnxRuntimeBackend, join_onnx
from greedynas.deploy.runtimes.model import timed
from greedynas.deploy.runtimes.ncnn_model import Model
from greedynas.deploy.timing import Runner
from greedynas.spaces.space import Layer

if TYPE_CHECKING:
    import onnx


class NcnnBackend(OnnxRuntimeBackend):
    """The latency backend for NCNN on the CPU, which gets the blocks as ONNX through pnnx and computes in fp32."""

    packages: ClassVar[Mapping[str, str]] = {
        **OnnxRuntimeBackend.packages,
        "ncnn": "'greedynas[ncnn]'",
        "pnnx": "'greedynas[ncnn]'",
    }

    def __init__(self, device: str, threads: int):
        super().__init__(device, threads)
        self.backend = f"ncnn {version('ncnn')}, fp32"

    def runner(self, parts: Sequence["onnx.ModelProto"], layer: Layer, side_by_side: bool = False) -> Runner:
        image = make_image(layer)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "block.ncnn.param")
            run_pnnx(join_onnx(parts, side_by_side).SerializeToString(), image.shape, file)
            model = Model(file, file.name)
            model.open(self.threads or 1)
        return timed(model.once(image.numpy()))
