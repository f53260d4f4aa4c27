"""Header blocks that come in several frames."""

from __future__ import annotations

from epp.transport.http2.call_events import Over
from tests.harness.http2_frames import CallerSide, continuation, headers


def test_endless_continuation_frames_end_the_connection() -> None:
    side = CallerSide().opened()
    side.feed(headers(1, b"", whole=False))
    events = side.feed(*(continuation(1, b"", whole=False) for _ in range(20)))
    assert events[-1] == Over("continuation_flood")
    side = CallerSide().opened()
    side.feed(headers(1, bytes(9000), whole=False))
    assert side.feed(continuation(1, bytes(9000), whole=False))[-1] == Over("header_list_too_large")
