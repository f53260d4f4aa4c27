"""The ring of decisions: it is bounded, shows the newest first, and stays right when request ids repeat."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from epp.observe.telemetry.decisions import DecisionRing, RefusalRecord, as_json, encode
from tests.unit.observe.telemetry.records import HERE, decision


def refusal(request_id: str) -> RefusalRecord:
    return RefusalRecord(
        request_id=request_id, at_unix_s=1.0, status=400, reason="bad_json", message="not JSON"
    )


@settings(deadline=None)
@given(st.integers(0, 6), st.lists(st.sampled_from("abcd"), max_size=30))
def test_the_ring_holds_the_last_records_and_finds_the_newest_of_each_id(keep: int, ids: list[str]) -> None:
    ring = DecisionRing(maxlen=keep)
    for n, request_id in enumerate(ids):
        ring.append(refusal(request_id) if n % 3 == 0 else decision(request_id))
        kept = ring.last(len(ids))
        assert [r.request_id for r in reversed(kept)] == ids[: n + 1][-keep or n + 1 :]
        for each in "abcd":
            assert ring.get(each) is next((r for r in kept if r.request_id == each), None)


def test_json_shows_the_outcome_after_the_pick() -> None:
    ring = DecisionRing(maxlen=1)
    made = decision()
    ring.append(made)
    made.status, made.outcome, made.served, made.ttft_s = 200, "ended", HERE, 0.25
    record = ring.get("r1")
    assert record is not None
    shown = json.loads(encode(as_json(record)))
    assert shown["request_id"] == "r1"
    assert (shown["status"], shown["outcome"], shown["served"], shown["ttft_s"]) == (
        200,
        "ended",
        "10.0.0.1:8000",
        0.25,
    )
    assert shown["destinations"] == ["10.0.0.1:8000", "[fd00::2]:8000"]
    assert shown["candidates"][0]["name"] == "a"
    assert shown["candidates"][0]["address"] == "10.0.0.1:8000"
    assert shown["candidates"][0]["parts_s"] == {"backlog": 0.025, "prefill": 0.1}


def test_invalid_utf8_long_text_and_nan_still_give_json() -> None:
    made = decision("id-\ud800", model="m" * 100_000)
    made.ttft_s = math.inf
    shown = json.loads(encode(as_json(made)))
    assert shown["request_id"] == "id-?"
    assert len(shown["model"]) == 512
    assert shown["ttft_s"] is None
