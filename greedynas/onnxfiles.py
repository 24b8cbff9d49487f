"""ONNX files: made of a network, cleaned, described, converted to lower precisions, read again, run in ONNX Runtime.

A file uses the standard operators alone, and its metadata says how images become its input (`preprocessing`, and the whole
card). Reading one executes nothing but those operators: no custom domains, no control flow, no data in other files.
"""

import json
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from greedynas import stopping
from greedynas.errors import GreedyNASError
from greedynas.trained import KEY, Card, parse_card

if TYPE_CHECKING:
    import onnx
    import onnxruntime

INPUT, OUTPUT = "images", "logits"
STANDARD = ("", "ai.onnx")  # two names of one domain
MAX_BYTES = 2**31 - 1  # of a protobuf message
MAX_ELEMENTS = 2**28  # of anything that is computed of one image
GROWING = {"ConstantOfShape", "EyeLike", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"}

Floats = NDArray[np.float32]


def make_onnx(network: nn.Module, card: Card) -> "onnx.ModelProto":
    """The network in fp32 for any number of images, BatchNorm folded into the convolutions; `network` is in eval mode."""
    image = torch.zeros(2, card.image_channels, card.image_size, card.image_size)
    try:
        model = describe(export_onnx(network, image, dynamic_batch=True), card)
    except torch.onnx.OnnxExporterError as error:  # some of timm's models
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise GreedyNASError(f"PyTorch cannot export {card.name} to ONNX: {reason:.200}") from None
    check_onnx(model, f"{card.name} in ONNX")
    return model


def export_onnx(net: nn.Module, image: Tensor, dynamic_batch: bool = False) -> "onnx.ModelProto":
    names: dict[str, Any] = {"input_names": [INPUT], "output_names": [OUTPUT]} if dynamic_batch else {}
    if dynamic_batch:
        names["dynamic_shapes"] = ({0: torch.export.Dim("batch")},)
    with warnings.catch_warnings(), stopping.unhurried():  # what a signal raises within its C++ code aborts the process
        warnings.simplefilter("ignore")  # the exporter warns about its own future
        program = torch.onnx.export(net, (image,), dynamo=True, verbose=False, **names)
    assert program is not None
    return program.model_proto


def describe(model: "onnx.ModelProto", card: Card) -> "onnx.ModelProto":
    """Without what the exporter leaves behind (stack traces with the paths of this machine, shapes that can be inferred),
    with the card and a description of the preprocessing for people and other programs."""
    import onnx

    from greedynas import __version__

    graph = model.graph
    for part in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    graph.ClearField("value_info")
    graph.name = card.name
    model.ClearField("doc_string")
    model.producer_name, model.producer_version = "greedynas", __version__
    facts = {"preprocessing": preprocessing(card), "classes": json.dumps(card.class_names, ensure_ascii=False)}
    onnx.helper.set_model_props(model, {KEY: card.model_dump_json(exclude_none=True), **facts})
    return model


def preprocessing(card: Card) -> str:
    """How an image becomes the input, in words."""
    colours, shape = ("8-bit grey", "1") if card.image_channels == 1 else ("8-bit RGB", "3 (red, green, blue)")
    mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (card.mean, card.std))
    size, stored = card.image_size, card.stored_size
    crop = "" if stored == size else f" Keep the central {size} x {size} pixels."
    return (
        f"Turn the image upright by its EXIF orientation, put transparency on white, convert to {colours}. "
        f"Resize the largest centred square to {stored} x {stored} pixels (bilinear, antialiased).{crop} "
        f"Divide by 255, subtract the mean ({mean}), divide by the standard deviation ({std}). "
        f"Input {INPUT!r}: float32 (batch, {shape}, {size}, {size}). "
        f"Output {OUTPUT!r}: float32 (batch, {len(card.class_names)}), before softmax; classes in the order of 'classes'."
    )


# Lower precisions


