"""Keeps the memory of a step's large temporary tensors in the process, instead of returning it to the system
and getting it again.

glibc returns large pieces to the system when they are freed. In the next step each of their pages causes a
fault and is cleared again, which takes a tenth of a prefill's time. With another C library this module
changes nothing. Caller: the code that loads a model for the CPU.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""The numbers of these settings in <malloc.h>."""
_LARGEST_BYTES = 32 << 20
"""The largest value that glibc accepts. Larger pieces are still mapped separately."""
_KEPT_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """Return whether the C library accepted the setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_MMAP_THRESHOLD, _LARGEST_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _LARGEST_BYTES))
    taken = [mallopt(name, value) for name, value in wanted]
    return all(taken)
