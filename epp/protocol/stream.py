"""The state machine of one HTTP request, as the data plane reports it. The state machine takes events and
returns actions. It knows no gRPC and no clock, and never waits.

Owns the phase of the request until the pick (`FOLLOWS` has the table), the order of answers in each
processing mode (`BodyMode` says when the pick is made in each), and the release of the pick.

If a data plane does not state its mode, it is taken to use full duplex, as the endpoint picker protocol asks.
Harmless events in a wrong order are accepted and reported to the picker's listeners. All other
events in a wrong order raise a StreamProtocolError.

`asking` reads the head, makes the question of head and body, and makes the answer of question and pick. The
picker or flow control (`picker.gate`) decides. If flow control holds a request, its canonical prompt stays in
memory, and with full duplex its body too. `answers` knows the refusals, and which answers the picker reads.

Invariants: There is at most one pick. `close` releases it exactly once. After a refusal nothing
is answered.
"""

from collections.abc import Callable, Sequence
from typing import Final

from epp.base.errors import BlockedPathError, PickError
from epp.base.types import InferenceRequest
from epp.picker.commit import outcome_of
from epp.picker.decision import Outcome
from epp.picker.events import BEGUN, FOLLOWS, OVER, Phase, Pick, ProtocolFault, Refused
from epp.picker.gate import WaitingRequest
from epp.picker.unserved import UnservedRequest
from epp.protocol import asking
from epp.protocol.answers import answer_to_headers, model_list, refused, sampled_answer
from epp.protocol.header_names import RESERVED
from epp.protocol.http_events import (
    PLAIN,
    Action,
    Answer,
    Body,
    BodyMode,
    Headers,
    HttpEvent,
    Modes,
    Piece,
    Slot,
    StreamProtocolError,
    pieces,
)
from epp.protocol.settings import StreamContext
from epp.request.response import ResponseReader

_SILENT: Final = Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
_UNPICKED: Final = (Answer(Slot.REQUEST_HEADERS, remove_headers=RESERVED),)
"""Go on without a destination. A destination that the client made up is removed."""


