"""The timing of blocks in ONNX Runtime on the CPU."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch import Tensor, nn

from greedynas.deploy.latency_backends.backend import LatencyBackend, make_block_of, make_image
from greedynas.deploy.latency_backends.torch_backend import DIFFERENCE
from greedynas.deploy.onnx_files import export_onnx, onnx_runner
from greedynas.deploy.timing import Runner
from greedynas.spaces.space import Layer

if TYPE_CHECKING:
    import onnx


class OnnxRuntimeBackend(LatencyBackend):
    """The latency backend for ONNX Runtime on the CPU, with all graph optimisations."""

    suffix: ClassVar[str] = ".onnx"
    packages: ClassVar[Mapping[str, str]] = {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"}

    def __init__(self, device: str, threads: int):
        import onnxruntime

        super().__init__(device, threads)
        self.backend = f"onnxruntime {onnxruntime.__version__}"

    def parts(self, layer: Layer, ops: Sequence[str], activation: str) -> list["onnx.ModelProto"]:
        """Return the ops of a layer, which are exported together and then separated: every export takes seconds."""
        from onnx.utils import Extractor

        model = export_onnx(_Together([make_block_of(layer, op, activation) for op in ops]), make_image(layer))
        whole = Extractor(model)
        inputs = [value.name for value in model.graph.input]
        return [whole.extract_model(inputs, [output.name]) for output in model.graph.output]

    def runner(self, parts: Sequence["onnx.ModelProto"], layer: Layer, side_by_side: bool = False) -> Runner:
        return onnx_runner(join_onnx(parts, side_by_side), make_image(layer), self.threads or 1)

    def graph(self, parts: Sequence["onnx.ModelProto"], layer: Layer, side_by_side: bool = False) -> bytes:
        return join_onnx(parts, side_by_side).SerializeToString(deterministic=True)


def join_onnx(models: Sequence["onnx.ModelProto"], side_by_side: bool = False) -> "onnx.ModelProto":
    """Join several graphs into one: in a chain, or side by side on the same input with their outputs added.

    Copies of a graph have weights that differ a little, because OpenVINO merges parallel branches with equal weights.
    """
    import onnx

    joined = onnx.ModelProto(ir_version=models[0].ir_version, opset_import=models[0].opset_import)
    graph = joined.graph
    graph.name = "joined"
    source, outputs = "input", []
    for i, model in enumerate(models):
        copy = sum(earlier is model for earlier in models[:i])
        names = {"": "", model.graph.input[0].name: source}

        def renamed(name: str, i: int = i, names: dict[str, str] = names) -> str:
            return names.setdefault(name, f"{i}/{name}")

        for tensor in model.graph.initializer:
            graph.initializer.add().CopyFrom(_changed(tensor, copy))
            graph.initializer[-1].name = renamed(tensor.name)
        for node in model.graph.node:
            graph.node.add().CopyFrom(node)
            graph.node[-1].name = f"{i}/{node.name}"
            graph.node[-1].input[:] = [renamed(name) for name in node.input]
            graph.node[-1].output[:] = [renamed(name) for name in node.output]
        outputs.append(renamed(model.graph.output[0].name))
        source = source if side_by_side else outputs[-1]
    if side_by_side:
        for i, output in enumerate(outputs[1:]):
            total = f"sum {i}"
            graph.node.append(onnx.helper.make_node("Add", [outputs[0] if i == 0 else f"sum {i - 1}", output], [total]))
        outputs = [*outputs, total] if len(models) > 1 else outputs
    graph.input.add().CopyFrom(models[0].graph.input[0])
    graph.input[0].name = "input"
    graph.output.add().CopyFrom(models[-1].graph.output[0])
    graph.output[0].name = outputs[-1]
    return joined


def _changed(tensor: "onnx.TensorProto", number: int) -> "onnx.TensorProto":
    """Return a weight of the copy with this number."""
    import onnx

    if tensor.data_type != onnx.TensorProto.FLOAT or number == 0:
        return tensor
    values = onnx.numpy_helper.to_array(tensor) * np.float32(1 + number * DIFFERENCE)
    return onnx.numpy_helper.from_array(values.astype(np.float32), tensor.name)


class _Together(nn.Module):
    """Several blocks with the same input and separate outputs."""

    def __init__(self, blocks: Sequence[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(block(x) for block in self.blocks)
