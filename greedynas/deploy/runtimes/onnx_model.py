"""ONNX files in ONNX Runtime, checked before they are opened."""

from pathlib import Path

import numpy as np

from greedynas.deploy.onnx_checks import INPUT, OUTPUT, check_onnx, open_session, parse_onnx, refuse_growth, shapes
from greedynas.deploy.runtimes.model import Floats, RuntimeModel, Shapes

KEY = "greedynas"  # of the card in the metadata, as in `models.model_file`, which needs PyTorch


class Model(RuntimeModel):
    """An untrusted ONNX file in ONNX Runtime."""

    def __init__(self, file: Path, name: str):
        super().__init__(file, name)
        self._data = file.read_bytes()
        self._model = parse_onnx(self._data, name)
        self.card = {entry.key: entry.value for entry in self._model.metadata_props}.get(KEY)

    def open(self, threads: int) -> Shapes:
        check_onnx(self._model, self.name)
        refuse_growth(self._model, self.name)
        found = {"input": shapes(self._model.graph.input), "output": shapes(self._model.graph.output)}
        del self._model
        self._session = open_session(self._data, threads)
        del self._data
        return found

    def run(self, images: Floats) -> Floats:
        return np.ascontiguousarray(self._session.run([OUTPUT], {INPUT: images})[0], np.float32)
