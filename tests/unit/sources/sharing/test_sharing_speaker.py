"""What a picker tells the others of its own events, and what it leaves out."""

from __future__ import annotations

from epp.sources.sharing.batches import Kept, SharedOver, decode_batch
from tests.unit.picker.picker_questions import text
from tests.unit.sources.sharing.pickers import Replica, meet, two


def test_events_without_room_in_the_queue_are_counted_and_forgotten() -> None:
    one, other = Replica(1, outbox_bytes=2000), Replica(2)
    meet([one, other], now=0.0)
    one.pick(text("told"), now=1.0)
    other.receive(one.send(now=1.0), now=1.0)
    for n in range(20):
        one.pick(text(str(n)), now=2.0)
    one.check()
    speaker = one.exchange
    assert speaker.waiting_bytes <= 2000
    assert speaker.dropped + speaker.waiting == 20
    other.receive(one.send(now=3.0), now=3.0)
    assert sum(other.in_flight_of_peers().values()) == 20 - speaker.dropped, (
        "the prompt that was reported before is forgotten too"
    )


def test_a_batch_holds_only_hashes_of_prompts() -> None:
    one, _ = two()
    one.pick(b"secret words " * 100, now=1.0)
    said = b"".join(one.send(now=1.0))
    assert b"secret" not in said


def test_an_end_says_whether_the_prompt_is_in_the_cache() -> None:
    one, _ = two()
    answered, failed, aborted = (one.pick(text(name), now=10.0) for name in "pqr")
    one.send(now=10.0)
    one.end(answered, now=11.0)
    one.end(failed, now=11.0, status=500)
    one.picker.end(aborted, outcome="aborted", now=11.0)
    (batch,) = (decode_batch(data) for data in one.send(now=11.0))
    ends = [event for event in batch.events if isinstance(event, SharedOver)]
    assert [(Kept(end.kept), end.failed) for end in ends] == [
        (Kept.COMPUTED, False),
        (Kept.LOST, True),
        (Kept.LOST, False),
    ], "a client that leaves before the answer begins is no fault of the server"
