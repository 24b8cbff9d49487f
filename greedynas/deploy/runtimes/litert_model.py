"""LiteRT files (`.tflite`) on the CPU. Their images are channels last, and their input may be int8."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.deploy.onnx_checks import INPUT, OUTPUT
from greedynas.deploy.runtimes.model import Floats, OneByOne, Shapes
from greedynas.runtime.errors import GreedyNASError


class Model(OneByOne):
    """A LiteRT file in the interpreter, by default with XNNPACK.

    Attributes:
        reference: Whether the reference kernels run it, which compute as those of microcontrollers do.
    """

    reference = False

    def open(self, threads: int) -> Shapes:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        data = self.file.read_bytes()
        if data[4:8] != b"TFL3":
            raise GreedyNASError(f"{self.name} is not a LiteRT file")
        resolver = OpResolverType.BUILTIN_REF if self.reference else OpResolverType.AUTO
        self._interpreter = Interpreter(
            model_content=data, num_threads=threads or None, experimental_op_resolver_type=resolver
        )
        self._interpreter.allocate_tensors()
        inputs, outputs = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        if len(inputs) != 1 or len(outputs) != 1 or len(inputs[0]["shape"]) != 4:
            raise GreedyNASError(f"{self.name} does not fit its card: it should take images and give logits")
        self._input, self._output = inputs[0], outputs[0]
        height, width, channels = self._input["shape"][1:].tolist()
        shape = [channels, height, width]
        return {"input": [[INPUT, shape]], "output": [[OUTPUT, self._output["shape"][1:].tolist()]]}

    def once(self, image: Floats) -> Callable[[], object]:
        self._set(image)
        return self._interpreter.invoke  # type: ignore[no-any-return]

    def _set(self, image: Floats) -> None:
        pixels = np.ascontiguousarray(image.transpose(0, 2, 3, 1))
        self._interpreter.set_tensor(self._input["index"], _quantised(pixels, self._input))

    def run_one(self, image: Floats) -> Floats:
        self._set(image)
        self._interpreter.invoke()
        return _real(self._interpreter.get_tensor(self._output["index"]), self._output)


def _quantised(values: Floats, tensor: dict[str, Any]) -> NDArray[Any]:
    """Return values in the type of a tensor."""
    if tensor["dtype"] == np.float32:
        return values
    scale, zero = tensor["quantization"]
    kind = np.iinfo(tensor["dtype"])
    return np.clip(np.round(values / scale + zero), kind.min, kind.max).astype(tensor["dtype"])


def _real(values: NDArray[Any], tensor: dict[str, Any]) -> Floats:
    if tensor["dtype"] == np.float32:
        return values
    scale, zero = tensor["quantization"]
    return (values.astype(np.float32) - zero) * np.float32(scale)
