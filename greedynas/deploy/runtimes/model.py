"""The interface of a model file that is open in a runtime."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Shapes = dict[str, list[Any]]  # "input" and "output": [[name, shape without the batch axis]]


class RuntimeModel(ABC):
    """A model file in a runtime. It is created first, which reads the file, and opened later.

    Args:
        file: The file.
        name: The name of the file for messages.

    Attributes:
        card: The text of the card, if files of this format contain it.
    """

    card: str | None = None

    def __init__(self, file: Path, name: str):
        self.file, self.name = file, name

    @classmethod
    def load_runtime(cls) -> None:
        """Import what must be imported before the process is limited."""
        return

    @abstractmethod
    def open(self, threads: int) -> Shapes:
        """Check the file, prepare it for runs with this number of threads (0: the runtime's default).

        Returns:
            The names and shapes of input and output, as far as the file states them.
        """

    @abstractmethod
    def run(self, images: Floats) -> Floats:
        """Return the logits (n, classes) of images (n, channels, size, size)."""

    def once(self, image: Floats) -> Callable[[], object]:
        """Return a function that runs the model once on an image, without what only Python needs, for timing."""
        return lambda: self.run(image)


class OneByOne(RuntimeModel):
    """A model that takes one image at a time."""

    @abstractmethod
    def run_one(self, image: Floats) -> Floats:
        """Return the logits of one image: (1, channels, size, size) -> (1, classes) or (classes,)."""

    def run(self, images: Floats) -> Floats:
        return np.stack([self.run_one(images[i : i + 1]).reshape(-1) for i in range(len(images))])

    def once(self, image: Floats) -> Callable[[], object]:
        return lambda: self.run_one(image)


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Return a function that runs something once and returns the milliseconds."""

    def runner() -> float:
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / 1e6

    return runner
