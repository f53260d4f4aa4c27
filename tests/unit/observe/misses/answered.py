"""Pickers whose misses are watched, and their requests that end well."""

from typing import Any

from epp.config.policy import PolicySpec
from epp.observe.misses import Misses
from epp.picker.picker import Picker
from tests.unit.picker.picker_questions import a_picker, ask, endpoints


def watched(spec: PolicySpec = PolicySpec(), names: str = "a") -> tuple[Picker, Misses]:  # noqa: B008 - frozen
    picker = a_picker(spec, on=endpoints(names))
    misses = Misses(picker)
    picker.subscribe(misses.on_event)
    return picker, misses


def served(picker: Picker, prompt: bytes, *, now: float, **more: Any) -> str:
    """Return the server of a request that is sent, answered and ended at `now`."""
    pick = picker.pick(ask(prompt, **more), now=now)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
    picker.end(pick, outcome="ended", now=now)
    picker.housekeep(now=now)
    return pick.decision.chosen
