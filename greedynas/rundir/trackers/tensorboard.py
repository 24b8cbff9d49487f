"""TensorBoard: the numbers of `metrics.jsonl` as curves, losses as histograms, test images."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from greedynas.rundir.trackers.tracker import Tracker


class TensorBoard(Tracker):
    """A callback that writes every number of a training to `tensorboard/` in its folder."""

    name = "tensorboard"
    continues_without_identity = True

    def __init__(self) -> None:
        super().__init__()
        self._writer: Any = None

    def open(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = {"purge_step": step} if step or not (folder / "tensorboard").exists() else {}
        self._writer = SummaryWriter(str(folder / "tensorboard"), **purge)

    def write(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def histogram(self, name: str, step: int, values: list[float]) -> None:
        self._writer.add_histogram(name, np.asarray(values), step)

    def attach(self, file: Path, images: list[tuple[str, Image.Image]]) -> None:
        for i, (caption, image) in enumerate(images):
            self._writer.add_image(f"test/{i:02d} {caption}", np.asarray(image), dataformats="HWC")
        self._writer.add_text("report", str(file))

    def close(self) -> None:
        self._writer.close()
