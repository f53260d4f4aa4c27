"""A recording: what a line says of a request. It holds no text, and memory and disk stay within their
bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from epp.errors import RecordingTakenError
from epp.extproc.asking import read_head, request_names
from epp.gate import Gate
from epp.picker import Picker
from epp.recording.file import RecordingFile
from epp.recording.lines import Line, Opening, RecordedRequest, Servers, decode, unpacked
from epp.recording.recorder import Recorder
from epp.recording.service import RecordingService
from epp.recording.start import opening_of, servers_of
from epp.recording.tap import GONE_AFTER_S, Tap
from epp.request.response import ResponseFeedback
from tests.harness.clock import Clock
from tests.unit.picker_questions import a_picker, ask, serve, text


def ended(picker: Picker, recorder: Recorder, prompt: bytes, *, salt: str = "", now: float) -> None:
    """Route one request and end it, with a sampled answer."""
    pick = picker.pick(ask(prompt, salt=salt, stream=True), now=now)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now + 0.1)
    told = ResponseFeedback(
        first_token_at=now + 0.3, prompt_tokens=2000, cached_tokens=7, completion_tokens=40
    )
    picker.on_feedback(pick, told, now=now + 1.5)
    picker.end(pick, outcome="ended", now=now + 1.5)
    recorder.ended(pick, unix_now_s=1000.0 + now + 1.5)


def test_a_line_says_what_was_asked_where_it_went_and_how_it_ended() -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    ended(picker, recorder, text("one"), now=10.0)
    ended(picker, recorder, text("one") + text("more"), now=20.0)
    recorder.check_integrity()
    first, second = recorder.take()
    assert first.at_unix_s == 1010.0
    assert first.ended_s == pytest.approx(1.5)
    assert first.ttft_s == pytest.approx(0.3)
    assert (first.cached_tokens, first.output_tokens) == (7, 40)
    assert first.prompt_bytes == 8000
    assert (first.outcome, first.status, first.stream) == ("ended", 200, True)
    assert second.server == first.server, "the second prompt begins with the first"
    assert second.matched_tokens > 0
    assert unpacked(second.chunks)[: len(unpacked(first.chunks))] == unpacked(first.chunks)
    assert recorder.take() == []


def test_lines_beyond_the_bound_are_dropped_and_counted() -> None:
    picker, recorder = a_picker(), Recorder(key=b"k", most_waiting_bytes=2000)
    for n in range(5):
        ended(picker, recorder, text(f"{n}", 256), now=float(n))
    recorder.check_integrity()
    assert len(recorder.take()) == 3
    assert recorder.dropped == 2
    ended(picker, recorder, text("later", 256), now=9.0)
    assert len(recorder.take()) == 1, "there is room again once the lines were taken"


def written(picker: Picker, path: Path, lines: list[RecordedRequest], *, max_bytes: int) -> None:
    file = RecordingFile(path, max_bytes=max_bytes)
    for line in lines:
        file.write([line], opening=opening_of(picker), servers=servers_of(picker))
    file.close()


def read(path: Path) -> Iterator[Line]:
    return map(decode, path.read_bytes().splitlines())


def test_the_file_opens_with_policy_and_servers_and_holds_no_text_of_the_prompt(tmp_path: Path) -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    secret = b"the patient's name is Hidden Person. " * 100
    ended(picker, recorder, secret, salt="a tenant's salt", now=1.0)
    path = tmp_path / "recording.jsonl"
    written(picker, path, recorder.take(), max_bytes=2**20)
    opening, servers, asked = read(path)
    assert isinstance(opening, Opening)
    assert opening.policy["spec"]["rule"] == "least-cost"
    assert isinstance(servers, Servers)
    assert [server.name for server in servers.servers] == list("abcd")
    assert isinstance(asked, RecordedRequest)
    raw = path.read_bytes()
    assert b"Hidden" not in raw
    assert b"salt" not in raw
    assert path.stat().st_mode & 0o077 == 0, "only the owner may read the file"


def test_file_and_predecessor_stay_within_the_bound_and_each_can_be_read_alone(tmp_path: Path) -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    for n in range(200):
        ended(picker, recorder, text(f"{n}", 4096), now=float(n))
    path, most = tmp_path / "recording.jsonl", 2**16
    written(picker, path, recorder.take(), max_bytes=most)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["recording.jsonl", "recording.jsonl.1"]
    assert sum(file.stat().st_size for file in files) <= most + 2 * 4096, "the opening lines come in addition"
    for file in files:
        opening, servers, *asked = read(file)
        assert isinstance(opening, Opening)
        assert isinstance(servers, Servers)
        assert asked
    assert list(read(path))[-1].at_unix_s == 1199.0  # type: ignore[union-attr]


def test_what_an_earlier_process_recorded_is_kept_as_the_predecessor(tmp_path: Path) -> None:
    picker, recorder, path = a_picker(), Recorder(key=b"k"), tmp_path / "recording.jsonl"
    path.write_bytes(b"of yesterday\n")
    ended(picker, recorder, text("a"), now=1.0)
    written(picker, path, recorder.take(), max_bytes=2**20)
    assert (tmp_path / "recording.jsonl.1").read_bytes() == b"of yesterday\n"


async def test_the_service_writes_and_a_disk_that_refuses_is_counted_and_harms_nothing(
    tmp_path: Path,
) -> None:
    picker, recorder = a_picker(), Recorder(key=b"k")
    path = tmp_path / "missing" / "recording.jsonl"
    service = RecordingService(
        recorder,
        RecordingFile(path, max_bytes=2**20),
        opening=lambda: opening_of(picker),
        servers=lambda: servers_of(picker),
    )
    running = asyncio.create_task(service.run())
    ended(picker, recorder, text("a"), now=1.0)
    while not service.counts["failed"]:  # noqa: ASYNC110 - another thread counts
        await asyncio.sleep(0.01)
    path.parent.mkdir()
    ended(picker, recorder, text("b"), now=2.0)
    running.cancel()
    service.stop()
    assert service.counts == {"written": 1, "dropped": 0, "failed": 1}
    assert [line for line in read(path) if isinstance(line, RecordedRequest)]


def told(tap: Tap, reader: str = "one") -> list[RecordedRequest]:
    opening, servers, *asked = [decode(row) for row in tap.read(reader, False)[0].splitlines()]
    assert isinstance(opening, Opening)
    assert isinstance(servers, Servers)
    return [line for line in asked if isinstance(line, RecordedRequest)]


def test_who_asks_for_a_recording_gets_each_request_once_from_then_on() -> None:
    picker = a_picker()
    tap = Tap(picker, clock=Clock(100.0))
    serve(picker, ask(text("before")), now=1.0)
    assert told(tap) == []
    serve(picker, ask(text("one")), now=2.0)
    serve(picker, ask(text("two")), now=3.0)
    assert [line.prompt_bytes for line in told(tap)] == [8000, 8000]
    assert told(tap) == []
    with pytest.raises(RecordingTakenError):
        tap.read("another", False)


def test_a_reader_that_is_gone_makes_room_and_leaves_nothing_behind() -> None:
    picker, clock = a_picker(), Clock(100.0)
    tap = Tap(picker, clock=clock)
    told(tap)
    clock.now += GONE_AFTER_S + 1
    assert tap.on
    serve(picker, ask(text("one")), now=2.0)
    assert not tap.on, "the next request notices that nobody asks any more"
    serve(picker, ask(text("two")), now=3.0)
    assert told(tap, "another") == []
    serve(picker, ask(text("three")), now=4.0)
    assert len(told(tap, "another")) == 1


def test_a_reader_that_says_it_is_done_makes_room_at_once() -> None:
    picker = a_picker()
    tap = Tap(picker, clock=Clock(100.0))
    told(tap)
    assert picker.recorders == 1
    serve(picker, ask(text("one")), now=2.0)
    assert len(tap.read("one", True)[0].splitlines()) == 3, "its last question gets an answer too"
    assert not tap.on
    assert picker.recorders == 0
    assert told(tap, "another") == []


def test_while_requests_are_recorded_their_tenants_are_read_without_flow_control() -> None:
    picker = a_picker()
    gate, spec = Gate(picker), picker.policy.spec
    tenant = [(spec.flow.tenant_header, "acme")]
    assert picker.flow_read is None
    assert spec.flow.tenant_header not in request_names(spec, flow=picker.flow_read)
    tap = Tap(picker, clock=Clock(100.0))
    told(tap)
    assert not gate.on, "it takes no more than that"
    assert spec.flow.tenant_header in request_names(spec, flow=picker.flow_read)
    assert read_head(tenant, spec, flow=picker.flow_read).claim.tenant == "acme"
