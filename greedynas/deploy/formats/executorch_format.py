"""The format executorch in fp32 and int8 for the XNNPACK backend, run in ExecuTorch on the CPU."""

import copy
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch

from greedynas.deploy.formats.format import Conversion, Format
from greedynas.deploy.formats.shared import each_image, example, shared_program, silenced
from greedynas.deploy.sandbox.process import MIB, Runtime
from greedynas.runtime.files import write_atomically

EXECUTORCH = Runtime(
    "ExecuTorch",
    "an ExecuTorch program",
    "greedynas.deploy.runtimes.executorch_model",
    24 * 1024 * MIB,  # of addresses: its runtime loads PyTorch, whose libraries reserve most of them
    seconds=60.0,
    one_by_one=True,
)


class ExecuTorchFormat(Format):
    """Programs of ExecuTorch for one image at a time, whose convolutions run in XNNPACK."""

    name = "executorch"
    suffix = ".pte"
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "int8")
    packages: ClassVar[Mapping[str, str]] = {"executorch": "'greedynas[executorch]'"}
    converters: ClassVar[Mapping[str, str]] = {"torchao": "'greedynas[executorch]'"}
    runtime_name = "ExecuTorch"
    sandbox = EXECUTORCH

    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        with silenced():
            program = copy.copy(shared_program(source)) if precision == "fp32" else _quantised(source)
            data = lowered(program)
        write_atomically(file, data)

    def runtime(self) -> str:
        return f"executorch {version('executorch')}"


def lowered(program: Any) -> bytes:
    """Return an exported program as a program of ExecuTorch that gives what it can to XNNPACK."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    return bytes(to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch().buffer)


def _quantised(source: Conversion) -> Any:
    """Return the program with static int8: weights by output channel, activations by their ranges."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=False)
    prepared = prepare_pt2e(shared_program(source).module(), XNNPACKQuantizer().set_global(config))
    for image in each_image(source):
        prepared(image)
    return torch.export.export(convert_pt2e(prepared), (example(source),))
