"""The format ncnn in fp32 and fp16, converted by pnnx and run in NCNN on the CPU."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from greedynas.deploy.formats.format import Conversion, Format
from greedynas.deploy.formats.shared import shared_onnx
from greedynas.deploy.runtimes.ncnn_model import weights_of
from greedynas.deploy.sandbox.process import MIB, Runtime

NCNN = Runtime("NCNN", "an NCNN file", "greedynas.deploy.runtimes.ncnn_model", 1024 * MIB, one_by_one=True)
SECONDS = 600  # for the converter


class NcnnFormat(Format):
    """NCNN's files, `.param` with `.bin`, for one image at a time. fp16 files hold weights in fp16."""

    name = "ncnn"
    suffix = ".ncnn.param"
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "fp16")
    packages: ClassVar[Mapping[str, str]] = {"ncnn": "'greedynas[ncnn]'"}
    converters: ClassVar[Mapping[str, str]] = {"pnnx": "'greedynas[ncnn]'"}
    runtime_name = "NCNN"
    sandbox = NCNN

    def parts(self, file: Path) -> tuple[Path, ...]:
        return (weights_of(file),)

    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        run_pnnx(shared_onnx(source).SerializeToString(), source.shape, file, half=precision == "fp16")

    def runtime(self) -> str:
        return f"ncnn {version('ncnn')}"


def run_pnnx(model: bytes, shape: Sequence[int], file: Path, half: bool = False) -> None:
    """Convert an ONNX model for inputs of a shape into a `.param` file and its `.bin`."""
    import pnnx

    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        Path(folder, "model.onnx").write_bytes(model)
        command = [pnnx.EXEC_PATH, "model.onnx", f"inputshape={list(shape)}f32".replace(" ", ""), f"fp16={int(half)}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
        made = Path(folder, "model.ncnn.param")
        if done.returncode or not made.is_file():
            raise RuntimeError(f"pnnx failed: {(done.stderr or done.stdout).strip()[-200:]}")
        for part, target in ((made, file), (weights_of(made), weights_of(file))):
            part.replace(target)
