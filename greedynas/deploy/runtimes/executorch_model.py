"""ExecuTorch programs on the CPU. The runtime needs PyTorch for its tensors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from greedynas.deploy.runtimes.model import Floats, OneByOne, Shapes
from greedynas.runtime.errors import GreedyNASError


class Model(OneByOne):
    """An ExecuTorch program (`.pte`)."""

    @classmethod
    def load_runtime(cls) -> None:
        with _no_messages():
            import executorch.extension.pybindings.portable_lib  # noqa: F401

    def open(self, threads: int) -> Shapes:
        self._data = self.file.read_bytes()  # kept, because the runtime does not copy it
        if self._data[4:6] != b"ET":
            raise GreedyNASError(f"{self.name} is not an ExecuTorch program")
        with _no_messages():
            from executorch.extension.pybindings import portable_lib

            if threads:  # all programs of a process share their threads
                portable_lib._unsafe_reset_threadpool(threads)
            portable_lib._threadpool_get_thread_count()  # starts them, with messages, which the first run would do
            verified = portable_lib.Verification.InternalConsistency
            self._module = portable_lib._load_for_executorch_from_buffer(self._data, program_verification=verified)
        return {}

    def run_one(self, image: Floats) -> Floats:
        import torch

        (logits,) = self._module.run_method("forward", (torch.from_numpy(np.array(image)),))
        return logits.numpy().copy()


@contextmanager
def _no_messages() -> Iterator[None]:
    """Hide what the runtime's C++ code writes about the processor, which is not a problem."""
    before = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nothing)
