"""The format litert (TFLite) in fp32, fp16 and int8, run in LiteRT on the CPU."""

import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from greedynas.deploy.formats.format import Conversion, Format
from greedynas.deploy.formats.shared import each_image, example, silenced
from greedynas.deploy.onnx_checks import INPUT, OUTPUT
from greedynas.deploy.sandbox.process import MIB, Runtime
from greedynas.runtime.files import write_atomically

LITERT = Runtime("LiteRT", "a LiteRT file", "greedynas.deploy.runtimes.litert_model", 2048 * MIB, one_by_one=True)
SIGNATURE = "serving_default"  # the name that the converter gives to a network


class LiteRtFormat(Format):
    """LiteRT files for one image at a time, channels last. Input and output of int8 files are int8, too."""

    name = "litert"
    suffix = ".tflite"
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "fp16", "int8")
    packages: ClassVar[Mapping[str, str]] = {"ai_edge_litert": "ai-edge-litert"}  # enough to run files
    converters: ClassVar[Mapping[str, str]] = {
        "ai_edge_litert": "'greedynas[litert]'",
        "litert_torch": "'greedynas[litert]'",
        "ai_edge_quantizer": "'greedynas[litert]'",
    }
    advice = "litert-torch 0.10 needs torch below 2.15, so use an environment of its own"
    runtime_name = "LiteRT"
    sandbox = LITERT

    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        with silenced():
            if "litert" not in source.cache:
                source.cache["litert"] = convert_module(source.network, example(source))
            whole = source.cache["litert"]
            data = {"fp32": lambda: whole, "fp16": lambda: _half(whole), "int8": lambda: _quantised(whole, source)}
            made = data[precision]()
        write_atomically(file, made)

    def runtime(self) -> str:
        return f"ai-edge-litert {version('ai-edge-litert')}"


class _ChannelsLast(nn.Module):
    """A network that takes images with their channels last, under the names of our other files."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {OUTPUT: self.network(images.permute(0, 3, 1, 2))}


def convert_module(network: nn.Module, image: Tensor) -> bytes:
    """Convert a network that takes images (1, channels, size, size) to LiteRT; its input becomes channels last."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import litert_torch

    last = image.permute(0, 2, 3, 1).contiguous()
    model = litert_torch.convert(_ChannelsLast(network).eval(), sample_kwargs={INPUT: last})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.tflite")
        model.export(str(file))
        return file.read_bytes()


def _half(model: bytes) -> bytes:
    """Return a model whose weights are stored in fp16 and computed in fp32."""
    from ai_edge_quantizer import qtyping, quantizer
    from ai_edge_quantizer.algorithm_manager import AlgorithmName

    made = quantizer.Quantizer(bytearray(model))
    weights = qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT)
    made.update_quantization_recipe(
        regex=".*",
        operation_name=qtyping.TFLOperationName.ALL_SUPPORTED,
        op_config=qtyping.OpQuantizationConfig(
            weight_tensor_config=weights,
            compute_precision=qtyping.ComputePrecision.FLOAT,
            explicit_dequantize=True,
        ),
        algorithm_key=AlgorithmName.FLOAT_CASTING,
    )
    return bytes(made.quantize().quantized_model)


def _quantised(model: bytes, source: Conversion) -> bytes:
    """Return a model in static int8: weights by output channel, activations by their ranges."""
    from ai_edge_quantizer import quantizer, recipe

    made = quantizer.Quantizer(bytearray(model))
    made.load_quantization_recipe(recipe.static_wi8_ai8())
    images = [{INPUT: image.permute(0, 2, 3, 1).contiguous().numpy()} for image in each_image(source)]
    return bytes(made.quantize(made.calibrate({SIGNATURE: images})).quantized_model)
