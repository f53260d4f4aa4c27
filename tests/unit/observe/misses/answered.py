"""Requests that a picker sends and that end well, for the tests of misses."""

from typing import Any

from epp.picker.picker import Picker
from tests.unit.picker.picker_questions import ask


def served(picker: Picker, prompt: bytes, *, now: float, **more: Any) -> str:
    """Return the server of a request that is sent, answered and ended at `now`."""
    pick = picker.pick(ask(prompt, **more), now=now)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
    picker.end(pick, outcome="ended", now=now)
    picker.housekeep(now=now)
    return pick.decision.chosen
