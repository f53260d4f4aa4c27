"""What the picker learns from and does with an answer, and Envoy's access log entries."""

import json
import random
from typing import Any

import pytest
from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import DEFAULT_POLICY, Sampling
from epp.picker.events import Cut, PickerEvent
from epp.picker.picker import Picker
from epp.protocol.access_log import MOST_ENTRIES, MOST_MESSAGE_BYTES, AccessLog
from epp.protocol.http_events import Answer, BodyMode, HttpEvent, Modes, Slot
from epp.protocol.settings import StreamSettings
from tests.unit.protocol.calls_bench import NotingCaller
from tests.unit.protocol.stream_bench import (
    BODY,
    BUFFERED,
    DUPLEX,
    HEADERS,
    NONE,
    OK,
    PARTIAL,
    STREAMED,
    Bench,
    echoed,
    head,
    only,
    request_body,
    request_headers,
    response_body,
    response_headers,
    response_trailers,
    rewriting,
    run,
    slots,
    through,
)

# -- the response --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([], "aborted"),
        ([response_headers(OK)], "ended"),
        ([response_headers(OK, end_of_stream=True)], "ended"),
        ([response_headers(((":status", "404"),))], "ended"),
        ([response_headers(((":status", "503"),))], "failed"),
        ([response_headers((("status", "503"),))], "ended"),
    ],
)
def test_closing_releases_the_booking_with_the_outcome_of_the_request(
    bench: Bench, events: list[HttpEvent], outcome: str
) -> None:
    stream = through(bench)
    run(stream, *events)
    stream.close(now=9.0)
    stream.close(now=9.5)
    assert bench.in_flight() == 0
    assert [p.decision.outcome for p in bench.seen.over] == [outcome]


@pytest.mark.parametrize("served", ["first", "second", "", "somewhere", "10.0.0.1"])
def test_the_booking_moves_to_the_endpoint_that_served_if_that_can_be_read(bench: Bench, served: str) -> None:
    stream = through(bench)
    decision = bench.seen.picks[0].decision
    first, second, *_ = decision.destinations
    run(stream, response_headers(OK, served={"first": str(first), "second": str(second)}.get(served, served)))
    assert bench.seen.mismatches == [served == "second"]
    (busy,) = [s.endpoint.address for s in bench.picker.fleet.states() if s.in_flight]
    assert busy == (second if served == "second" else first)
    assert decision.served == (busy if served in ("first", "second") else None)


def test_a_sampled_answer_that_is_cut_counts_as_aborted() -> None:
    bench = Bench(sampling=Sampling(share=1))
    stream = through(bench)
    run(stream, response_headers(OK), response_body(b'data: x\n\ndata: {"error": {"code": 500}}\n\n'))
    stream.close(now=9.0)
    assert bench.seen.over[0].decision.outcome == "aborted"


# -- letting go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modes", "events", "can_detach"),
    [
        (BUFFERED, [], False),
        (BUFFERED, [response_headers(OK)], True),
        (NONE, [response_headers(OK)], True),
        (DUPLEX, [response_headers(OK)], False),
        (DUPLEX, [response_headers(OK), response_body(b"x")], False),
        (DUPLEX, [response_headers(OK), response_body(b"x", end_of_stream=True)], True),
        (DUPLEX, [response_headers(OK), response_body(b"x"), response_trailers()], True),
        (STREAMED, [response_headers(OK, end_of_stream=True)], True),
    ],
)
def test_a_stream_may_end_once_nothing_more_is_due_to_the_data_plane(
    bench: Bench, *, modes: Modes, events: list[HttpEvent], can_detach: bool
) -> None:
    stream = through(bench, modes)
    run(stream, *events)
    assert stream.can_detach is can_detach


def test_a_full_duplex_request_that_is_still_coming_keeps_its_stream(bench: Bench) -> None:
    stream = bench.stream()
    run(stream, head(DUPLEX), request_body(BODY[:9]), response_headers(OK, end_of_stream=True))
    assert not stream.can_detach


@pytest.mark.parametrize(
    ("modes", "override"),
    [
        (BUFFERED, True),
        (PARTIAL, True),
        (NONE, True),
        (Modes(BodyMode.FULL_DUPLEX_STREAMED), False),
        (STREAMED, False),
        (DUPLEX, False),
    ],
)
def test_a_sampled_answer_is_asked_for_if_the_data_plane_can_send_it(*, modes: Modes, override: bool) -> None:
    bench = Bench(sampling=Sampling(share=1))
    stream = through(bench, modes)
    assert only(run(stream, response_headers(OK))).stream_response is override
    if override:
        assert stream.hold
        assert stream.can_detach, "it may be let go at a drain"


