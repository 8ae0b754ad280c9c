"""Keeps memory that a round frees for the next one, since page faults cost more than the copies into the pages."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # constants of <malloc.h>
_MAX_MMAP_THRESHOLD = 32 << 20  # glibc's limit


def keep_freed_memory(nbytes: int = 1 << 30) -> bool:
    """Makes glibc keep freed memory for later allocations instead of returning it to the system at once.

    Threads that start later share one heap, so that one can reuse what another has freed. The setting affects the whole
    process, so the library does not change it by default. `averaging peer` calls this function, and your program can
    call it when it starts. It does nothing without glibc, or if environment variables already configure glibc's malloc.

    Args:
        nbytes: maximum to keep at the end of the heap; should be more than the size of the tensors.

    Returns:
        Whether the setting was changed.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    configured = "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)
    if configured or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    values = {_MMAP_THRESHOLD: _MAX_MMAP_THRESHOLD, _TRIM_THRESHOLD: min(nbytes, 2**31 - 1), _ARENA_MAX: 1}
    return all(mallopt(*setting) for setting in values.items())
