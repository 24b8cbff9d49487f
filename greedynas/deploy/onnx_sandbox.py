"""Run an ONNX file in a process of its own, with limits of memory and time.

A file of three kilobytes can ask for fifty gigabytes or for hours, and what it will ask for is not known before it runs. The
process that runs it reads the file, checks it and opens it in ONNX Runtime. This one, the parent, believes nothing but what
it can check: the card, and logits of the shape and size that it asked for. Whatever goes wrong over there is one line here.

Messages between the two are a header in JSON and, for arrays, their bytes.
"""

import json
import math
import os
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from greedynas.deploy.onnx_checks import (
    INPUT,
    MAX_BYTES,
    OUTPUT,
    check_onnx,
    open_session,
    parse_onnx,
    refuse_growth,
    shapes,
)
from greedynas.runtime.errors import GreedyNASError

Floats = NDArray[np.float32]

MIB = 2**20
START_MEMORY = (
    768 * MIB
)  # address space of Python, NumPy, ONNX Runtime and its threads (250 to 450 MiB), with room to spare
FILE_FACTOR = 8  # a file is in memory as bytes, parsed, checked and prepared: 7 times its size was measured
PIXEL_BYTES = 1024  # activations for one pixel of an image: up to 500 bytes were measured (EfficientNet-B0)
BATCH_MEMORY = 512 * MIB  # of the activations of a batch; larger batches are run in parts
MOST_PIXELS = 4 * 2**20  # an image of more pixels gets no more memory than one of these
START_SECONDS = 20.0  # until the file is checked and open,
SECONDS_PER_BYTE = 1e-7  # and for each byte of it (1 s for 10 MB; on one core 0.1 s was measured)
RUN_SECONDS = 20.0  # for a batch
MOST_THREADS = 16
MAX_HEADER = 100 * MIB  # of a message; a card has at most a sixth of that
NO_MEMORY = ("bad_alloc", "allocate memory", "MemoryError", "exceeds the supported maximum")  # in messages of a failure
INSTEAD = "If you trust it, use the model.safetensors of the same network, or open it in ONNX Runtime yourself"
STARTED = "import sys; sys.path[:] = {path!r}; from greedynas.deploy.onnx_sandbox import serve; serve()"

_LENGTHS = struct.Struct("<QQ")  # of a message's header and of its bytes


@dataclass(frozen=True)
class Limits:
    """What the process may take."""

    memory: int  # bytes of address space
    seconds: float  # for one task

    def told(self) -> str:
        return f"{self.memory / 1e9:.1f} GB"


