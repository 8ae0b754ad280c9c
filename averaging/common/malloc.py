"""What a round frees is kept for the next one: touching fresh pages costs more than the copies into them."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # as <malloc.h> numbers them
_LARGEST = 32 << 20  # the most that glibc takes for the second


def keep_freed_memory(nbytes: int = 1 << 30) -> bool:
    """Lets this process keep memory that is freed, for whatever it allocates next, instead of giving it back at once.

    Threads that begin later share one heap, so that one can use what another has freed. All this concerns the whole
    process, so a library does not decide it: `averaging peer` calls it, and a program of your own may, when it begins.
    Only glibc can be told so, and only if the environment has not told it something else.

    Args:
        nbytes: kept at most, at the end of the heap; should be more than the tensors take.

    Returns:
        Whether it was done.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    most = min(nbytes, 2**31 - 1)
    return all(mallopt(*what) for what in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, most), (_ARENA_MAX, 1)))
