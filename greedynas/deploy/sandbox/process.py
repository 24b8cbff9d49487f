"""Runs of untrusted model files in a separate process with limited memory and time, which cannot write files.

A file of three kilobytes can ask for fifty gigabytes or for hours, which is not known before it runs, and a runtime in
C++ may have faults that a hostile file uses. The child process (`child.py`) reads the file, checks it and opens it in
its runtime (`deploy/runtimes`). The parent trusts only what it can check: the card, and logits of the shape and size
that it asked for. Any failure of the child is reported in one line.

Messages between the two have a header in JSON and, for arrays, their bytes.
"""

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedynas.deploy.onnx_checks import INPUT, MAX_BYTES, OUTPUT
from greedynas.deploy.sandbox.child import LENGTHS, MOST_THREADS
from greedynas.runtime.errors import GreedyNASError

Floats = NDArray[np.float32]

MIB = 2**20
FILE_FACTOR = 8  # a file is in memory as bytes, parsed, checked and prepared: 7 times its size was measured (ONNX)
PIXEL_BYTES = 1024  # activations per pixel of an image: up to 500 bytes were measured (EfficientNet-B0)
BATCH_MEMORY = 512 * MIB  # activations of a batch; larger batches are run in parts
MOST_PIXELS = 4 * 2**20  # larger images get no more memory than one with this number of pixels
SECONDS_PER_BYTE = 1e-7  # additional time to start for each byte of the file (1 s for 10 MB; 0.1 s was measured)
RUN_SECONDS = 20.0  # time for a batch
RUN_TOGETHER = 32  # images for which a runtime that takes one at a time is asked at once
MAX_HEADER = 100 * MIB  # limit of a message's header; a card has at most a sixth of that
NO_MEMORY = ("bad_alloc", "allocate memory", "MemoryError", "exceeds the supported maximum")  # parts of error messages
STARTED = "import sys; sys.path[:] = {path!r}; from greedynas.deploy.sandbox.child import serve; serve({runtime!r})"


@dataclass(frozen=True)
class Runtime:
    """A runtime for untrusted files.

    Attributes:
        name: Its name for messages, such as "ONNX Runtime".
        kind: What a file is called in messages, such as "an ONNX file".
        module: The module with its `Model` (`deploy/runtimes`), which the process imports.
        memory: The bytes of address space that the process needs without a file, with a margin.
        seconds: The time that it has to start.
        one_by_one: Whether it runs one image at a time, so that a batch needs no more memory than an image.
    """

    name: str
    kind: str
    module: str
    memory: int
    seconds: float = 20.0
    one_by_one: bool = False


ONNX_RUNTIME = Runtime(
    "ONNX Runtime",
    "an ONNX file",
    "greedynas.deploy.runtimes.onnx_model",
    768 * MIB,  # Python, NumPy, ONNX Runtime and its threads took 250 to 450 MiB
)


@dataclass(frozen=True)
class Limits:
    """The limits of the process."""

    memory: int  # bytes of address space
    seconds: float  # limit for one task

    def memory_text(self) -> str:
        """Return the limit of memory for messages."""
        return f"{self.memory / 1e9:.1f} GB"


