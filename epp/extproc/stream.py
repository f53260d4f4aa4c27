"""The state machine of one HTTP request, as the data plane reports it: takes events, returns actions. It
knows no gRPC and no clock, and never waits.

Owns the order of answers in each processing mode (`BodyMode` says when the pick is made in each),
and the release of the pick.

If a data plane does not state its mode, `assumed_modes` is assumed; set it for deployments that differ.
Harmless events in a wrong order are accepted and reported to the observer. All others raise a
StreamProtocolError.

A stream has one phase, and its response another (`phases` has the tables). `reading` reads the head and
collects the body, `asking` makes the question of them, the picker or flow control (`waiting`) decides, and
`asking` makes the answer.

Invariants: at most one pick; a pick is released exactly once, by `close` or `detach`;
after a refusal nothing is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epp.decision import Observer, Outcome, PickRequest
from epp.errors import BlockedPathError, BodyTooLargeError, NoRoomError, PickError
from epp.extproc.asking import NO_BODY, NO_ROOM, NOT_SEEN, OVERLOADED, Asking
from epp.extproc.events import (
    PLAIN,
    Action,
    Answer,
    BodyMode,
    Event,
    Modes,
    Refuse,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Slot,
    StreamProtocolError,
)
from epp.extproc.phases import DECIDED, FOLLOWS, Phase, ResponsePhase
from epp.extproc.reading import RESERVED, Body, RequestHead, passed_on, pieces
from epp.extproc.response import ResponseHalf, StreamSettings
from epp.extproc.waiting import Waiting
from epp.gate import Gate
from epp.picker import Picker
from epp.picker_events import Pick
from epp.types import InferenceRequest


class HttpStream:
    """One HTTP request. `receive` each event, carry out the actions in order, and `close` at the end,
    whatever happened.

    `timer` measures how long parsing and picking took, for the observer; `now` is monotonic time in seconds.
    Where `gate` holds the request, its answers are given to `deliver` later.
    """

    __slots__ = (
        "_asking", "_body", "_deliver", "_modes", "_observer", "_picker", "_response", "_settings", "_waiting", "hold", "passes", "phase", "pick",
    )  # fmt: skip

    def __init__(
        self,
        picker: Picker,
        observer: Observer,
        *,
        settings: StreamSettings,
        new_request_id: Callable[[], str],
        timer: Callable[[], float],
        unread: bool = False,
        gate: Gate | None = None,
        deliver: Callable[[Sequence[Action]], None] | None = None,
        trace: str = "",
    ) -> None:
        """unread: the picker has too much work. The request is routed by load, only the names of API and
        model are read, and the stream is let go at once.

        trace: the data plane's own trace context, which goes before the client's.
        """
        self._picker = picker
        self._observer = observer
        self._settings = settings
        self._deliver = deliver
        self._asking = Asking(
            picker,
            observer,
            settings=settings,
            new_request_id=new_request_id,
            timer=timer,
            trace=trace,
            hurried=unread,
        )
        self._waiting = Waiting(gate, settings) if gate is not None else None
        self.hold = settings.hold_streams and not unread
        """Stay until the HTTP request ends. A drain sets this to False. If False, `detach` as soon as
        `can_detach` is true.
        """
        self.passes = False
        """Pieces of the response's body go on unchanged. This stream reads nothing of them until the last
        one.
        """
        self.phase = Phase.START
        self._modes = settings.assumed_modes
        self._body = Body(settings.room)
        self.pick: Pick | None = None
        self._response = ResponseHalf(picker, observer, settings=settings)

    def hurry(self) -> None:
        """Called when the picker no longer has time to read the body: go on as with `unread`. Changes nothing
        once the request is picked.
        """
        if self.pick is None:
            self._asking.hurried, self.hold = True, False

    def receive(self, event: Event, *, now: float) -> Sequence[Action]:
        """Handle one event. StreamProtocolError: the stream makes no sense any more; close it."""
        if self.phase is Phase.CLOSED:
            raise StreamProtocolError("event_after_end")
        if self.phase is Phase.WAITING and isinstance(event, RequestBody | RequestTrailers):
            raise StreamProtocolError("request_while_waiting")
        match event:
            case RequestHeaders():
                return self._on_request_headers(event, now=now)
            case RequestBody():
                return self._on_request_body(event, now=now)
            case ResponseHeaders():
                return self._on_response_headers(event, now=now)
            case ResponseBody():
                self._learn(event.modes)
                return self._response.body(event, echoed=self._modes.response_body.echoed, now=now)
            case RequestTrailers():
                return self._on_request_trailers(now=now)
            case ResponseTrailers():
                return self._response.trailers(echoed=self._modes.response_body.echoed, now=now)

    @property
    def can_detach(self) -> bool:
        """Whether the stream may end without harm to the request: everything is answered, and no body needs
        us.
        """
        echoed = self._modes.request_body.echoed
        if self.pick is not None and self._asking.hurried and not echoed:
            return True  # The data plane sends the rest of the request without us.
        response = self._response
        if response.phase is ResponsePhase.AWAITED:
            return False
        if response.phase is not ResponsePhase.DONE and response.mode is not BodyMode.NONE:
            return False
        return self._body.ended or not echoed

    def detach(self, *, now: float) -> None:
        """Let go of the request on purpose while its answer is still being sent."""
        if self._response.phase is ResponsePhase.DONE:
            self.close(now=now)
        elif self._release() and self.pick is not None:
            self._picker.detach(self.pick, now=now)

    def half_close(self, *, now: float) -> None:
        """Called when the data plane has ended its side in good order. So the HTTP request is over, unless
        the data plane wanted only the pick.
        """
        if self._asking.asks_only and self._response.phase is ResponsePhase.AWAITED:
            self.detach(now=now)
        else:
            self.close(now=now)

    def close(self, *, now: float, broken: bool = False) -> None:
        """Release all that the request holds. Idempotent. broken: the picker itself failed, not the data
        plane or the client.
        """
        if self._release() and self.pick is not None:
            self._response.give_feedback(now=now)
            outcome: Outcome = "failed" if broken else self._response.outcome()
            self._picker.end(self.pick, outcome=outcome, now=now)

    def check_integrity(self) -> None:
        gathers = self.phase in (Phase.BODY, Phase.HOLDING)
        assert self._body.size_bytes == 0 or self.phase is not Phase.START
        assert len(self._body) <= self._settings.max_body_bytes
        assert not len(self._body) or gathers
        assert (self.pick is not None) == (self.phase is Phase.PICKED) or self.phase is Phase.CLOSED
        assert self.phase is not Phase.CLOSED or self.pick is None or self.pick.over
        if self._waiting is not None:
            self._waiting.check_integrity()
            assert self._waiting.held == (self.phase is Phase.WAITING)
        self._response.check_integrity()

    # -- phases ----------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        assert phase in FOLLOWS[self.phase], f"{phase} does not follow {self.phase}"
        self.phase = phase

    def _release(self) -> bool:
        """Release everything; nothing more may come. False: everything was already released."""
        if self.phase is Phase.CLOSED:
            return False
        if self._waiting is not None:
            self._waiting.leave()
        self._body.drop()
        self._deliver = None  # it belongs to the owner: no circle of references may outlive the request
        self.passes = False
        self._enter(Phase.CLOSED)
        return True

    def _learn(self, modes: Modes | None) -> None:
        if modes is not None:
            self._modes, self.passes = modes, False

    # -- the request -----------------------------------------------------------------------------------------

    def _on_request_headers(self, event: RequestHeaders, *, now: float) -> Sequence[Action]:
        if self.phase is not Phase.START:
            raise StreamProtocolError("second_request_headers")
        self._learn(event.modes)
        self._body.ended = event.end_of_stream
        head = self._asking.read(event, read=self._waiting.read if self._waiting is not None else None)
        if self._response.phase is not ResponsePhase.AWAITED:
            return self._pass_on(Slot.REQUEST_HEADERS)
        blocked = self._settings.blocked
        if head.path not in blocked.open_apis and blocked.refuse(head.path):
            return self._refuse(BlockedPathError("not served by this gateway"))
        if head.declared_bytes > self._settings.max_body_bytes and not event.end_of_stream:
            return self._refuse(BodyTooLargeError(limit_bytes=self._settings.max_body_bytes))
        if event.end_of_stream:
            listed = self._asking.model_list(event)
            if listed is None:
                return self._decide(Slot.REQUEST_HEADERS, instead=NO_BODY, now=now)
            self._enter(Phase.REFUSED)
            return (listed,)
        return self._await_body(head, now=now)

    def _await_body(self, head: RequestHead, *, now: float) -> Sequence[Action]:
        """Await the body if the data plane hands it over before it has to know the server, and if there is
        time to read it. Otherwise pick now.
        """
        mode, hurried = self._modes.request_body, self._asking.hurried
        seen = mode >= BodyMode.BUFFERED or (mode is BodyMode.STREAMED and self._modes.early_body)
        if not seen or (hurried and self._picker.one_model):
            instead = OVERLOADED if hurried else NOT_SEEN
            return self._decide(Slot.REQUEST_HEADERS, instead=instead, now=now)
        if mode not in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            self._enter(Phase.HOLDING)
            return ()
        self._enter(Phase.BODY)
        if head.reserved:
            # The pick removes these headers too, but only if it is made. They must not reach a server if the
            # picker dies now.
            return (Answer(Slot.REQUEST_HEADERS, remove_headers=head.reserved),)
        return PLAIN[Slot.REQUEST_HEADERS]

    def _on_request_body(self, event: RequestBody, *, now: float) -> Sequence[Action]:
        self._body.ended = event.end_of_stream
        if self.phase is Phase.START:
            self._learn(event.modes)
            self._enter(Phase.PASSED)
            self._observer.protocol_error("body_before_headers")
        if self.phase is Phase.REFUSED:
            return ()
        if self.phase in DECIDED:
            return passed_on(event, self._modes.request_body)
        if self._body.size_bytes + len(event.data) > self._settings.max_body_bytes:
            return self._refuse(BodyTooLargeError(limit_bytes=self._settings.max_body_bytes))
        if not self._body.add(event.data):
            return self._without_room(end_of_stream=event.end_of_stream, now=now)
        mode = self._modes.request_body
        if self.phase is Phase.BODY or event.end_of_stream:
            partial = mode is BodyMode.BUFFERED_PARTIAL and not event.end_of_stream
            return self._answer_body(end_of_stream=event.end_of_stream, partial=partial, now=now)
        if mode is BodyMode.STREAMED:
            partial = self._body.size_bytes >= self._settings.streamed_hold_bytes
            if partial or self._body.looks_whole(event.data, declared_bytes=self._asking.head.declared_bytes):
                return self._answer_body(end_of_stream=False, partial=partial, now=now)
        return ()

    def _without_room(self, *, end_of_stream: bool, now: float) -> Sequence[Action]:
        """Called when all bodies together exceed their bound. This one goes on unread, or is refused if the
        policy refuses at overload.
        """
        load = self._picker.policy.spec.load
        if load.when_saturated == "Reject":
            return self._refuse(NoRoomError(retry_after_s=load.retry_after_seconds))
        return self._answer_body(end_of_stream=end_of_stream, instead=NO_ROOM, now=now)

    def _on_request_trailers(self, *, now: float) -> Sequence[Action]:
        answer = PLAIN[Slot.REQUEST_TRAILERS]
        self._body.ended = True
        if self.phase is Phase.REFUSED:
            return ()
        if self.phase is Phase.HOLDING:
            answers = self._answer_body(end_of_stream=False, now=now)
            if self._waiting is not None and self._waiting.answer_after(answer):
                return answers
            return answers if isinstance(answers[0], Refuse) else (*answers, *answer)
        if self.phase is Phase.BODY:
            # The body has no bytes, and trailers follow. Only the dynamic metadata can still name the server.
            return self._decide(Slot.REQUEST_TRAILERS, instead=NO_BODY, now=now)
        if self.phase is Phase.START:
            self._enter(Phase.PASSED)
            self._observer.protocol_error("trailers_before_headers")
        return answer

    def _answer_body(
        self,
        *,
        end_of_stream: bool,
        partial: bool = False,
        instead: InferenceRequest | None = None,
        now: float,
    ) -> Sequence[Action]:
        """Called when the body has come as far as it is read. Returns its answer, or all answers that were
        held: first the headers, then the body in the form that the mode asks for.
        """
        if self.phase is Phase.BODY:
            return self._decide(
                Slot.REQUEST_BODY, self._body.take(), instead=instead, partial=partial, now=now
            )
        count, body = self._body.pieces, self._body.take()
        first = self._decide(Slot.REQUEST_HEADERS, body, instead=instead, partial=partial, now=now)
        if self.phase is Phase.REFUSED or self._asking.asks_only:
            return first
        if not self._modes.request_body.echoed:
            return (*first, *(PLAIN[Slot.REQUEST_BODY] * count))
        echoes = pieces(Slot.REQUEST_BODY, self._asking.sent_on(body), end_of_stream=end_of_stream)
        waits = self._waiting is not None and self._waiting.answer_after(echoes)
        return first if waits else (*first, *echoes)

    # -- the decision ----------------------------------------------------------------------------------------

    def _decide(
        self,
        slot: Slot,
        body: bytes | memoryview = b"",
        *,
        instead: InferenceRequest | None = None,
        partial: bool = False,
        now: float,
    ) -> Sequence[Action]:
        """Pick, and put the pick into the answer to `slot`; or refuse.

        instead: taken for the body's content, which is then not read.
        """
        if self._response.phase is not ResponsePhase.AWAITED:
            # The client already has an answer, perhaps the data plane's own. No server will see this request.
            return self._pass_on(slot)
        try:
            request = self._asking.request(body, instead=instead, partial=partial, modes=self._modes)
            decided = self._ask(slot, request, now=now)
        except PickError as error:
            return self._refuse(error)
        if isinstance(decided, Pick):
            return self._picked(slot, decided)
        self._enter(Phase.WAITING)
        return decided

    def _ask(self, slot: Slot, request: PickRequest, *, now: float) -> Pick | Sequence[Action]:
        """Return the pick. If flow control holds the request: the actions that report the wait."""
        waiting, asking, offered = self._waiting, self._asking, None
        if waiting is not None and not (asking.hurried or asking.asks_only):
            offered = waiting.offer(
                slot,
                request,
                asking.head.claim,
                self._on_decided,
                modes=self._modes,
                keeps_body=asking.changes_body or self._modes.request_body.echoed,
                now=now,
            )
        return self._picker.pick(request, now=now) if offered is None else offered

    def _on_decided(self, decided: Pick | PickError, now: float) -> None:  # noqa: ARG002 - as the gate calls it
        """Flow control has let the request go, or has refused it."""
        assert self._waiting is not None
        assert self._deliver is not None, "a stream with a gate can be answered later"
        slot, after = self._waiting.go_on()
        if isinstance(decided, PickError):
            self._deliver(self._refuse(decided))
        else:
            self._deliver((*self._picked(slot, decided), *after))

    def _picked(self, slot: Slot, pick: Pick) -> Sequence[Action]:
        self.pick = pick
        self._enter(Phase.PICKED)
        return (self._asking.answer(slot, pick),)

    def _refuse(self, error: PickError) -> Sequence[Action]:
        self._enter(Phase.REFUSED)
        self._body.drop()
        return (self._asking.refusal(error),)

    def _pass_on(self, slot: Slot) -> Sequence[Action]:
        """Go on without a destination. A destination that the client made up is removed."""
        self._enter(Phase.PASSED)
        return (Answer(slot, remove_headers=RESERVED),) if slot is Slot.REQUEST_HEADERS else PLAIN[slot]

    # -- the response ----------------------------------------------------------------------------------------

    def _on_response_headers(self, event: ResponseHeaders, *, now: float) -> Sequence[Action]:
        self._learn(event.modes)
        if self.phase is Phase.WAITING:
            assert self._waiting is not None
            self._waiting.leave()  # The client has its answer, which the data plane gave itself.
            self._enter(Phase.PASSED)
        answers = self._response.begin(
            event,
            pick=self.pick,
            modes=self._modes,
            kind=self._asking.kind,
            debug=self._asking.debug,
            hold=self.hold,
            now=now,
        )
        self.passes = self._modes.response_body.echoed and not self._response.reads
        return answers
