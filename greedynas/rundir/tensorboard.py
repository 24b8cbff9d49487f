"""TensorBoard: the numbers of `metrics.jsonl` as curves."""

from pathlib import Path
from typing import Any

from greedynas.rundir.callbacks import Callback
from greedynas.runtime.packages import require_packages


class TensorBoard(Callback):
    """Writes every number of a training to `tensorboard/` in its folder."""

    def __init__(self) -> None:
        self._writer: Any = None

    def begin(self, folder: Path | None, step: int) -> None:
        if folder is not None:
            require_packages("the callback 'tensorboard'", {"tensorboard": "tensorboard"})
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def log(self, kind: str, step: int, epoch: int, values: dict[str, Any]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()
