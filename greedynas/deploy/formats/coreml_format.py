"""The format coreml in fp16, fp32 and with int8 weights. It converts on Linux, and runs only on a Mac."""

import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from greedynas.deploy.formats.format import Classifier, Conversion, Format
from greedynas.deploy.formats.shared import quiet_logs, shared_program, silenced
from greedynas.deploy.onnx_checks import INPUT, OUTPUT


class CoreMlFormat(Format):
    """Core ML packages (ML programs for iOS 16, macOS 13 and later) for one image at a time."""

    name = "coreml"
    suffix = ".mlpackage"
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "fp16", "int8")
    packages: ClassVar[Mapping[str, str]] = {"coremltools": "'greedynas[coreml]'"}
    runtime_name = "Core ML"

    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        with silenced(), quiet_logs():
            model = _converted(source, precision)
            shutil.rmtree(file, ignore_errors=True)
            model.save(str(file))

    def open(self, file: Path, threads: int | None = None) -> Classifier | None:
        if sys.platform != "darwin":
            return None
        import coremltools

        model = coremltools.models.MLModel(str(file), compute_units=coremltools.ComputeUnit.CPU_ONLY)

        def classify(images: Tensor) -> Tensor:
            found = [model.predict({INPUT: image[None].numpy()})[OUTPUT] for image in images]
            return torch.from_numpy(np.concatenate(found).astype(np.float32))

        return classify

    def runtime(self) -> str:
        return f"coremltools {version('coremltools')}"


def _converted(source: Conversion, precision: str) -> Any:
    import coremltools as ct

    if "coreml" not in source.cache:
        source.cache["coreml"] = shared_program(source).run_decompositions({})
    model = ct.convert(
        source.cache["coreml"],
        inputs=[ct.TensorType(name=INPUT, shape=source.shape)],
        outputs=[ct.TensorType(name=OUTPUT, dtype=np.float32)],
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS16,
        compute_precision=ct.precision.FLOAT32 if precision == "fp32" else ct.precision.FLOAT16,
    )
    model.short_description = f"{source.card.name}, exported by greedynas"
    if precision != "int8":
        return model
    config = ct.optimize.coreml.OpLinearQuantizerConfig(mode="linear_symmetric", granularity="per_channel")
    return ct.optimize.coreml.linear_quantize_weights(model, ct.optimize.coreml.OptimizationConfig(config))
