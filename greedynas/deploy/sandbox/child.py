"""The process in which an untrusted model file is open (`process.py` is the parent)."""

import json
import math
import os
import struct
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

from greedynas.deploy.runtimes.model import RuntimeModel
from greedynas.runtime.errors import GreedyNASError

MOST_THREADS = 16
LENGTHS = struct.Struct("<QQ")  # lengths of a message's header and of its bytes


def serve(runtime: str) -> None:
    """Answer the tasks of the parent until it ends; `runtime` is the module of `deploy/runtimes` that opens the file."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not be taken for an answer
    try:
        _serve(import_module(runtime).Model, questions, answers)
    except EOFError:
        pass
    except GreedyNASError as error:
        _answer(answers, {"error": str(error), "refused": True})
    except Exception as error:  # runtimes raise types without a common base
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
    os._exit(0)  # without destroying a session that may have failed


def _serve(kind: type[RuntimeModel], questions: IO[bytes], answers: IO[bytes]) -> None:
    kind.load_runtime()  # before this process is limited: PyTorch writes a temporary file when it is imported
    task, _ = _question(questions)
    model = kind(Path(task["file"]), task["name"])
    _answer(answers, {"card": model.card})

    task, _ = _question(questions)  # the parent has read the card and accepted it
    _answer(answers, model.open(task["threads"]))

    while True:
        task, images = _question(questions)
        logits = model.run(np.frombuffer(images, np.float32).reshape(task["shape"]))
        logits = np.ascontiguousarray(logits, np.float32)
        _answer(answers, {"shape": logits.shape}, logits.tobytes())


def _question(questions: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    lengths = questions.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        raise EOFError
    header, data = (questions.read(length) for length in LENGTHS.unpack(lengths))
    task = json.loads(header)
    _limit(task["memory"], task["seconds"] * MOST_THREADS)
    return task, data


def _limit(memory: int, seconds: float) -> None:
    """Limit the memory of this process and its CPU time from now on, even if its parent has ended."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    soon = math.ceil(used.ru_utime + used.ru_stime + seconds)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,  # nothing can be written to a file
        resource.RLIMIT_CPU: soon,
        resource.RLIMIT_AS: memory,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        with suppress(OSError, ValueError):  # macOS cannot limit the address space
            resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _answer(answers: IO[bytes], header: dict[str, Any], data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    answers.write(LENGTHS.pack(len(text), len(data)) + text + data)
    answers.flush()
