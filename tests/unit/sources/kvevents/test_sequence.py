"""The messages that wait for a replay are bounded. `tests/property/kvevents/test_sequence_properties.py`
tests their order.
"""

from __future__ import annotations

import pytest

from epp.sources.kvevents.sequence import Deliver, Forget, Sequence


@pytest.mark.parametrize(("size_bytes", "held_back"), [(0, 10_000), (8 << 20, 8)])
def test_too_many_or_too_long_waiting_messages_end_the_wait_for_a_replay(
    size_bytes: int, held_back: int
) -> None:
    messages, payload = Sequence(replays=True), bytes(size_bytes)
    messages.replayed(0, b"first")
    messages.replay_over()
    assert messages.live(2, payload) == []
    assert messages.due == 0
    for number in range(3, 2 + held_back):
        assert messages.live(number, payload) == []
    steps = messages.live(2 + held_back, payload)
    assert steps == [Forget("gap"), *[Deliver(payload)] * (held_back + 1)]
    assert (messages.gaps, messages.lost) == (1, 1)
    messages.check_integrity()
