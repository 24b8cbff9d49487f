"""Weights & Biases: curves, histograms, test images, and the report as an artifact."""

import inspect
import os
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from greedynas.rundir.trackers.tracker import Tracker, new_identity
from greedynas.runtime.text import logger


class WandB(Tracker):
    """A callback that records trainings with Weights & Biases.

    The project is WANDB_PROJECT or "greedynas". wandb keeps its files in WANDB_DIR or the current folder, not in the run
    directory, because they contain links out of it. Without a login, `wandb sync` uploads them later. A resumed training
    continues its record.
    """

    name = "wandb"

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def open(self, folder: Path, step: int) -> None:
        import wandb

        identity = self.identity() or new_identity()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "greedynas"),
            id=identity,
            name=self.title,
            group=self.title.partition("/")[0],
            config=self.settings(),
            resume="allow",
            mode=_mode(wandb),  # type: ignore[arg-type]
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True),
        )
        self._run.define_metric("*", step_metric="step")
        self.remember(identity)

    def write(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        self._run.log({**values, "step": step, "epoch": epoch})

    def histogram(self, name: str, step: int, values: list[float]) -> None:
        import wandb

        self._run.log({f"{name} losses": wandb.Histogram(values), "step": step})

    def attach(self, file: Path, images: list[tuple[str, Image.Image]]) -> None:
        import wandb

        self._run.log({"test images": [wandb.Image(image, caption=caption) for caption, image in images]})
        artifact = wandb.Artifact("report", type="report")
        artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


def _mode(wandb: Any) -> str | None:
    """Return "offline" where nobody is logged in, because wandb would ask for a key and wait."""
    if os.environ.get("WANDB_MODE"):
        return None
    if _is_logged_in(wandb):
        return "online"
    _say_that_records_stay_here()
    return "offline"


def _is_logged_in(wandb: Any) -> bool:
    """Return whether wandb knows a key, without a question and without a request."""
    if "prompt" in inspect.signature(wandb.login).parameters:  # newer versions warn about `wandb.api`
        return bool(wandb.login(prompt=False, verify=False))
    return bool(getattr(wandb.api, "api_key", None))


@cache
def _say_that_records_stay_here() -> None:
    """Log a warning once, not for every training of a job."""
    logger.warning("nobody is logged in to wandb: its records stay in the folder wandb; wandb sync uploads them")
