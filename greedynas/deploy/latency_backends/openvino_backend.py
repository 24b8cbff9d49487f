"""The timing of blocks in OpenVINO on the CPU."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from greedynas.deploy.latency_backends.backend import make_image
from greedynas.deploy.latency_backends.onnxruntime_backend import OnnxRuntimeBackend, join_onnx
from greedynas.deploy.runtimes.model import timed
from greedynas.deploy.runtimes.openvino_model import compile_model, once
from greedynas.deploy.timing import Runner
from greedynas.spaces.space import Layer

if TYPE_CHECKING:
    import onnx


class OpenVinoBackend(OnnxRuntimeBackend):
    """The latency backend for OpenVINO on the CPU, which reads the blocks as ONNX and computes in fp32."""

    packages: ClassVar[Mapping[str, str]] = {**OnnxRuntimeBackend.packages, "openvino": "'greedynas[openvino]'"}
    precision: ClassVar[str] = "fp32"

    def __init__(self, device: str, threads: int):
        import openvino

        super().__init__(device, threads)
        self.backend = f"openvino {openvino.__version__.split('-')[0]}, {self.precision}"

    def runner(self, parts: Sequence["onnx.ModelProto"], layer: Layer, side_by_side: bool = False) -> Runner:
        import openvino

        model = openvino.Core().read_model(join_onnx(parts, side_by_side).SerializeToString())
        request = compile_model(model, self.threads or 1, self.precision).create_infer_request()
        return timed(once(request, make_image(layer).numpy()))


class OpenVinoBf16Backend(OpenVinoBackend):
    """The same with bf16, which OpenVINO uses by default on processors that compute it."""

    precision: ClassVar[str] = "bf16"
