"""OpenVINO files on the CPU, computed in fp32 or int8."""

from collections.abc import Callable
from typing import Any

import numpy as np

from greedynas.deploy.onnx_checks import INPUT, OUTPUT
from greedynas.deploy.runtimes.model import Floats, RuntimeModel, Shapes
from greedynas.deploy.runtimes.signal_stack import kept_signal_stack
from greedynas.runtime.errors import GreedyNASError


def compile_model(model: Any, threads: int, precision: str = "fp32") -> Any:
    """Compile a model, or the file of one, for the CPU: one image after the other, and bf16 only where asked for."""
    import openvino

    hint = {"fp32": "f32", "bf16": "bf16"}[precision]
    options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": hint, "NUM_STREAMS": 1}
    if threads:
        options["INFERENCE_NUM_THREADS"] = threads
    with kept_signal_stack():
        return openvino.Core().compile_model(model, "CPU", options)


class Model(RuntimeModel):
    """An OpenVINO file (`.xml` with its `.bin`)."""

    def open(self, threads: int) -> Shapes:
        if not self.file.read_bytes()[:200].lstrip().startswith((b"<?xml", b"<net")):
            raise GreedyNASError(f"{self.name} is not an OpenVINO file")
        self._threads = threads
        compiled = compile_model(str(self.file), threads)
        if len(compiled.inputs) != 1 or len(compiled.outputs) != 1:
            raise GreedyNASError(f"{self.name} does not fit its card: it has more than one input or output")
        self._request = compiled.create_infer_request()
        shapes = [_shape(port) for port in (compiled.inputs[0], compiled.outputs[0])]
        return {"input": [[INPUT, shapes[0]]], "output": [[OUTPUT, shapes[1]]]}

    def once(self, image: Floats) -> Callable[[], object]:
        """Return a function that runs the model, compiled for one image: a free batch size makes it slower."""
        import openvino

        model = openvino.Core().read_model(str(self.file))
        model.reshape(list(image.shape))
        return once(compile_model(model, self._threads).create_infer_request(), image)

    def run(self, images: Floats) -> Floats:
        return np.array(self._request.infer([images])[0], np.float32)


def once(request: Any, image: Floats) -> Callable[[], object]:
    """Return a function that runs a request once on an image."""
    return lambda: request.infer([image], share_inputs=True, share_outputs=True)


def _shape(port: Any) -> list[int]:
    return [0 if side.is_dynamic else side.get_length() for side in port.get_partial_shape()][1:]