@pytest.mark.parametrize(
    ("status", "settings"),
    [
        ("500", StreamSettings()),
        ("404", StreamSettings()),
        ("200", StreamSettings(mode_override=False)),
        ("200", StreamSettings(hold_streams=False)),
    ],
)
def test_no_bad_answer_is_sampled_and_none_where_the_gateway_forbids_it(
    status: str, settings: StreamSettings
) -> None:
    bench = Bench(settings=settings, sampling=Sampling(share=1))
    stream = through(bench)
    assert run(stream, response_headers(((":status", status),))) == [Answer(Slot.RESPONSE_HEADERS)]
    assert stream.can_detach


@pytest.mark.parametrize("modes", [BUFFERED, STREAMED, DUPLEX])
def test_a_sampled_answer_is_learned_from_and_passed_on_unchanged(modes: Modes) -> None:
    bench = Bench(sampling=Sampling(share=1))
    stream = bench.stream()
    body = json.dumps({"model": "m", "prompt": "x" * 4000, "stream": True}).encode()
    run(stream, request_headers(HEADERS[:2], modes=modes), request_body(body, end_of_stream=True))
    run(stream, response_headers(OK))
    text = b'data: {"choices": [{"index": 0, "text": "fox"}]}\n\ndata: {"choices": [], "usage": '
    text += b'{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}\n\ndata: [DONE]\n\n'
    actions = run(stream, *(response_body(text[i : i + 7]) for i in range(0, len(text), 7)))
    actions += run(stream, response_body(b"", end_of_stream=True))
    assert set(slots(actions)) == {Slot.RESPONSE_BODY}
    assert echoed(actions) == (text if modes is DUPLEX else b"")
    if modes is not DUPLEX:
        assert actions == [Answer(Slot.RESPONSE_BODY)] * len(actions)
    if modes is not STREAMED:  # there the request's body was not read: the API of the answer is unknown
        assert bench.seen.picks[0].decision.cached_tokens == 4
    stream.close(now=99.0)
    assert bench.seen.over[0].decision.outcome == "ended"


def test_an_answer_of_no_bytes_is_read_from_its_headers() -> None:
    bench = Bench(sampling=Sampling(share=1))
    stream = through(bench)
    run(stream, response_headers(OK, end_of_stream=True))
    stream.close(now=9.0)
    (account,) = [s.account for s in bench.picker.fleet.states() if s.account.bare]
    assert account.no_token_at > 0


def test_the_debug_header_gets_the_decision_only_if_the_policy_names_it(bench: Bench) -> None:
    assert run(through(bench, BUFFERED, ("", "1")), response_headers(OK)) == [Answer(Slot.RESPONSE_HEADERS)]
    bench = Bench(debug_header="x-why")
    answer = only(run(through(bench, BUFFERED, ("X-Why", "1")), response_headers(OK)))
    assert dict(answer.set_headers)["x-prefix-gateway-decision"] == bench.seen.picks[0].explanation
    assert run(through(bench), response_headers(OK)) == [Answer(Slot.RESPONSE_HEADERS)]


def test_a_conformance_run_gets_the_address_that_served() -> None:
    bench = Bench(settings=StreamSettings(conformance_headers=True))
    answer = only(run(through(bench), response_headers(OK, served="10.0.0.1:8000")))
    assert answer.set_headers == (("x-conformance-test-served-endpoint", "10.0.0.1:8000"),)


def test_a_response_can_be_cancelled_from_its_first_event_on(bench: Bench) -> None:
    stream, cancel = bench.stream(), bench.stream()
    path, created = "/v1/responses", {"type": "response.created", "response": {"id": "resp_1"}}
    run(
        stream,
        request_headers(((":method", "POST"), (":path", path)), modes=BUFFERED),
        request_body(b'{"model": "m", "input": "Hi", "stream": true}', end_of_stream=True),
        response_headers(OK),
        response_body(f"data: {json.dumps(created)}\n\n".encode()),
    )
    run(
        cancel, request_headers(((":method", "POST"), (":path", f"{path}/resp_1/cancel")), end_of_stream=True)
    )
    made, named = [pick.decision for pick in bench.seen.picks]
    assert (named.reason, named.chosen) == ("state", made.chosen)


