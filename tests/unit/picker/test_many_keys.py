"""Names and prompts that never come again fill nothing: every collection of the picker has a bound."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest

from epp.config.policy import PolicySpec
from epp.config.routing import Table
from epp.observe.misses.finding import Misses
from epp.sources.sharing.exchange import Exchange
from tests.unit.picker.picker_questions import a_picker, ask, endpoints

_MOST = 2**15
"""The largest bound of a collection."""


def sizes(*roots: object) -> Iterator[tuple[int, str]]:
    """Yield the length of each collection that the objects lead to, and the type that owns it."""
    known, todo = set[int](), [(root, "") for root in roots]
    while todo:
        value, owner = todo.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, dict | list | tuple | set | deque):
            yield len(value), owner
            todo += [(each, owner) for each in value]
            todo += [(each, owner) for each in (value.values() if isinstance(value, dict) else ())]
        elif type(value).__module__.startswith("epp."):
            slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
            names = slots or list(getattr(value, "__dict__", ()))
            todo += [(getattr(value, name, None), f"{type(value).__name__}.{name}") for name in names]


@pytest.mark.slow
def test_34_000_different_keys_leave_no_collection_larger_than_its_bound() -> None:
    picker = a_picker(PolicySpec(table=Table(default_capacity_tokens=5000)), on=endpoints("ab"))
    misses, exchange = Misses(picker), Exchange(picker, me=b"1", outbox_bytes=2**16)
    picker.subscribe(misses.on_event)
    rng = random.Random(1)
    for n in range(34_000):
        now, name = n * 0.01, f"name {n}"
        question = ask(rng.randbytes(300).hex().encode(), model=name, salt=name, session=name, stream=True)
        pick = picker.pick(question, now=now)
        picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
        picker.end(pick, outcome="ended", now=now)
        picker.tidy(now=now)
        if n % 500 == 0:
            misses.work(limit=1000)
            picker.housekeep(now=now)
    largest = max(sizes(picker, misses, exchange))
    assert largest[0] <= _MOST, largest
    assert sum(mirror.entries for mirror in picker.table.mirrors.values()) < 200
