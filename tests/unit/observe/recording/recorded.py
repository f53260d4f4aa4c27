"""Requests that a recorder has seen, and the lines of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from epp.observe.recording.file import RecordingFile
from epp.observe.recording.lines import Line, RecordedRequest, decode
from epp.observe.recording.recorder import Recorder
from epp.observe.recording.tap import opening_of, servers_of
from epp.picker.picker import Picker
from epp.request.response import ResponseFeedback
from tests.unit.picker.picker_questions import ask


def record_request(picker: Picker, recorder: Recorder, prompt: bytes, *, salt: str = "", now: float) -> None:
    """Route one request and end it, with a sampled answer."""
    pick = picker.pick(ask(prompt, salt=salt, stream=True), now=now)
    picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now + 0.1)
    told = ResponseFeedback(
        first_token_at=now + 0.3, prompt_tokens=2000, cached_tokens=7, completion_tokens=40
    )
    picker.on_feedback(pick, told, now=now + 1.5)
    picker.end(pick, outcome="ended", now=now + 1.5)
    recorder.ended(pick, unix_now_s=1000.0 + now + 1.5)


def written(picker: Picker, path: Path, lines: list[RecordedRequest], *, max_bytes: int) -> None:
    file = RecordingFile(path, max_bytes=max_bytes)
    for line in lines:
        file.write([line], opening=opening_of(picker), servers=servers_of(picker))
    file.close()


def read(path: Path) -> Iterator[Line]:
    return map(decode, path.read_bytes().splitlines())
