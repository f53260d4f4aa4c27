"""Reads the body of one answer as it streams by: because its pick is sampled, or because the model's name in
the body must be replaced by the client's name. `stream` makes no `AnswerBody` for any other answer. Pure.
"""

from __future__ import annotations

from epp.base.types import ApiKind
from epp.picker.events import Pick
from epp.protocol.asking import collect
from epp.protocol.header_names import DECISION, LENGTH, TEST_SERVED
from epp.protocol.http_events import Answer, BodyMode, Modes, ResponseHeaders, Slot
from epp.protocol.stream_settings import StreamSettings
from epp.request.answer_names import AnswerNames, readable
from epp.request.response import ResponseFeedback, ResponseReader


class AnswerBody:
    """Reads one answer. Call `feed` with each piece and send on its result. Call `finish` at the end."""

    __slots__ = ("_names", "_reader", "asked_for", "renames", "samples")

    def __init__(self, reader: ResponseReader | None, names: AnswerNames | None, *, asked_for: bool) -> None:
        self._reader = reader
        self._names = names
        self.samples = reader is not None
        self.renames = names is not None
        self.asked_for = asked_for
        """Whether the data plane must be asked for the body."""

    def feed(self, data: bytes, *, end: bool, now: float) -> bytes:
        """Read the next piece. Returns the piece for the client, which names the model as the client did."""
        if self._reader is not None:
            self._reader.feed(data, now=now)
        return data if self._names is None else self._names.feed(data, end=end)

    def finish(self) -> ResponseFeedback:
        """Return the figures of a sampled answer, from which the picker learns."""
        assert self._reader is not None, "only sampled answers teach"
        return self._reader.finish()


def read_answer(
    event: ResponseHeaders, pick: Pick, settings: StreamSettings, *, modes: Modes, hold: bool
) -> AnswerBody | None:
    """Return the reader for the body of this answer. None: nobody has to read the body. hold: the stream
    stays to the end. A data plane that wants the request's body back cannot be asked for that of the answer.
    """
    echoed = modes.response_body.echoed
    comes = modes.response_body is not BodyMode.NONE or (
        hold and settings.mode_override and not modes.request_body.echoed
    )
    found, decision = collect(event.headers), pick.decision
    reader: ResponseReader | None = None
    names: AnswerNames | None = None
    if pick.sampled and decision.status == 200 and comes:
        reader = ResponseReader(
            kind=ApiKind(decision.kind),
            content_type=found.get("content-type", ""),
            content_encoding=found.get("content-encoding", ""),
        )
    if decision.asked_model and echoed and readable(found):
        names = AnswerNames(served=decision.model, asked=decision.asked_model)
    if reader is None and names is None:
        return None
    return AnswerBody(reader, names, asked_for=modes.response_body is BodyMode.NONE)


def answer_to_headers(
    event: ResponseHeaders, explained: Pick | None, body: AnswerBody | None, settings: StreamSettings
) -> Answer:
    """Return the picker's message about the headers of an answer that is not only passed on. explained: the
    pick whose reasons the client asked for.
    """
    headers: list[tuple[str, str]] = []
    if explained is not None:
        headers.append((DECISION, explained.explanation))
    if settings.conformance_headers and event.served:
        headers.append((TEST_SERVED, event.served))
    return Answer(
        Slot.RESPONSE_HEADERS,
        set_headers=tuple(headers),
        remove_headers=(LENGTH,) if body is not None and body.renames else (),
        stream_response=body is not None and body.asked_for,
    )
