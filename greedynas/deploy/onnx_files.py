"""The export of networks to ONNX files, their conversion to lower precisions, and runs in ONNX Runtime.

A file uses only standard operators, and its metadata describes the preprocessing of images in words and has the card.
`onnx_checks` checks the contents of files, and `onnx_sandbox` runs untrusted ones.
"""

import json
import logging
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

from greedynas.deploy.onnx_checks import INPUT, OUTPUT, check_onnx, open_session
from greedynas.models.model_file import KEY, Card
from greedynas.runtime import signals
from greedynas.runtime.errors import GreedyNASError

if TYPE_CHECKING:
    import onnx
    import onnxruntime

Floats = NDArray[np.float32]


def make_onnx(network: nn.Module, card: Card) -> "onnx.ModelProto":
    """Export a network in eval mode to ONNX in fp32 for any number of images, with folded BatchNorm."""
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
    # An exception of a signal handler would abort its C++ code. With gradients, a strided convolution would become a slice.
    with warnings.catch_warnings(), signals.unhurried(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter warns about its own future
        program = torch.onnx.export(net, (image,), dynamo=True, verbose=False, **names)
    assert program is not None
    return program.model_proto


def describe(model: "onnx.ModelProto", card: Card) -> "onnx.ModelProto":
    """Add the card and a description of the preprocessing to a model, clean it, and return it.

    Cleaning removes what the exporter leaves behind: stack traces with paths of this machine, and shapes that can be
    inferred.
    """
    import onnx

    from greedynas._version import __version__

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
    """Return a description of the preprocessing in words, from the image file to the network's input and output."""
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
    """Convert the weights and the computation of a model to fp16. Input and output stay fp32."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    copy = onnx.ModelProto.FromString(model.SerializeToString())
    half = convert_float_to_float16(copy, keep_io_types=True)
    OnnxModel.graph_topological_sort(half.graph)  # the conversion put the cast of the input last
    return describe(half, card)


def to_int8(model: "onnx.ModelProto", card: Card, batches: Iterator[Floats]) -> "onnx.ModelProto":
    """Quantise a model statically: weights by output channel, activations by their ranges on `batches`.

    Weights use 7 of the 8 bits: CPUs without VNNI instructions add products of two full bytes in 16 bits, which overflow.
    Ranges from the smallest to the largest value need no memory for the activations, whatever the image size.
    """
    import onnx
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Floats] | None:
            batch = next(batches, None)
            return None if batch is None else {INPUT: batch}

    with tempfile.TemporaryDirectory() as folder, _root_logger_unchanged():
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
def _root_logger_unchanged() -> Iterator[None]:
    """Keep the quantiser, which logs through the root logger, from adding a handler to it for good."""
    silent = logging.NullHandler()
    logging.getLogger().addHandler(silent)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(silent)


# Running


def run_session(session: "onnxruntime.InferenceSession", images: Tensor) -> Floats:
    """Run a session on a batch and return the logits."""
    return session.run([OUTPUT], {INPUT: images.contiguous().numpy()})[0]


def onnx_runner(model: "onnx.ModelProto", image: Tensor, threads: int) -> Callable[[], float]:
    """Return a function that runs a model once on one image and returns the milliseconds."""
    session = open_session(model.SerializeToString(), threads)
    feed = {session.get_inputs()[0].name: image.numpy()}

    def run() -> float:
        start = time.perf_counter_ns()
        session.run(None, feed)
        return (time.perf_counter_ns() - start) / 1e6

    return run
