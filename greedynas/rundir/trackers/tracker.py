"""The base of trackers: they work in a thread of their own, and a tracker that fails never stops a training."""

import base64
import io
import json
import queue
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from greedynas.rundir.callbacks import Callback
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_json
from greedynas.runtime.packages import require_packages
from greedynas.runtime.text import clean, logger
from greedynas.runtime.yaml_files import read_yaml

TRACKERS = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard"}  # the package of each
IDENTITIES = "trackers.json"  # beside the metrics: the runs of the trackers, which a resumed training continues
WAITING = 10_000  # events that wait for a slow tracker; further ones are dropped
PATIENCE = 60.0  # seconds for the last events at the end of a training
MOST_IMAGES = 24


class Tracker(Callback, ABC):
    """A callback that records a training elsewhere.

    Each method of the callback puts work into a queue, which a thread does in order. The first failure is logged as a
    warning and ends the tracking, not the training.
    """

    name = "tracker"

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._failed = False
        self.folder: Path | None = None

    # What a tracker does

    @abstractmethod
    def open(self, folder: Path, step: int) -> None:
        """Start or continue the record of the training in a folder."""

    @abstractmethod
    def write(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        """Record numbers, whose names have the form `kind/name`."""

    def histogram(self, name: str, step: int, values: list[float]) -> None:
        """Record a distribution."""

    def attach(self, file: Path, images: list[tuple[str, Image.Image]]) -> None:
        """Record the report and test images with their captions."""

    @abstractmethod
    def close(self) -> None:
        """Finish the record."""

    # The callback

    def begin(self, folder: Path | None, step: int) -> None:
        if folder is not None:
            self.folder = folder = folder.resolve()  # its parents are looked at
            self._start()
            self._put(lambda: self.open(folder, step))

    def log(self, kind: str, step: int, epoch: int, values: dict[str, Any]) -> None:
        if self.folder is None:
            return
        numbers = {
            f"{kind}/{name}": float(value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        lists = {f"{kind}/{name}": _known(value) for name, value in values.items() if isinstance(value, (list, tuple))}
        self._put(lambda: self.write(kind, step, epoch, numbers))
        for name, found in lists.items():
            if found:
                self._put(lambda name=name, found=found: self.histogram(name, step, found))  # type: ignore[misc]

    def report(self, folder: Path, file: Path) -> None:
        """Attach the report of a finished job and the sample images of its test."""
        if not (folder / IDENTITIES).is_file() and not self.continues_without_identity:
            return
        self.begin(folder, 0)
        self._put(lambda: self.attach(file, sample_images(folder)))
        self.end()

    continues_without_identity = False

    def end(self) -> None:
        if self._thread is None:
            return
        self._put(self.close)
        with suppress(queue.Full):
            self._queue.put(None, timeout=1)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            logger.warning("%s is slow: its last records may be missing; the training is complete", self.name)
        self._thread, self.folder = None, None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def _put(self, work: Callable[[], None]) -> None:
        with suppress(queue.Full):
            self._queue.put_nowait(work)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._failed:
                continue
            try:
                work()
            except BaseException as error:  # of third-party code, which may even exit
                self._failed = True
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                logger.warning("%s records nothing any more (%.200s); the training goes on", self.name, clean(reason))

    # Helpers of trackers

    def identity(self) -> str | None:
        """Return the tracker's run of this training, if an earlier session has made one."""
        assert self.folder is not None
        try:
            found = read_json(self.folder / IDENTITIES).get(self.name)
        except GreedyNASError:
            return None
        return found if isinstance(found, str) and found.isalnum() and len(found) <= 64 else None

    def remember(self, identity: str) -> None:
        """Keep the tracker's run of this training for later sessions."""
        assert self.folder is not None
        file = self.folder / IDENTITIES
        try:
            known = read_json(file)
        except GreedyNASError:
            known = {}
        file.write_text(json.dumps({**known, self.name: identity}), encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run that the training belongs to."""
        assert self.folder is not None
        for place in (self.folder, self.folder.parents[1]):
            with suppress(GreedyNASError, OSError):
                return read_yaml(place / "config.yaml", "config file")
        return {}

    @property
    def title(self) -> str:
        """The name of the training: that of the run, and that of the network if there is one."""
        assert self.folder is not None
        folder = self.folder.resolve()
        own = (folder / "config.yaml").is_file()
        return clean(folder.name if own else f"{folder.parents[1].name}/{folder.name}")[:100]


def new_identity() -> str:
    """Return the name of a new run of a tracker."""
    return secrets.token_hex(8)


def check_tracker(name: str) -> None:
    """Refuse a tracker that does not exist or is not installed, before a training starts."""
    if name not in TRACKERS:
        raise GreedyNASError(f"--track takes {', '.join(TRACKERS)}, got {name!r}")
    require_packages(f"--track {name}", {TRACKERS[name]: TRACKERS[name]})


def sample_images(folder: Path) -> list[tuple[str, Image.Image]]:
    """Return the sample images of the test of a run's chosen network, with what was predicted as captions."""
    try:
        chosen = json.loads((folder / "arch.json").read_text(encoding="utf-8"))["model"]
        test = json.loads((folder / "models" / chosen / "test.json").read_text(encoding="utf-8"))
        names = test["class_names"]
        found = []
        for sample in test["samples"][:MOST_IMAGES]:
            data = base64.b64decode(sample["image"].partition(",")[2])
            caption = f"{names[sample['predicted']]} (true: {names[sample['label']]})"
            found.append((clean(caption), Image.open(io.BytesIO(data)).convert("RGB")))
        return found
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return []


def _known(values: Any) -> list[float]:
    return [float(value) for value in values if isinstance(value, (int, float))]
