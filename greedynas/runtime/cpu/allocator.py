"""The memory allocator of the C library, set up to keep the memory that a training step frees for the next step.

By default glibc gives large buffers back to the system as soon as they are freed. The next step gets them anew, and the
system has to clear every page: 15 to 30% of a training step. Kept memory is not returned before the process ends.
"""

import ctypes
import os
import sys
from functools import cache

from greedynas.runtime.text import logger

VARIABLE = "GREEDYNAS_ALLOCATOR"  # "system" leaves the allocator alone
# Parameters of mallopt in glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
LARGEST = 2**31 - 1
STEP = 64 << 20  # bytes by which the heap grows


def allocator_name() -> str:
    """Return how this process allocates memory: "kept" if freed memory is kept, else "system"."""
    return "kept" if keep_freed_memory.cache_info().currsize and keep_freed_memory() else "system"


@cache
def keep_freed_memory() -> bool:
    """Let the allocator keep freed memory, and return whether it does. The first call decides for the whole process."""
    if os.environ.get(VARIABLE) == "system":
        logger.info("the allocator is left as it is (%s=system)", VARIABLE)
        return False
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_MAX_" in os.environ or "LD_PRELOAD" in os.environ:
        return False  # another system, or another allocator that somebody chose
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - other C libraries have no mallopt, or one that does nothing
        done = [libc.mallopt(*pair) for pair in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, LARGEST), (M_TOP_PAD, STEP))]
    except (OSError, AttributeError):
        return False
    return all(done)
