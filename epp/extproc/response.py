"""The response of one HTTP request, as far as the data plane shows it.

Owns the known facts of the response (its phase, its status, whether its body comes here), and reads a sampled
answer. `stream` decides what goes back to the data plane and when the stream ends. This module reports to the
picker what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from epp.config.dialects import MOST_DESTINATIONS
from epp.decision import Observer, Outcome
from epp.extproc.events import (
    PLAIN,
    Action,
    Answer,
    BodyMode,
    Modes,
    ResponseBody,
    ResponseHeaders,
    Slot,
    StreamProtocolError,
)
from epp.extproc.phases import RESPONSE_FOLLOWS, ResponsePhase
from epp.extproc.reading import (
    DECISION,
    LENGTH,
    TEST_SERVED,
    BodyRoom,
    collect,
    pieces,
    read_address,
    read_status,
)
from epp.picker import Picker
from epp.picker_events import Pick
from epp.request.answer_names import AnswerNames, readable
from epp.request.blocked import BlockedPaths
from epp.request.response import ResponseReader
from epp.types import ApiKind

_SILENT_FULL_DUPLEX: Final = Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)

_NOTHING_BLOCKED: Final = BlockedPaths(())


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The settings of all streams in this deployment."""

    max_body_bytes: int = 32 * 2**20
    room: BodyRoom = field(default_factory=BodyRoom)
    """Bounds the bodies of all streams together."""
    streamed_hold_bytes: int = 24 * 1024
    """The most bytes of a STREAMED early body that are held before the pick. Must stay under the data plane's
    buffer limit, which some gateways set to 32 KiB.
    """
    hold_streams: bool = True
    max_destinations: int = MOST_DESTINATIONS
    """The most destinations that the data plane can read. A stream gives fewer if its first message shows
    that the data plane reads only one.
    """
    shows_answers: bool = True
    """The stream lives as long as the HTTP request. False: it ends once the data plane has the pick."""
    conformance_headers: bool = False
    scores_metadata: bool = False
    cost_metadata: bool = False
    mode_override: bool = True
    """The data plane may be asked to stream a sampled answer."""
    longest_delay_s: float = 0.0
    """The longest time that the data plane can be asked to wait for the answer to a buffered body.

    0: it cannot be asked.
    """
    given_delay_s: float = 0.0
    """How long the data plane waits for the answer to a buffered body without being asked.

    0: unknown, so no request relies on it.
    """
    clear_route_cache: bool = True
    """Let the data plane choose the route again after the destination header was added."""
    blocked: BlockedPaths = _NOTHING_BLOCKED
    answers_list: bool = True
    """`GET /v1/models` is answered here if any server has reported its models."""
    traced: bool = False
    """Trace contexts are read."""
    assumed_modes: Modes = _SILENT_FULL_DUPLEX
    """The modes of a data plane that does not state its modes. The endpoint picker protocol asks for full
    duplex, so full duplex is assumed.
    """