def images_at_once(size: int, most: int) -> int:
    """Return the number of images of a size that are run together, at most `most`."""
    return max(1, min(most, BATCH_MEMORY // (PIXEL_BYTES * size * size)))


class ModelProcess:
    """A model file that is open in a separate process, which ends with this object.

    Args:
        file: The file.
        runtime: The runtime that opens it.
        threads: The number of CPU threads.
        companions: Further files that belong to it.

    Attributes:
        card: The text of the card in the file; None if it has none.
    """

    def __init__(self, file: Path, runtime: Runtime, threads: int, companions: Sequence[Path] = ()):
        for part in (file, *companions):
            if not part.is_file():
                raise GreedyNASError(f"no such model: {part}")
        self.file, self.runtime = file, runtime
        length = sum(part.stat().st_size for part in (file, *companions))
        if length > MAX_BYTES:
            raise GreedyNASError(f"{file} is not {runtime.kind}: it is larger than the limit of {MAX_BYTES:,} bytes")
        self._start = runtime.seconds + SECONDS_PER_BYTE * length
        self._held = runtime.memory + FILE_FACTOR * length
        self._limits = Limits(self._held, self._start)
        self._process = _start_process(runtime)
        self._end = weakref.finalize(self, _end_process, self._process)
        self._classes = 0
        self._threads = max(1, min(threads, MOST_THREADS))
        task = {"file": str(file.absolute()), "name": str(file)}
        self.card: str | None = self._ask(self._limits, task)[0]["card"]

    def open(self, channels: int, size: int, classes: int) -> None:
        """Check the file against its card, and prepare it for images of this size."""
        batch = max(BATCH_MEMORY, PIXEL_BYTES * min(size * size, MOST_PIXELS))
        self._limits = Limits(self._held + batch, self._start)
        found, _ = self._ask(self._limits, {"threads": self._threads})
        wanted = {"input": [[INPUT, [channels, size, size]]], "output": [[OUTPUT, [classes]]]}
        if any(found.get(key, wanted[key]) != wanted[key] for key in wanted):
            raise GreedyNASError(
                f"{self.file} does not fit its card: it should take {INPUT} of {(channels, size, size)} and give {OUTPUT} of "
                f"{classes} classes, for any number of images"
            )
        self._classes = classes

    def classify(self, images: Floats) -> Floats:
        """Return the logits of images (n, channels, size, size)."""
        at_once = images_at_once(images.shape[2], len(images)) if not self.runtime.one_by_one else RUN_TOGETHER
        parts = [self._part(images[i : i + at_once]) for i in range(0, len(images), at_once)]
        return np.concatenate(parts)

    def _part(self, images: Floats) -> Floats:
        limits = Limits(self._limits.memory, RUN_SECONDS)
        shape = (len(images), self._classes)
        header, data = self._ask(limits, {"shape": images.shape}, images.tobytes(), math.prod(shape) * 4)
        if header.get("shape") != list(shape) or len(data) != math.prod(shape) * 4:
            raise GreedyNASError(
                f"{self.file} does not fit its card: it gives no logits of {shape[1]} classes for each image"
            )
        return np.frombuffer(data, np.float32).reshape(shape)

    def _ask(
        self, limits: Limits, task: dict[str, Any], data: bytes = b"", most: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        """Send a task to the process and return its answer: a header, and an array of at most `most` bytes."""
        until = time.monotonic() + limits.seconds
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        header = json.dumps({**task, "memory": limits.memory, "seconds": limits.seconds}).encode()
        try:
            _send_before(process.stdin.fileno(), LENGTHS.pack(len(header), len(data)) + header, until)
            _send_before(process.stdin.fileno(), data, until)
            lengths = LENGTHS.unpack(_receive_before(process.stdout.fileno(), LENGTHS.size, until))
            if lengths[0] > MAX_HEADER or lengths[1] > most:
                raise ValueError
            answer = json.loads(_receive_before(process.stdout.fileno(), lengths[0], until))
            content = _receive_before(process.stdout.fileno(), lengths[1], until)
        except TimeoutError:
            self._end()
            raise GreedyNASError(
                f"{self.file} was stopped after {limits.seconds:.0f} s: networks of greedynas need less. {self._instead()}"
            ) from None
        except ValueError:
            self._end()
            raise GreedyNASError(
                f"{self.file} does not fit its card: its output is not the logits of the images"
            ) from None
        except (EOFError, OSError):
            raise GreedyNASError(self._why_it_ended(limits)) from None
        if "error" in answer:
            self._end()
            raise GreedyNASError(self._error_message(str(answer["error"]), bool(answer.get("refused")), limits))
        return answer, content

    def _error_message(self, error: str, refused: bool, limits: Limits) -> str:
        line = " ".join(error.split())
        if refused:  # by the checks of greedynas
            return line
        if any(word in line for word in NO_MEMORY):
            return self._too_large(limits)
        return f"{self.runtime.name} cannot run {self.file}: {line:.200}"

    def _instead(self) -> str:
        return f"If you trust it, use the model.safetensors of the same network, or open it in {self.runtime.name} yourself"

    def _too_large(self, limits: Limits) -> str:
        return (
            f"{self.file} was stopped: a network of greedynas for such images needs less than "
            f"{limits.memory_text()} of memory. {self._instead()}"
        )

    def _why_it_ended(self, limits: Limits) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        self._end()
        if code == -signal.SIGABRT:  # C++ code aborts when it gets no memory
            return self._too_large(limits)
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else "ended"
        allowed = f"{limits.memory_text()} of memory and {limits.seconds:.0f} s"
        return f"{self.file} cannot be run: its process {how} (it has {allowed})"


def _start_process(runtime: Runtime) -> subprocess.Popen[bytes]:
    # By default, glibc reserves 64 MiB of addresses for each thread.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", STARTED.format(path=sys.path, runtime=runtime.module)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # runtimes print their exceptions there too
        env=environment,
        start_new_session=True,  # Ctrl-C must reach only the parent, which ends the child
    )


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.wait()


def _send_before(pipe: int, data: bytes, until: float) -> None:
    os.set_blocking(pipe, False)
    view = memoryview(data)
    while view:
        if not select.select([], [pipe], [], max(0.0, until - time.monotonic()))[1]:
            raise TimeoutError
        view = view[os.write(pipe, view[: 2**20]) :]


def _receive_before(pipe: int, length: int, until: float) -> bytes:
    parts = []
    while length:
        if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe, min(length, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
