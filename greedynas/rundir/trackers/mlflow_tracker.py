"""MLflow: curves, test images, the settings and the report as artifacts."""

import os
import time
from pathlib import Path
from typing import Any

from PIL import Image

from greedynas.rundir.trackers.tracker import Tracker

MOST = 500  # metrics in a request


class MLflow(Tracker):
    """A callback that records trainings with MLflow.

    The server is MLFLOW_TRACKING_URI, the experiment MLFLOW_EXPERIMENT_NAME or "greedynas". A resumed training continues
    its record.
    """

    name = "mlflow"

    def __init__(self) -> None:
        super().__init__()
        self._client: Any = None
        self._run = ""

    def open(self, folder: Path, step: int) -> None:
        # Standard output belongs to the results of the command: --json must stay JSON, and --quiet silent.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient()
        known = self.identity()
        if known is not None:
            self._run = known
            self._client.update_run(known, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "greedynas")
        found = self._client.get_experiment_by_name(experiment)
        home = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        tags = {"greedynas.run": self.title.partition("/")[0]}
        self._run = self._client.create_run(home, run_name=self.title, tags=tags).info.run_id
        self.remember(self._run)
        self._client.log_dict(self._run, self.settings(), "config.yaml")

    def write(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), MOST):
            self._client.log_batch(self._run, metrics=metrics[first : first + MOST])

    def histogram(self, name: str, step: int, values: list[float]) -> None:
        ordered = sorted(values)  # MLflow has no histograms
        quantiles = {"lowest": ordered[0], "median": ordered[len(ordered) // 2], "highest": ordered[-1]}
        self.write("", step, 0, {f"{name}/{key}": value for key, value in quantiles.items()})

    def attach(self, file: Path, images: list[tuple[str, Image.Image]]) -> None:
        self._client.log_artifact(self._run, str(file))
        for i, (_, image) in enumerate(images):
            self._client.log_image(self._run, image, f"test/{i:02d}.png")

    def close(self) -> None:
        self._client.set_terminated(self._run)
