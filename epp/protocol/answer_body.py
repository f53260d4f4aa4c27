"""Decides whether the picker reads the body of an answer, because its pick is sampled, and answers the
headers of such answers. Pure; called by `stream`.
"""

from __future__ import annotations

from epp.base.types import ApiKind
from epp.picker.events import Pick
from epp.protocol.asking import collect
from epp.protocol.header_names import DECISION, TEST_SERVED
from epp.protocol.http_events import Answer, BodyMode, Modes, ResponseHeaders, Slot
from epp.protocol.stream_settings import StreamSettings
from epp.request.response import ResponseReader


def reader_of(
    event: ResponseHeaders, pick: Pick, settings: StreamSettings, *, modes: Modes, hold: bool
) -> ResponseReader | None:
    """Return the reader for the body of this answer. None: nobody has to read the body. hold: the stream
    stays to the end. A data plane that wants the request's body back cannot be asked for that of the answer.
    """
    comes = modes.response_body is not BodyMode.NONE or (
        hold and settings.mode_override and not modes.request_body.echoed
    )
    if not pick.sampled or pick.decision.status != 200 or not comes:
        return None
    found = collect(event.headers)
    return ResponseReader(
        kind=ApiKind(pick.decision.kind),
        content_type=found.get("content-type", ""),
        content_encoding=found.get("content-encoding", ""),
    )


def answer_to_headers(
    event: ResponseHeaders, explained: Pick | None, settings: StreamSettings, *, asks_for_body: bool
) -> Answer:
    """Return the picker's message about the headers of an answer that is not only passed on. explained: the
    pick whose reasons the client asked for.
    """
    headers: list[tuple[str, str]] = []
    if explained is not None:
        headers.append((DECISION, explained.explanation))
    if settings.conformance_headers and event.served:
        headers.append((TEST_SERVED, event.served))
    return Answer(Slot.RESPONSE_HEADERS, set_headers=tuple(headers), stream_response=asks_for_body)
