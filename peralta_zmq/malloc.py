"""Memory that glibc's malloc keeps or returns to the system; without effect elsewhere."""

from __future__ import annotations

import ctypes
import platform


def keep_memory() -> None:
    """Keep freed memory: page faults would take up to a third of a step."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mmap, because free() would return such blocks
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: no trimming of the heap


def release_memory() -> None:
    """Return freed memory to the system, also after `keep_memory`."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
