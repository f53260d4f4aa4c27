"""Messages of an unusual form, read and written by protobuf."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.protocol.by_protobuf import around, decode, encode
from epp.protocol.header_names import DESTINATION
from epp.protocol.http_events import (
    Answer,
    Delay,
    Estimate,
    Refuse,
    ResponseHeaders,
    Slot,
    StreamProtocolError,
)

SUBSET, SERVED = f"{DESTINATION}-subset", f"{DESTINATION}-served"


def asked(**parts: Any) -> ext_proc.ProcessingRequest:
    return ext_proc.ProcessingRequest(**parts)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff", "undecodable"),
        (b"", "empty_message"),
        (asked(protocol_config={}).SerializeToString(), "empty_message"),
        (b"\x2a\x00\x5a\x02\x08\x09", "unknown_body_mode"),
    ],
)
def test_other_bytes_are_one_typed_error(data: bytes, reason: str) -> None:
    with pytest.raises(StreamProtocolError, match=reason):
        decode(data, names=frozenset(), response_names=frozenset())


@pytest.mark.parametrize(
    ("details", "attempts", "lost"),
    [
        ("upstream_reset_before_response_started{connection_termination}", 2, 2),
        ("upstream_reset_before_response_started{remote_reset|TLS_error}", None, 1),
        ("upstream_reset_before_response_started{connection_termination}", float("nan"), 1),
        ("upstream_reset_before_response_started{connection_termination}", float("inf"), 16),
        ("upstream_reset_before_response_started{remote_connection_failure}", 2, 0),
        ("via_upstream", 2, 0),
    ],
)
def test_the_servers_that_a_request_ended_are_read(details: str, attempts: float | None, lost: int) -> None:
    message = asked(response_headers={"end_of_stream": True})
    fields = message.attributes["a filter"].fields
    fields["response.code_details"].string_value = details
    if attempts is not None:
        fields["upstream.request_attempt_count"].number_value = attempts
    event = decode(message.SerializeToString(), names=frozenset(), response_names=frozenset())
    assert isinstance(event, ResponseHeaders)
    assert event.lost == lost


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x2a\x00"], ids=["broken", "with a main part"])
def test_bytes_that_are_not_only_surroundings_are_none(data: bytes) -> None:
    assert around(data) is None


def encoded(action: Answer | Refuse | Delay) -> ext_proc.ProcessingResponse:
    return ext_proc.ProcessingResponse.FromString(encode(action))


def test_a_pick_has_its_destination_and_cost_in_the_metadata() -> None:
    answer = Answer(
        Slot.REQUEST_BODY,
        destination="10.0.0.1:80",
        cost=Estimate(prompt_tokens=30, matched_tokens=20, predicted_s=0.25),
    )
    metadata = encoded(answer).dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert metadata[DESTINATION].string_value == "10.0.0.1:80"
    costs = [
        metadata[f"x-prefix-gateway-{name}"].number_value for name in ("prompt-tokens", "matched-tokens")
    ]
    assert costs == [30, 20]
    assert metadata["x-prefix-gateway-predicted-seconds"].number_value == 0.25


def test_an_answer_changes_headers_and_the_body_and_asks_for_more() -> None:
    answer = Answer(
        Slot.RESPONSE_HEADERS,
        set_headers=(("x-a", "é€"),),
        remove_headers=("x-b",),
        body=b"changed",
        stream_response=True,
    )
    response = encoded(answer)
    common = response.response_headers.response
    (option,) = common.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == ("x-a", b"\xe9?")
    assert list(common.header_mutation.remove_headers) == ["x-b"]
    assert common.body_mutation.body == b"changed"
    assert response.mode_override.response_body_mode == 1, "STREAMED"


def test_a_refusal_and_a_delay() -> None:
    refuse = Refuse(status=429, headers=(("retry-after", "3"),), body=b"{}", reason="saturated")
    immediate = encoded(refuse).immediate_response
    assert (immediate.status.code, immediate.body) == (429, b"{}")
    assert immediate.details.endswith("saturated")
    assert immediate.headers.set_headers[0].header.raw_value == b"3"
    assert encoded(Delay(1.5)).override_message_timeout.ToMilliseconds() == 1500