@pytest.mark.parametrize("response", [BodyMode.NONE, BodyMode.FULL_DUPLEX_STREAMED])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/conversations", "/v1/files", "/v1/batches"])
def test_an_overloaded_picker_reads_no_id_in_an_answer(bench: Bench, path: str, response: BodyMode) -> None:
    """The request is picked from its headers, and is let go before any piece of an answer is in our hands."""
    stream = bench.stream()
    stream.note_overload()
    modes = Modes(BodyMode.BUFFERED, response)
    run(stream, request_headers(((":method", "POST"), (":path", path)), modes=modes))
    (pick,) = bench.seen.picks
    assert (stream.hold, stream.can_detach, pick.sampled) == (False, True, False)


def test_an_overloaded_picker_passes_an_answer_that_comes_anyway(bench: Bench) -> None:
    rewriting(bench, "another")  # so the body is awaited
    stream = bench.stream()
    stream.note_overload()
    run(stream, request_headers(((":method", "POST"), (":path", "/v1/responses")), modes=DUPLEX))
    run(stream, request_body(b'{"input": "Hi"}', end_of_stream=True), response_headers(OK))
    assert (stream.passes, stream.can_detach) == (True, False)


class CutRig:
    def __init__(self) -> None:
        self.picker = Picker(DEFAULT_POLICY, rng=random.Random(0))
        endpoints = [Endpoint(EndpointName("a"), Address("10.0.0.1", 8000))]
        endpoints += [
            Endpoint(EndpointName(f"r{n}"), Address("10.0.0.2", 8000), rank=n, incarnation=str(n))
            for n in range(2)
        ]
        self.picker.news.set_endpoints(endpoints, now=0.0)
        self.cut: list[str] = []
        self.faults: list[str] = []
        self.picker.subscribe(self._hear)
        self.log = AccessLog(self.picker, self.faults.append, NotingCaller())

    def _hear(self, event: PickerEvent) -> None:
        if isinstance(event, Cut):
            self.cut.append(event.server.endpoint.name)


def entry(
    flag: str = "upstream_protocol_error", *, status: int = 200, host: str = "10.0.0.1", port: int = 8000
) -> HTTPAccessLogEntry:
    made = HTTPAccessLogEntry()
    made.common_properties.upstream_remote_address.socket_address.address = host
    made.common_properties.upstream_remote_address.socket_address.port_value = port
    if flag:
        setattr(made.common_properties.response_flags, flag, True)
    made.response.response_code.value = status
    return made


def log_message(*entries: Any) -> bytes:
    made = StreamAccessLogsMessage()
    made.http_logs.log_entry.extend(entries)
    return bytes(made.SerializeToString())


@pytest.mark.parametrize(
    ("cut", "faults", "logged"),
    [
        *[(["a"], [], entry(f"upstream_{end}"))
          for end in ("connection_termination", "remote_reset", "protocol_error")],
        *[([], [], other)
          for other in (entry(""), entry("downstream_connection_termination"), entry("stream_idle_timeout"),
                        *(entry(status=status) for status in (503, 404, 101, 0)))],
        *[([], ["cut_by_unknown_server"], stranger)
          for stranger in (entry(host="10.9.9.9"), entry(port=1), entry(host=""), entry(host="x" * 5000),
                           entry(port=10**9), entry(host="10.0.0.2"))],  # the last one has two ranks
    ],
)  # fmt: skip
def test_only_an_answer_that_its_server_ended_midway_is_reported_as_cut(
    cut: list[str], faults: list[str], logged: HTTPAccessLogEntry
) -> None:
    rig = CutRig()
    rig.log.message(log_message(logged), now=1.0)
    assert (rig.cut, rig.faults) == (cut, faults)
    assert bool(rig.picker.fleet.failures.marks) is bool(cut)


def test_the_number_of_entries_and_bytes_read_from_a_message_is_bounded() -> None:
    rig = CutRig()
    rig.log.message(log_message(*[entry() for _ in range(MOST_ENTRIES + 5)]), now=1.0)
    assert len(rig.cut) == MOST_ENTRIES
    rig.log.message(b"\x12" * (MOST_MESSAGE_BYTES + 1), now=1.0)
    assert rig.faults == ["access_log_too_large"] * 2
    rig.log.message(b"\xff\xff", now=1.0)
    assert rig.faults[2:] == ["access_log_unreadable"]