def images_at_once(size: int, most: int) -> int:
    """Return how many images of a size are run together."""
    return max(1, min(most, BATCH_MEMORY // (PIXEL_BYTES * size * size)))


class OnnxProcess:
    """An ONNX file that is open in another process. `card` is the text of its card, in its metadata by the name
    `key`; `classify` gives logits.

    The process ends with this object.
    """

    def __init__(self, file: Path, key: str, threads: int):
        if not file.is_file():
            raise GreedyNASError(f"no such model: {file}")
        self.file, length = file, file.stat().st_size
        if length > MAX_BYTES:
            raise GreedyNASError(f"{file} is not an ONNX file: it is larger than one can be")
        self._start = START_SECONDS + SECONDS_PER_BYTE * length
        self._held = START_MEMORY + FILE_FACTOR * length
        self._limits = Limits(self._held, self._start)
        self._process = _start_process()
        self._end = weakref.finalize(self, _end_process, self._process)
        self._classes = 0
        task = {
            "file": str(file.absolute()),
            "name": str(file),
            "key": key,
            "threads": max(1, min(threads, MOST_THREADS)),
        }
        self.card: str | None = self._ask(self._limits, task)[0]["card"]

    def open(self, channels: int, size: int, classes: int) -> None:
        """Check the file against its card, and prepare it for images of this kind."""
        batch = max(BATCH_MEMORY, PIXEL_BYTES * min(size * size, MOST_PIXELS))
        self._limits = Limits(self._held + batch, self._start)
        found, _ = self._ask(self._limits, {})
        wanted = {"input": [[INPUT, [channels, size, size]]], "output": [[OUTPUT, [classes]]]}
        if {key: found.get(key) for key in wanted} != wanted:
            raise GreedyNASError(
                f"{self.file} does not fit its card: it should take {INPUT} of {(channels, size, size)} and give {OUTPUT} of "
                f"{classes} classes, for any number of images"
            )
        self._classes = classes

    def classify(self, images: Floats) -> Floats:
        """Return the logits of images (n, channels, size, size)."""
        at_once = images_at_once(images.shape[2], len(images))
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
        """Give the process a task and wait for its answer of at most so many bytes."""
        until = time.monotonic() + limits.seconds
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        header = json.dumps({**task, "memory": limits.memory, "seconds": limits.seconds}).encode()
        try:
            _send_before(process.stdin.fileno(), _LENGTHS.pack(len(header), len(data)) + header, until)
            _send_before(process.stdin.fileno(), data, until)
            lengths = _LENGTHS.unpack(_receive_before(process.stdout.fileno(), _LENGTHS.size, until))
            if lengths[0] > MAX_HEADER or lengths[1] > most:
                raise ValueError
            answer = json.loads(_receive_before(process.stdout.fileno(), lengths[0], until))
            content = _receive_before(process.stdout.fileno(), lengths[1], until)
        except TimeoutError:
            self._end()
            raise GreedyNASError(
                f"{self.file} was stopped after {limits.seconds:.0f} s: a network of greedynas does not take that long. {INSTEAD}"
            ) from None
        except ValueError:
            self._end()
            raise GreedyNASError(
                f"{self.file} does not fit its card: it gives more or other numbers than logits"
            ) from None
        except (EOFError, OSError):
            raise GreedyNASError(self._why_it_ended(limits)) from None
        if "error" in answer:
            self._end()
            raise GreedyNASError(self._told(str(answer["error"]), bool(answer.get("refused")), limits))
        return answer, content

    def _told(self, error: str, refused: bool, limits: Limits) -> str:
        line = " ".join(error.split())
        if refused:  # by our own checks
            return line
        if any(word in line for word in NO_MEMORY):
            return self._too_large(limits)
        return f"ONNX Runtime cannot run {self.file}: {line:.200}"

    def _too_large(self, limits: Limits) -> str:
        return (
            f"{self.file} was stopped: a network of greedynas for such images needs less than {limits.told()} of memory. "
            f"{INSTEAD}"
        )

    def _why_it_ended(self, limits: Limits) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        self._end()
        if code == -signal.SIGABRT:  # C++ code that gets no memory
            return self._too_large(limits)
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else "ended"
        return f"{self.file} cannot be run: its process {how} (it has {limits.told()} of memory and {limits.seconds:.0f} s)"


def _start_process() -> subprocess.Popen[bytes]:
    # glibc reserves 64 MiB of addresses for each thread unless it is told not to.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", STARTED.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # ONNX Runtime prints there what it raises as well
        env=environment,
        start_new_session=True,  # Ctrl-C is for the parent, which ends this one
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


# In the other process


def serve() -> None:
    """Do what the parent asks for until it is gone."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        _serve(questions, answers)
    except EOFError:
        pass
    except GreedyNASError as error:
        _answer(answers, {"error": str(error), "refused": True})
    except Exception as error:  # ONNX Runtime has many, without a common base
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
    os._exit(0)  # without taking a session apart that may have failed


def _serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    task, _ = _question(questions)
    name = task["name"]
    data = Path(task["file"]).read_bytes()
    model = parse_onnx(data, name)
    _answer(answers, {"card": {entry.key: entry.value for entry in model.metadata_props}.get(task["key"])})

    _question(questions)  # the parent has read the card, and it is one
    check_onnx(model, name)
    refuse_growth(model, name)
    found = {"input": shapes(model.graph.input), "output": shapes(model.graph.output)}
    del model
    session = open_session(data, task["threads"])
    del data
    _answer(answers, found)

    while True:
        task, images = _question(questions)
        logits = session.run([OUTPUT], {INPUT: np.frombuffer(images, np.float32).reshape(task["shape"])})[0]
        logits = np.ascontiguousarray(logits, np.float32)
        _answer(answers, {"shape": logits.shape}, logits.tobytes())


def _question(questions: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    lengths = questions.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        raise EOFError
    header, data = (questions.read(length) for length in _LENGTHS.unpack(lengths))
    task = json.loads(header)
    _limit(task["memory"], task["seconds"] * MOST_THREADS)
    return task, data


def _limit(memory: int, seconds: float) -> None:
    """Let this process have so much memory in all, and so much time from now on, whether its parent lives or not."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    soon = math.ceil(used.ru_utime + used.ru_stime + seconds)
    for kind, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, soon), (resource.RLIMIT_AS, memory)):
        hard = resource.getrlimit(kind)[1]
        with suppress(OSError, ValueError):  # macOS has no limit of addresses
            resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _answer(answers: IO[bytes], header: dict[str, Any], data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    answers.write(_LENGTHS.pack(len(text), len(data)) + text + data)
    answers.flush()
