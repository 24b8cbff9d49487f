"""The alternate signal stack of a thread, on which Python's signal handlers run.

OpenVINO's plugin for CPUs replaces it whenever a `Core` loads the plugin, for the sake of AMX, and puts the former one back
when that `Core` and its models are gone. If two of them overlap and the older one goes first, it unmaps a stack that the
younger one puts back later. The next signal with a handler in Python (SIGCHLD beside the workers of PyTorch's
`DataLoader`, Ctrl-C) then ends the process by SIGSEGV, without a traceback, in whatever runs at that moment.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Stack(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Put this thread's alternate signal stack back when the block ends, whatever a library has made of it.

    A library whose stack is no longer in use leaves the stack alone when it is unloaded, and unmaps only its own.
    """
    if not sys.platform.startswith("linux"):  # OpenVINO changes it only there
        yield
        return
    libc, before = ctypes.CDLL(None), _Stack()
    known = libc.sigaltstack(None, ctypes.byref(before)) == 0
    try:
        yield
    finally:
        if known:
            libc.sigaltstack(ctypes.byref(before), None)
