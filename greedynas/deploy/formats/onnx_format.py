"""The format ONNX in fp32, fp16 and int8, run in ONNX Runtime."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from greedynas.deploy.formats.format import Classifier, Conversion, Format
from greedynas.deploy.formats.shared import shared_onnx
from greedynas.deploy.onnx_checks import check_onnx, open_session, parse_onnx
from greedynas.deploy.onnx_files import onnx_runner, run_session, to_fp16, to_int8
from greedynas.deploy.sandbox.process import ONNX_RUNTIME, ModelProcess
from greedynas.deploy.timing import Runner
from greedynas.models.model_file import Card, parse_card
from greedynas.runtime.files import write_atomically

if TYPE_CHECKING:
    import onnx


class OnnxFormat(Format):
    """ONNX files that contain the card and use only operators of the ONNX standard."""

    name = "onnx"
    suffix = ".onnx"
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "fp16", "int8")
    packages: ClassVar[Mapping[str, str]] = {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"}
    runtime_name = "ONNX Runtime"
    published = True
    card = "inside"

    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        model = self._model(source, precision)
        check_onnx(model, file.name)
        write_atomically(file, model.SerializeToString(deterministic=True))

    def _model(self, source: Conversion, precision: str) -> "onnx.ModelProto":
        whole = shared_onnx(source)
        if precision == "fp16":
            return to_fp16(whole, source.card)
        if precision == "int8":
            return to_int8(whole, source.card, (batch.numpy() for batch in source.calibration()))
        return whole

    def open(self, file: Path, threads: int | None = None) -> Classifier:
        session = open_session(file.read_bytes(), threads or 0)
        return lambda batch: torch.from_numpy(run_session(session, batch))

    def runner(self, file: Path, image: Tensor, threads: int) -> Runner:
        return onnx_runner(parse_onnx(file.read_bytes(), str(file)), image, threads)

    def load(self, file: Path, threads: int | None = None) -> tuple[Classifier, Card]:
        """Open an untrusted file in a separate process with limited memory and time."""
        process = ModelProcess(file, ONNX_RUNTIME, threads or torch.get_num_threads())
        card = parse_card(process.card, file)
        process.open(card.image_channels, card.image_size, len(card.class_names))
        return lambda inputs: torch.from_numpy(process.classify(inputs.contiguous().numpy())), card

    def runtime(self) -> str:
        import onnxruntime

        return f"onnxruntime {onnxruntime.__version__}"
