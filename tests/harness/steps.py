"""Counts the lines of Python that a call runs, and blocks of memory: tests of cost need no clock."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(call: Callable[[], object]) -> int:
    """Return how many lines of Python `call` runs. A call of a C function is a part of its line."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def blocks() -> int:
    """Return how many blocks of memory Python has given out."""
    gc.collect()
    return sys.getallocatedblocks()