class HttpStream:
    """One HTTP request. Call `receive` with each event, carry out the actions in order, and call `close` at
    the end, whatever happened.

    If the context's gate holds the request, the request's answers are given to `deliver` later.
    """

    __slots__ = (
        "_asks_only", "_body", "_context", "_deliver", "_explained", "_head", "_modes", "_overload", "_phase",
        "_request_ended", "_sampled", "_trace", "_waiting", "hold", "passes", "pick",
    )  # fmt: skip

    def __init__(
        self,
        context: StreamContext,
        *,
        deliver: Callable[[Sequence[Action]], None] | None = None,
        trace: str = "",
    ) -> None:
        """Begin a request. trace: the data plane's own trace context, which goes before the client's."""
        self._context = context
        self._deliver = deliver
        self._trace = trace
        self._overload = False
        """Whether the picker has too much work to read the body."""
        self._head: asking.Head | None = None
        """None: no request headers came yet, or the pick or the refusal is made."""
        self._asks_only = False
        """Whether the data plane wants only the pick."""
        self._explained: Pick | None = None
        """The pick, if the client wants to know its reasons."""
        self.hold = context.settings.hold_streams
        """Whether the stream stays until the HTTP request ends. A drain sets this to False. The stream then
        stays until `can_detach` is true.
        """
        self.passes = False
        """Whether pieces of the answer's body go on unchanged and unread, until the last piece."""
        self._phase = Phase.START
        self.pick: Pick | None = None
        self._modes = _SILENT
        self._body: Body | None = None
        """The pieces of a body whose headers are not answered yet."""
        self._request_ended = False
        """Whether no more pieces of the request's body come."""
        self._waiting: WaitingRequest | UnservedRequest | None = None
        """Set while flow control holds the request."""
        self._sampled: ResponseReader | None = None
        """Set while the picker reads the body of the answer as it streams by."""

    def note_overload(self) -> None:
        """If the request is not picked yet, route it by load. Only names are read, and the stream ends."""
        if self.pick is None:
            self._overload, self.hold = True, False

    def receive(self, event: HttpEvent, *, now: float) -> Sequence[Action]:
        """Handle one event. Raises StreamProtocolError if the event makes no sense. The caller then closes
        the stream.
        """
        phase = self.phase
        if phase in OVER:
            raise StreamProtocolError("event_after_end")
        if phase is Phase.REFUSED:
            return ()
        if phase is Phase.WAITING and event.slot in (Slot.REQUEST_BODY, Slot.REQUEST_TRAILERS):
            raise StreamProtocolError("request_while_waiting")
        try:
            if type(event) is Headers:
                if event.slot is Slot.REQUEST_HEADERS:
                    return self._on_request_headers(event, now=now)
                return self._on_response_headers(event, now=now)
            if type(event) is Piece:
                if event.slot is Slot.REQUEST_BODY:
                    return self._on_request_body(event, now=now)
                return self._on_response_body(event, now=now)
            if event.slot is Slot.REQUEST_TRAILERS:
                return self._on_request_trailers(now=now)
        except PickError as error:
            return self._refuse(error)
        self._end_answer(now=now)
        return PLAIN[event.slot]

    @property
    def can_detach(self) -> bool:
        """Whether the stream may end without harm to the request: all is answered, and we pass no body on."""
        echoed = self._modes.request_body.echoed
        if self.pick is not None and self._overload and not echoed:
            return True  # The data plane sends the rest of the request without us.
        if self.phase not in BEGUN:
            return False
        if self.phase is not Phase.DONE and self._modes.response_body is not BodyMode.NONE:
            return False
        return self._request_ended or not echoed

    def half_close(self, *, now: float) -> None:
        """The data plane ended its side in order. If it wanted only a pick, the request goes on."""
        self.close(now=now, goes_on=self._asks_only and self.phase not in BEGUN)

    def close(self, *, now: float, broken: bool = False, goes_on: bool = False) -> None:
        """Release everything that the request holds. Idempotent. broken: the fault is the picker's own, and
        no server's. goes_on: the stream is let go on purpose, while the HTTP request may still be answered.
        """
        if self.phase in OVER:
            return
        picker, pick = self._context.picker, self.pick
        outcome: Outcome = "aborted" if broken or pick is None else outcome_of(pick)
        goes_on = goes_on and self.phase is not Phase.DONE
        if self._sampled is not None and not goes_on:
            self._end_answer(whole=False, now=now)
        self._drop()
        self._sampled = None
        self._deliver = None  # a method of the owner: no circle of references may outlive the request
        self.passes = False
        if pick is None:
            self._enter(Phase.ENDED)
        elif goes_on:
            picker.detach(pick, now=now)
        else:
            picker.end(pick, outcome=outcome, now=now)

    # -- phases ----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase of the request. From the pick on, the pick has the phase."""
        return self._phase if self.pick is None else self.pick.phase

    def _enter(self, phase: Phase) -> None:
        assert phase in FOLLOWS[self.phase], f"{phase} does not follow {self.phase}"
        if self.pick is None:
            self._phase = phase
        else:
            self.pick.phase = phase

    def _drop(self) -> None:
        """Stop waiting, and drop the body that was held."""
        waiting, self._waiting, body, self._body = self._waiting, None, self._body, None
        if waiting is not None and self._context.gate is not None:
            self._context.gate.leave(waiting)
        if body is not None:
            body.drop()

    def _learn(self, modes: Modes | None) -> None:
        if modes is not None:
            self._modes, self.passes = modes, False

    # -- the request -----------------------------------------------------------------------------------------

    def _on_request_headers(self, event: Headers, *, now: float) -> Sequence[Action]:
        picker, settings = self._context.picker, self._context.settings
        if self._head is not None or self.pick is not None or self.phase is Phase.PASSED:
            raise StreamProtocolError("second_request_headers")
        self._learn(event.modes)
        self._request_ended = event.end_of_stream
        head = self._head = asking.head_of(event, self._context, trace=self._trace)
        self._asks_only = head.asks_only
        if self.phase is not Phase.START:
            return _UNPICKED  # The client already has an answer, perhaps the data plane's own.
        if head.path not in settings.blocked.open_apis and settings.blocked.refuse(head.path):
            raise BlockedPathError("not served by this gateway")
        if not event.end_of_stream:
            asking.require_fits(head.declared_bytes, settings)
            return self._await_body(head, now=now)
        listed = model_list(event, head.path, picker) if settings.answers_list else None
        if listed is None:
            return self._decide(Slot.REQUEST_HEADERS, instead=asking.NO_BODY, now=now)
        self._enter(Phase.REFUSED)
        return (listed,)

    def _await_body(self, head: asking.Head, *, now: float) -> Sequence[Action]:
        """Await the body if the data plane hands it over before it has to know the server, and if there is
        time to read it. Otherwise pick now.
        """
        head.path = head.path[: asking.MOST_KEPT_CHARS]
        mode, overload = self._modes.request_body, self._overload
        if mode < BodyMode.BUFFERED or (overload and self._context.picker.news.one_model):
            instead = asking.OVERLOADED if overload else asking.NOT_SEEN
            return self._decide(Slot.REQUEST_HEADERS, instead=instead, now=now)
        if mode not in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            self._body = Body(self._context.settings.room)
            self._enter(Phase.HOLDING)
            return ()
        self._enter(Phase.BODY)
        if head.reserved:
            # The pick removes these headers too, but only if it is made. They must not reach a server if the
            # picker dies now.
            return (Answer(Slot.REQUEST_HEADERS, remove_headers=head.reserved),)
        return PLAIN[Slot.REQUEST_HEADERS]

    def _on_request_body(self, event: Piece, *, now: float) -> Sequence[Action]:
        self._request_ended = event.end_of_stream
        if self.phase is Phase.BODY:  # the one message with the body
            room, size = self._context.settings.room, len(event.data)
            asking.require_fits(size, self._context.settings)
            instead = asking.NO_ROOM if room.held_bytes + size > room.max_bytes else None
            return self._decide(Slot.REQUEST_BODY, event.data, instead=instead, now=now)
        if self._body is not None:
            return self._on_piece(event, self._body, now=now)
        if self.phase is Phase.START:
            self._learn(event.modes)
            self._enter(Phase.PASSED)
            self._context.picker.report(ProtocolFault("body_before_headers"))
        if self._modes.request_body.echoed:
            return pieces(Slot.REQUEST_BODY, event.data, end_of_stream=event.end_of_stream)
        return PLAIN[Slot.REQUEST_BODY]

    def _on_piece(self, event: Piece, body: Body, *, now: float) -> Sequence[Action]:
        """Handle a piece of the body while the headers are not answered. Both are answered when enough of the
        body has come.
        """
        end, holds = event.end_of_stream, self.phase is Phase.HOLDING
        if holds:
            asking.require_fits(len(body) + len(event.data), self._context.settings)
        if body.add(event.data, last=end or not holds):
            return self._let_go(body, end_of_stream=end, now=now)
        return ()

    def _on_request_trailers(self, *, now: float) -> Sequence[Action]:
        answer = PLAIN[Slot.REQUEST_TRAILERS]
        self._request_ended = True
        if self._body is not None:
            return self._let_go(self._body, end_of_stream=False, after=answer, now=now)
        if self.phase is Phase.BODY:
            # The body has no bytes, and trailers follow. Only the dynamic metadata can still name the server.
            return self._decide(Slot.REQUEST_TRAILERS, instead=asking.NO_BODY, now=now)
        if self.phase is Phase.START:
            self._enter(Phase.PASSED)
            self._context.picker.report(ProtocolFault("trailers_before_headers"))
        return answer

    def _let_go(
        self, body: Body, *, end_of_stream: bool, after: Sequence[Action] = (), now: float
    ) -> Sequence[Action]:
        """Decide, and answer the headers and the body that were held. `after` follows these answers."""
        whole, self._body = body.take(), None
        if self.phase is not Phase.HOLDING:
            back = () if self._asks_only else pieces(Slot.REQUEST_BODY, whole, end_of_stream=end_of_stream)
            return (*_UNPICKED, *back, *after)
        instead = None if body.has_room else asking.NO_ROOM
        return self._decide(
            Slot.REQUEST_HEADERS, whole, instead=instead, ends=end_of_stream, after=after, now=now
        )

    # -- the decision ----------------------------------------------------------------------------------------

    def _decide(
        self,
        slot: Slot,
        body: bytes | memoryview = b"",
        *,
        instead: InferenceRequest | None = None,
        ends: bool | None = None,
        after: Sequence[Action] = (),
        now: float,
    ) -> Sequence[Action]:
        """Pick, and put the pick into the answer to `slot`, or let the request wait. Raises PickError.
        instead, ends, after: see `asking.ask`.
        """
        context, head, modes = self._context, self._head, self._modes
        assert head is not None, "the headers came"
        partial = modes.request_body is BodyMode.BUFFERED_PARTIAL and not self._request_ended
        asked = asking.ask(
            head, slot, body, context, modes=modes, instead=instead, partial=partial,
            overload=self._overload, ends=ends, after=after, now=now,
        )  # fmt: skip
        decided, delay = asking.offer(asked, context, modes=modes, on_decided=self._on_decided, now=now)
        if isinstance(decided, Pick):
            return self._picked(asked, decided)
        self._waiting = decided
        self._enter(Phase.WAITING)
        return delay

    def _on_decided(self, asked: asking.Asked, decided: Pick | PickError, _now: float) -> None:
        """Send or refuse a request that waited, as flow control has decided."""
        self._waiting = None
        assert self._deliver is not None, "a stream with a gate can be answered later"
        if isinstance(decided, PickError):
            self._deliver(self._refuse(decided))
        else:
            self._deliver(self._picked(asked, decided))

    def _picked(self, asked: asking.Asked, pick: Pick) -> Sequence[Action]:
        self._enter(Phase.SENT)
        self.pick = pick
        self._head, self._explained = None, pick if asked.head.debug else None
        return asking.answer(asked, pick, self._context)

    def _refuse(self, error: PickError) -> Sequence[Action]:
        """Refuse the request, in the format of its API."""
        head, self._head = self._head, None
        assert head is not None, "the headers came"
        self._enter(Phase.REFUSED)
        self._drop()
        self._context.picker.report(Refused(head.request_id, error))
        return (refused(error, path=head.path, request_id=head.request_id),)

    # -- the answer ------------------------------------------------------------------------------------------

    def _on_response_headers(self, event: Headers, *, now: float) -> Sequence[Action]:
        if self.phase in BEGUN:
            raise StreamProtocolError("second_response_headers")
        self._learn(event.modes)
        if self.phase is Phase.WAITING:
            self._drop()  # The client has its answer, which the data plane gave itself.
        pick, context = self.pick, self._context
        if pick is None:
            self._enter(Phase.ANSWERED)
        else:
            asking.note_answer(event, pick, context.picker, now=now)
            if pick.sampled:
                self._sampled = sampled_answer(
                    event, pick, context.settings, modes=self._modes, hold=self.hold
                )
        if event.end_of_stream:
            if self._sampled is not None:
                self._enter(Phase.READING)  # the whole body: it is empty
            self._end_answer(now=now)
        reads = self._sampled is not None
        self.passes = self._modes.response_body.echoed and not reads
        if not reads and self._explained is None and not context.settings.conformance_headers:
            return PLAIN[Slot.RESPONSE_HEADERS]
        asks = reads and self._modes.response_body is BodyMode.NONE
        return (answer_to_headers(event, self._explained, context.settings, asks_for_body=asks),)

    def _on_response_body(self, event: Piece, *, now: float) -> Sequence[Action]:
        """Handle a piece of the answer. The piece is sent back if the data plane keeps no copy."""
        self._learn(event.modes)
        if self.phase not in BEGUN:
            self._context.picker.report(ProtocolFault("body_before_response_headers"))
        if self._sampled is not None and self.pick is not None:
            if self.phase is Phase.ANSWERED:
                self._enter(Phase.READING)
            if made := self._sampled.feed(event.data, now=now):
                self._context.picker.on_made(self.pick, made, now=now)
        if event.end_of_stream:
            self._end_answer(now=now)
        if not self._modes.response_body.echoed:
            return PLAIN[Slot.RESPONSE_BODY]
        return pieces(Slot.RESPONSE_BODY, event.data, end_of_stream=event.end_of_stream)

    def _end_answer(self, *, whole: bool = True, now: float) -> None:
        """Pass what a sampled answer showed to the picker. An answer without a byte showed nothing."""
        sampled, self._sampled = self._sampled, None
        if sampled is not None and self.pick is not None and self.phase is Phase.READING:
            self._context.picker.on_feedback(self.pick, sampled.finish(whole=whole), now=now)
        if self.phase in (Phase.ANSWERED, Phase.READING):
            self._enter(Phase.DONE)
