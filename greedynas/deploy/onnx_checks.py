"""The checks of ONNX files, and their opening in ONNX Runtime.

Nothing here needs PyTorch, so that the process which runs untrusted files starts quickly and gets by with little
memory.
"""

import math
from typing import TYPE_CHECKING, Any

from greedynas.runtime.errors import GreedyNASError

if TYPE_CHECKING:
    import onnx
    import onnxruntime

INPUT, OUTPUT = "images", "logits"
STANDARD = ("", "ai.onnx")  # two names of one domain
MAX_BYTES = 2**31 - 1  # limit of a protobuf message
MAX_ELEMENTS = 2**28  # limit of any tensor for one image
GROWING = {"ConstantOfShape", "EyeLike", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"}


def parse_onnx(data: bytes, what: str) -> "onnx.ModelProto":
    """Return the model in the bytes of a file; `what` names the file in messages."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError:
        raise GreedyNASError(f"{what} is not an ONNX file") from None


def check_onnx(model: "onnx.ModelProto", what: str) -> None:
    """Raise a GreedyNASError unless a model is valid, with only standard operators, one graph and no external data."""
    import onnx

    domains = {entry.domain for entry in model.opset_import} | {node.domain for node in model.graph.node}
    foreign = sorted(domains - set(STANDARD))
    if foreign or model.functions:
        raise GreedyNASError(f"{what} has operators outside of the ONNX standard ({', '.join(foreign) or 'functions'})")
    attributes = [attribute for node in model.graph.node for attribute in node.attribute]
    if any(attribute.HasField("g") or attribute.graphs for attribute in attributes):
        raise GreedyNASError(f"{what} has control flow, which networks of greedynas never have")
    tensors = [*model.graph.initializer, *(attribute.t for attribute in attributes)]
    tensors += [tensor for attribute in attributes for tensor in attribute.tensors]
    if model.graph.sparse_initializer or any(tensor.data_location or tensor.external_data for tensor in tensors):
        raise GreedyNASError(f"{what} has weights in other files; greedynas reads only files with all weights inside")
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # the checker and shape inference raise types without a common base
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise GreedyNASError(f"{what} is not a valid ONNX model: {reason:.200}") from None


def refuse_growth(model: "onnx.ModelProto", what: str) -> None:
    """Raise a GreedyNASError if shape inference shows that a tensor of a model is too large.

    Sizes that depend on the input are unknown here; they are limited by the process that runs the file.
    """
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    values = {value.name: value.type.tensor_type for value in (*inferred.value_info, *inferred.output)}
    for node in inferred.node:
        for name in node.output:
            known = name in values and values[name].HasField("shape")
            sides = [dim.dim_value or 1 for dim in values[name].shape.dim] if known else []
            if (node.op_type in GROWING and not known) or math.prod(sides) > MAX_ELEMENTS:
                raise GreedyNASError(
                    f"{what} needs more memory than any network of greedynas ({node.op_type} {name!r:.60})"
                )


def shapes(values: Any) -> list[list[Any]]:
    """Return the names and the shapes of values without the batch axis. A dimension that is not fixed is 0."""
    return [[value.name, [dim.dim_value for dim in value.type.tensor_type.shape.dim][1:]] for value in values]


def open_session(data: bytes, threads: int = 0) -> "onnxruntime.InferenceSession":
    """Open a model in ONNX Runtime on the CPU. With 0 threads, ONNX Runtime chooses their number."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # only errors, which are raised too
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads that keep spinning after a run would slow down the session that runs next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
