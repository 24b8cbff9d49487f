"""The format web: a folder with a page that classifies images in a browser, by ONNX Runtime Web (WebAssembly).

The folder has all files that the page needs; those of ONNX Runtime Web come from its npm package, which `npm pack`
downloads. The exported network is compared with PyTorch in ONNX Runtime, and the tests run the page in Chromium.
"""

import json
import os
import tarfile
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from greedynas.deploy.formats.format import CARD, Classifier, Conversion, Format
from greedynas.deploy.formats.onnx_format import OnnxFormat
from greedynas.deploy.sandbox.process import ONNX_RUNTIME, ModelProcess
from greedynas.models.model_file import Card, parse_card
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import write_atomically

PAGE = Path(__file__).parents[1] / "web"
MODEL = "model.onnx"
NPM = "onnxruntime-web@1.30.0"  # the tested version
VARIABLE = "GREEDYNAS_ONNXRUNTIME_WEB"
RUNTIME_FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


class WebFormat(Format):
    """Folders for a static web server. The page sends no image anywhere and requests nothing from elsewhere."""

    name = "web"
    suffix = ".web"
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "int8")
    packages = OnnxFormat.packages
    runtime_name = "ONNX Runtime"
    card = "inside"

    def check_packages(self, converting: bool = False) -> None:
        super().check_packages(converting)
        if converting:
            find_runtime()

    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        package = find_runtime()
        file.mkdir()
        OnnxFormat().convert(source, precision, file / MODEL)
        write_atomically(file / CARD, source.card.model_dump_json(exclude_none=True).encode())
        for part in ("index.html", "app.js", "style.css"):
            write_atomically(file / part, (PAGE / part).read_bytes())
        for name in RUNTIME_FILES:
            write_atomically(file / name, _read(package, f"dist/{name}"))

    def open(self, file: Path, threads: int | None = None) -> Classifier:
        return OnnxFormat().open(file / MODEL, threads)

    def runner(self, file: Path, image: Tensor, threads: int) -> None:
        return None  # the latency of a browser is another one

    def load(self, file: Path, threads: int | None = None) -> tuple[Classifier, Card]:
        process = ModelProcess(file / MODEL, ONNX_RUNTIME, threads or torch.get_num_threads())
        card = parse_card(process.card, file)
        process.open(card.image_channels, card.image_size, len(card.class_names))
        return lambda inputs: torch.from_numpy(process.classify(inputs.contiguous().numpy())), card

    def runtime(self) -> str:
        return OnnxFormat().runtime()


def find_runtime() -> Path:
    """Return the npm package of ONNX Runtime Web: a file `.tgz`, or the folder of an installed package.

    Raises:
        GreedyNASError: It is neither where the variable says, nor in the current directory.
    """
    named = os.environ.get(VARIABLE)
    places = (
        [Path(named)]
        if named
        else [*sorted(Path().glob("onnxruntime-web-*.tgz"))[-1:], Path("node_modules/onnxruntime-web")]
    )
    for place in places:
        if place.exists():
            _read(place, "package.json")
            return place
    where = f"{VARIABLE} names {named}, which does not exist" if named else "it is not in this folder"
    raise GreedyNASError(
        f"the format 'web' needs the npm package onnxruntime-web, and {where}: npm pack {NPM} (or set {VARIABLE} to its "
        ".tgz)"
    )


def _read(package: Path, name: str) -> bytes:
    try:
        if package.is_dir():
            data = (package / name).read_bytes()
        else:
            with tarfile.open(package) as archive:
                member = archive.extractfile(f"package/{name}")
                data = b"" if member is None else member.read()
        if name == "package.json" and json.loads(data).get("name") != "onnxruntime-web":
            raise ValueError("it is another package")
        return data
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise GreedyNASError(f"{package} is not the npm package onnxruntime-web: {error}") from None
