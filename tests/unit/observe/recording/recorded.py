"""Requests that a recorder has seen."""

from __future__ import annotations

from epp.observe.recording.tap import Recorder
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