def to_fp16(model: "onnx.ModelProto", card: Card) -> "onnx.ModelProto":
    """Weights and computation in fp16; input and output stay fp32."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    copy = onnx.ModelProto.FromString(model.SerializeToString())
    half = convert_float_to_float16(copy, keep_io_types=True)
    OnnxModel.graph_topological_sort(half.graph)  # the conversion of the input was put last
    return describe(half, card)


def to_int8(model: "onnx.ModelProto", card: Card, batches: Iterator[Floats]) -> "onnx.ModelProto":
    """Static quantisation: weights by output channel, activations by the ranges that they have on `batches`.

    Weights use 7 of the 8 bits: CPUs without VNNI instructions add products of two full bytes in 16 bits, which overflow.
    Ranges from least to largest value need no memory for the activations, whatever the image size.
    """
    import onnx
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Floats] | None:
            batch = next(batches, None)
            return None if batch is None else {INPUT: batch}

    with tempfile.TemporaryDirectory() as folder, _root_logger_as_it_is():
        file = Path(folder) / "int8.onnx"
        quantization.quantize_static(
            onnx.ModelProto.FromString(model.SerializeToString()),
            file,
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            reduce_range=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            calibrate_method=quantization.CalibrationMethod.MinMax,
        )
        return describe(onnx.load(file), card)


@contextmanager
def _root_logger_as_it_is() -> Iterator[None]:
    """The quantiser speaks through the root logger, which would give that a handler for the rest of the process."""
    silent = logging.NullHandler()
    logging.getLogger().addHandler(silent)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(silent)


# Reading and running


def read_onnx(file: Path) -> tuple[bytes, Card]:
    """The content of an ONNX file that greedynas wrote, and its card; any other is refused before it is run."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    if not file.is_file():
        raise GreedyNASError(f"no such model: {file}")
    if file.stat().st_size > MAX_BYTES:
        raise GreedyNASError(f"{file} is not an ONNX file: it is larger than one can be")
    data = file.read_bytes()
    try:
        model = onnx.ModelProto.FromString(data)
    except DecodeError:
        raise GreedyNASError(f"{file} is not an ONNX file") from None
    card = parse_card({entry.key: entry.value for entry in model.metadata_props}.get(KEY), file)
    check_onnx(model, str(file))
    _refuse_growth(model, file)
    size = (card.image_channels, card.image_size, card.image_size)
    wanted = [(INPUT, size)], [(OUTPUT, (len(card.class_names),))]
    if (_shapes(model.graph.input), _shapes(model.graph.output)) != wanted:
        raise GreedyNASError(
            f"{file} does not fit its card: it should take {INPUT} of {size} and give {OUTPUT} of {len(card.class_names)} "
            "classes, for any number of images"
        )
    return data, card


def _refuse_growth(model: "onnx.ModelProto", file: Path) -> None:
    """A few bytes can ask for terabytes: what one image becomes on its way must be known, and not be too large."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    values = {value.name: value.type.tensor_type for value in (*inferred.value_info, *inferred.output)}
    for node in inferred.node:
        for name in node.output:
            known = name in values and values[name].HasField("shape")
            sides = [dim.dim_value or 1 for dim in values[name].shape.dim] if known else []
            if (node.op_type in GROWING and not known) or math.prod(sides) > MAX_ELEMENTS:
                raise GreedyNASError(
                    f"{file} asks for more memory than a network of greedynas ({node.op_type} {name!r:.60})"
                )


def check_onnx(model: "onnx.ModelProto", what: str) -> None:
    """A valid model with operators of the ONNX standard alone, in one graph, with all data in the file."""
    import onnx

    domains = {entry.domain for entry in model.opset_import} | {node.domain for node in model.graph.node}
    foreign = sorted(domains - set(STANDARD))
    if foreign or model.functions:
        raise GreedyNASError(f"{what} has operators outside of the ONNX standard ({', '.join(foreign) or 'functions'})")
    attributes = [attribute for node in model.graph.node for attribute in node.attribute]
    if any(attribute.HasField("g") or attribute.graphs for attribute in attributes):
        raise GreedyNASError(f"{what} has control flow, which networks of greedynas do not have")
    tensors = [*model.graph.initializer, *(attribute.t for attribute in attributes)]
    tensors += [tensor for attribute in attributes for tensor in attribute.tensors]
    if model.graph.sparse_initializer or any(tensor.data_location or tensor.external_data for tensor in tensors):
        raise GreedyNASError(f"{what} has weights in other files; greedynas reads files that hold all of theirs")
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # the checker and shape inference have their own, without a common base
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise GreedyNASError(f"{what} is not a valid ONNX model: {reason:.200}") from None


def _shapes(values: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes without the batch; a shape that is open elsewhere has 0 there."""
    return [(value.name, tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)[1:]) for value in values]


def open_session(data: bytes, threads: int = 0) -> "onnxruntime.InferenceSession":
    """ONNX Runtime on the CPU; 0 threads: as many as it likes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors, which are raised as well
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads that go on spinning after a run would slow down the session whose turn is next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run_session(session: "onnxruntime.InferenceSession", images: Tensor) -> Floats:
    """Logits of a batch."""
    return session.run([OUTPUT], {INPUT: images.contiguous().numpy()})[0]


def onnx_runner(model: "onnx.ModelProto", image: Tensor, threads: int) -> Callable[[], float]:
    """A session on one image: each call runs it once and returns milliseconds."""
    session = open_session(model.SerializeToString(), threads)
    feed = {session.get_inputs()[0].name: image.numpy()}

    def run() -> float:
        start = time.perf_counter_ns()
        session.run(None, feed)
        return (time.perf_counter_ns() - start) / 1e6

    return run
