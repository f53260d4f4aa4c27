"""Requests that ended without a token count for a while, and never make a server busier than others."""

from __future__ import annotations

import pytest

from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.picker.scheduling.snapshot import Snapshot
from tests.unit.picker.picker_questions import ADDRESSES, a_picker, ask, endpoints, text


def send(picker: Picker, server: str, prompt: bytes = b"", *, now: float) -> Pick:
    return picker.pick(ask(prompt, subset=frozenset({ADDRESSES[server]})), now=now)


def refuse(picker: Picker, server: str, prompt: bytes = b"", *, now: float) -> None:
    pick = send(picker, server, prompt, now=now)
    picker.on_response_headers(pick, status=401, served=pick.destinations[0], now=now)
    picker.end(pick, outcome="ended", now=now)


def seen(picker: Picker, *, now: float) -> Snapshot:
    spec = picker.policy.spec
    return picker.fleet.snapshot(range(3), model="m", adapter="", spec=spec, now=now)


def test_a_refused_request_counts_for_as_long_as_an_answer_takes() -> None:
    picker = a_picker(on=endpoints("abc"))
    for server in "bc":
        for _ in range(3):
            send(picker, server, text(server), now=1.0)
    refuse(picker, "a", text("a"), now=1.0)
    assert seen(picker, now=1.01).in_flight.tolist() == [1, 3, 3]
    assert seen(picker, now=1.01).undone_tokens[0] > 0
    assert seen(picker, now=2.1).in_flight.tolist() == [0, 3, 3]  # a second is assumed, until answers tell
    assert seen(picker, now=2.1).undone_tokens[0] == 0


def test_no_server_counts_as_busier_than_the_others_by_more_than_a_request() -> None:
    picker = a_picker(on=endpoints("abc"))
    for server in "bc":
        for _ in range(3):
            send(picker, server, text(server), now=1.0)
    for _ in range(1000):
        refuse(picker, "a", text("a"), now=1.0)
    assert seen(picker, now=1.01).in_flight.tolist() == [4, 3, 3]
    undone = seen(picker, now=1.01).undone_tokens
    assert undone[0] == pytest.approx(undone[1:].mean())
