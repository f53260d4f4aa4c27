"""A loss in a prompt that is under way to the server is reported only when it is clear that it lasts."""

from __future__ import annotations

from epp.base.types import ChunkHash
from epp.sources.kvevents.chunks import Node
from epp.sources.kvevents.pending_prompts import PendingPrompts


def nodes(count: int, *, first: int = 0) -> list[Node]:
    return [Node(ChunkHash(first + n), None, n + 1, 10, (), known=True) for n in range(count)]


def test_lost_chunk_is_returned_once_prompt_that_delays_it_was_computed() -> None:
    pending, path = PendingPrompts(), nodes(3)
    assert pending.expect(path, now=0.0) == []
    pending.note_loss(path[0])
    assert path[0] in pending
    assert pending.arrived(path[1]) == []  # no prompt ends there
    assert pending.arrived(path[2]) == [path[0]]
    assert path[0] not in pending
    pending.check_integrity()


def test_a_chunk_of_two_prompts_is_pending_until_both_were_computed() -> None:
    pending, path, other = PendingPrompts(), nodes(2), nodes(1, first=7)
    pending.expect(path, now=0.0)
    pending.expect([path[0], *other], now=1.0)
    pending.note_loss(path[0])
    assert pending.arrived(path[1]) == []
    assert pending.arrived(other[0]) == [path[0]]
    pending.check_integrity()


def test_a_repeated_prompt_is_one_prompt_whose_wait_starts_again() -> None:
    pending, path = PendingPrompts(), nodes(2)
    pending.expect(path, now=0.0)
    pending.expect(path, now=500.0)
    pending.note_loss(path[0])
    assert pending.overdue(700.0) == []
    assert pending.overdue(1100.0) == [path[0]]
    pending.check_integrity()


def test_the_oldest_of_too_many_prompts_is_given_up() -> None:
    pending, first = PendingPrompts(), nodes(1)
    pending.expect(first, now=0.0)
    pending.note_loss(first[0])
    for node in nodes(4095, first=1):
        assert pending.expect([node], now=1.0) == []
    assert pending.expect(nodes(1, first=5000), now=2.0) == first
    pending.check_integrity()


def test_all_losses_are_returned_when_the_server_starts_again() -> None:
    pending, path = PendingPrompts(), nodes(2)
    pending.expect(path, now=0.0)
    for node in path:
        pending.note_loss(node)
    assert set(pending.clear()) == set(path)
    assert path[0] not in pending
    assert pending.overdue(10_000.0) == []
    pending.check_integrity()
