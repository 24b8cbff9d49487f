"""File permissions that also apply to root, because the tests run as root in containers."""

import ctypes
import os
from contextlib import contextmanager

DAC = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
VERSION = 0x20080522


class Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def like_anybody():
    """Restrict this thread, and those it starts, to what file permissions allow."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = Header(VERSION, 0), (Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0, os.strerror(ctypes.get_errno())
    before = sets[0].effective
    sets[0].effective = before & ~DAC
    assert libc.capset(ctypes.byref(header), sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0, os.strerror(ctypes.get_errno())
