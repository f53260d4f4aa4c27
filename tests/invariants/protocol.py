"""The invariants of a request's stream (`epp/protocol`) and of the reader of its answer (`epp/request`)."""

from epp.picker.events import BEGUN, OVER, Phase
from epp.protocol.conversation import LiveStreams
from epp.protocol.stream import HttpStream
from epp.request.response import _LONGEST_END, _UNPACKED_BYTES, MAX_EVENT_BYTES, EventSplitter, ResponseReader


def check_streams(streams: LiveStreams) -> None:
    for stream in streams.live:
        check_stream(stream)


def check_stream(stream: HttpStream) -> None:
    body, phase, early = stream._body, stream.phase, stream.phase in BEGUN and stream.pick is None
    assert body is None or phase is Phase.HOLDING or early
    assert body is not None or phase is not Phase.HOLDING
    assert held_bytes(stream) <= stream._context.settings.max_body_bytes
    assert stream.pick is not None or phase not in (Phase.SENT, Phase.READING)
    assert stream.pick is None or phase is Phase.SENT or phase in BEGUN or phase in OVER
    assert (stream._waiting is not None) == (phase is Phase.WAITING)
    assert stream._sampled is None or phase in (Phase.ANSWERED, Phase.READING)


def held_bytes(stream: HttpStream) -> int:
    """Return the bytes of the request's body that are held until its end."""
    return len(stream._body) if stream._body is not None else 0


def check_reader(reader: ResponseReader) -> None:
    assert reader._events is None or reader._json is None
    most = MAX_EVENT_BYTES if reader._packed is None else _UNPACKED_BYTES
    assert reader._json is None or len(reader._json) <= most
    assert reader._first_token_at is None or reader._generated
    if reader._events is not None:
        check_splitter(reader._events)


def check_splitter(splitter: EventSplitter) -> None:
    assert len(splitter._held) < MAX_EVENT_BYTES + _LONGEST_END