class ResponseHalf:
    """The response half of one HTTP request. It begins with the response headers. Events before them change
    nothing, and nothing changes without a pick.
    """

    __slots__ = (
        "_names",
        "_observer",
        "_pick",
        "_picker",
        "_reader",
        "_settings",
        "mode",
        "phase",
        "status",
    )

    def __init__(self, picker: Picker, observer: Observer, *, settings: StreamSettings) -> None:
        self._picker = picker
        self._observer = observer
        self._settings = settings
        self._pick: Pick | None = None
        self._reader: ResponseReader | None = None
        self._names: AnswerNames | None = None
        """Not None if the client sent another name for the model, and the answer's bytes pass through here.
        """
        self.phase = ResponsePhase.AWAITED
        self.status: int | None = None
        """None: no response headers yet. 0: the headers had no readable status."""
        self.mode = BodyMode.NONE
        """How the data plane itself wants to send the body here.

        NONE: if we leave, the data plane goes on without us, even while the body is sampled.
        """

    def begin(
        self,
        event: ResponseHeaders,
        *,
        pick: Pick | None,
        modes: Modes,
        kind: ApiKind,
        debug: bool,
        hold: bool,
        now: float,
    ) -> tuple[Answer, ...]:
        """Called when the response headers came: report to the picker which server served, and answer.

        debug: the client asked for the reasons of its pick.

        hold: the stream stays to the end, so its answer may be sampled.
        """
        if self.phase is not ResponsePhase.AWAITED:
            raise StreamProtocolError("second_response_headers")
        found = collect(event.headers)
        self.status = read_status(found.get(":status", ""))
        self._enter(ResponsePhase.DONE if event.end_of_stream else ResponsePhase.BEGUN)
        self._pick = pick
        if pick is not None:
            served = read_address(event.served) if event.served else None
            self._picker.on_response_headers(pick, status=self.status, served=served, now=now)
        override = False
        if not event.end_of_stream:
            self.mode = modes.response_body
            override = self._sample(found, kind=kind, modes=modes, hold=hold)
            self._rename(found)
        headers = self._extra_headers(event.served, debug=debug)
        if not headers and not override and self._names is None:
            return PLAIN[Slot.RESPONSE_HEADERS]
        return (
            Answer(
                Slot.RESPONSE_HEADERS,
                set_headers=headers,
                remove_headers=() if self._names is None else (LENGTH,),
                stream_response=override,
            ),
        )

    @property
    def reads(self) -> bool:
        """The body is read as it streams by: it is sampled, or the model's name in it must be replaced by the
        client's name.
        """
        return self._reader is not None or self._names is not None

    def _sent_on(self, data: bytes, *, end: bool) -> bytes:
        """Return the piece of the body that the client gets: it names the model as the client did."""
        return data if self._names is None else self._names.feed(data, end=end)

    def body(self, event: ResponseBody, *, echoed: bool, now: float) -> Sequence[Action]:
        """Called when a piece of the body came. Returns the bytes to send on if the data plane keeps no copy
        (`echoed`).
        """
        self._feed(event, now=now)
        if not echoed:
            return PLAIN[Slot.RESPONSE_BODY]
        data = self._sent_on(event.data, end=event.end_of_stream)
        return pieces(Slot.RESPONSE_BODY, data, end_of_stream=event.end_of_stream)

    def trailers(self, *, echoed: bool, now: float) -> Sequence[Action]:
        """Called when the response ends with trailers."""
        self._finish(now=now)
        held = self._sent_on(b"", end=True) if echoed else b""
        return (*pieces(Slot.RESPONSE_BODY, held, end_of_stream=False), *PLAIN[Slot.RESPONSE_TRAILERS])

    def _feed(self, event: ResponseBody, *, now: float) -> None:
        if self.phase is ResponsePhase.AWAITED:
            self._observer.protocol_error("body_before_response_headers")
        if self._reader is not None:
            if self.phase is ResponsePhase.BEGUN:
                self._enter(ResponsePhase.READING)
            self._reader.feed(event.data, now=now)
        if event.end_of_stream:
            self._finish(now=now)

    def _finish(self, *, now: float) -> None:
        """Called when the response is over."""
        self.give_feedback(now=now)
        if self.phase in (ResponsePhase.BEGUN, ResponsePhase.READING):
            self._enter(ResponsePhase.DONE)

    def give_feedback(self, *, now: float) -> None:
        """Hand over what a sampled answer taught, once. If no byte of the answer came, it taught nothing."""
        reader, self._reader = self._reader, None
        if reader is not None and self.phase is ResponsePhase.READING and self._pick is not None:
            self._picker.on_feedback(self._pick, reader.finish(), now=now)

    def outcome(self) -> Outcome:
        """Return how the HTTP request ends, if it ends now."""
        if self.status is None:
            return "aborted"
        if self.status >= 500:
            return "failed"
        return "aborted" if self.phase is ResponsePhase.READING else "ended"

    def check_integrity(self) -> None:
        assert (self.status is None) == (self.phase is ResponsePhase.AWAITED)
        assert self._reader is None or self.phase in (ResponsePhase.BEGUN, ResponsePhase.READING)

    def _enter(self, phase: ResponsePhase) -> None:
        assert phase in RESPONSE_FOLLOWS[self.phase], f"{phase} does not follow {self.phase}"
        self.phase = phase

    def _sample(self, found: dict[str, str], *, kind: ApiKind, modes: Modes, hold: bool) -> bool:
        """Read the answer as it streams by, if this pick is one to learn from.

        True: the data plane must be asked to send the answer.
        """
        if self._pick is None or not self._pick.sampled or self.status != 200:
            return False
        override = self.mode is BodyMode.NONE
        ignored = (
            modes.early_body or modes.request_body.echoed
        )  # in these modes the data plane accepts no such request
        if override and (ignored or not hold or not self._settings.mode_override):
            return False
        self._reader = ResponseReader(
            kind=kind,
            content_type=found.get("content-type", ""),
            content_encoding=found.get("content-encoding", ""),
            max_text_bytes=self._picker.policy.spec.sampling.max_text_bytes,
        )
        return override

    def _rename(self, found: dict[str, str]) -> None:
        """If the whole answer passes through here and a rewrite changed the model's name, replace it in the
        answer by the name that the client sent.
        """
        if self._pick is None or not self._pick.decision.asked_model or not self.mode.echoed:
            return
        if readable(found):
            decision = self._pick.decision
            self._names = AnswerNames(served=decision.model, asked=decision.asked_model)

    def _extra_headers(self, served: str, *, debug: bool) -> tuple[tuple[str, str], ...]:
        headers: list[tuple[str, str]] = []
        if debug and self._pick is not None:
            headers.append((DECISION, self._pick.explanation))
        if self._settings.conformance_headers and served:
            headers.append((TEST_SERVED, served))
        return tuple(headers)
