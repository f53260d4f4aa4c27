"""Keeps the memory of a step's large temporary tensors in the process,
instead of giving it back and fetching it anew.

glibc returns large pieces to the system as they are freed, and each of the next step's pages is then faulted
in and cleared again: a tenth of a prefill's time. Nothing where the C library is another one. Caller: whoever
loads a model for the CPU.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Of <malloc.h>."""
_LARGEST_BYTES = 32 << 20
"""What glibc takes at the most: larger pieces are still mapped by themselves."""
_KEPT_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """Whether the C library has taken it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_MMAP_THRESHOLD, _LARGEST_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _LARGEST_BYTES))
    taken = [mallopt(name, value) for name, value in wanted]
    return all(taken)
