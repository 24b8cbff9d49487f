"""The format openvino in fp32, fp16 and int8, run in OpenVINO on the CPU."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from greedynas.deploy.formats.format import Conversion, Format
from greedynas.deploy.formats.shared import each_image, shared_onnx, silenced
from greedynas.deploy.runtimes.signal_stack import kept_signal_stack
from greedynas.deploy.sandbox.process import MIB, Runtime

OPENVINO = Runtime("OpenVINO", "an OpenVINO file", "greedynas.deploy.runtimes.openvino_model", 2048 * MIB)


class OpenVinoFormat(Format):
    """OpenVINO's own files, `.xml` with `.bin`. fp16 files hold weights in fp16; int8 is static, by NNCF."""

    name = "openvino"
    suffix = ".xml"
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "fp16", "int8")
    packages: ClassVar[Mapping[str, str]] = {"openvino": "'greedynas[openvino]'"}
    converters: ClassVar[Mapping[str, str]] = {"nncf": "'greedynas[openvino]'"}
    runtime_name = "OpenVINO"
    sandbox = OPENVINO

    def parts(self, file: Path) -> tuple[Path, ...]:
        return (file.with_suffix(".bin"),)

    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        import openvino

        if "openvino" not in source.cache:
            # `read_model` sends no telemetry, unlike `convert_model`
            source.cache["openvino"] = openvino.Core().read_model(shared_onnx(source).SerializeToString())
        model = source.cache["openvino"]
        if precision == "int8":
            model = _quantised(model.clone(), source)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder, file.name)
            # A copy: the weights are compressed in place.
            openvino.save_model(model.clone(), made, compress_to_fp16=precision == "fp16")
            for part in (file, *self.parts(file)):
                made.with_name(part.name).replace(part)

    def runtime(self) -> str:
        import openvino

        return f"openvino {openvino.__version__.split('-')[0]}"


def _quantised(model: Any, source: Conversion) -> Any:
    os.environ.setdefault("NNCF_CI", "1")  # before the import: NNCF then sends no telemetry
    with silenced(), kept_signal_stack():  # NNCF runs the model in OpenVINO
        import nncf

        images = [image.numpy() for image in each_image(source)]
        # MIXED quantises activations asymmetrically, as hard-swish needs it, and weights by output channel.
        return nncf.quantize(model, nncf.Dataset(images), preset=nncf.QuantizationPreset.MIXED, subset_size=len(images))
