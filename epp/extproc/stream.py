"""The life of one HTTP request as the data plane tells it: events in, actions out. No gRPC, no clock, no waiting.

Owns the order of answers in each processing mode, the pick, and its release. When the pick is made, by request body mode:

- BUFFERED: headers are answered at once, the one body message with the pick. Bodies that end in trailers too.
- BUFFERED_PARTIAL: the same; a body cut at the data plane's limit is routed by load, since half a JSON says nothing.
- FULL_DUPLEX_STREAMED (and GRPC): the answer to the headers waits for the whole body, then come header answer, body pieces
  and trailers, in this order.
- STREAMED with early body (`send_body_without_waiting_for_header_response`): the header answer waits as above, but only for
  `streamed_hold_bytes`: the data plane stops reading at its own buffer limit, and waiting beyond it ended in a 504 (seen
  on Envoy 1.40). A longer body is routed by load. The body's end is where Content-Length or its JSON says, for an end in
  trailers may never be told.
- STREAMED without early body: the data plane sends no body before the headers are answered, and chooses the server as
  soon as they are. A prefix cannot be known then: routed by load. Later chunks are answered unread.
- NONE, and requests without a body: routed by load, from the headers.

Where flow control holds a request, the pick is made later, and its answer delivered then: with full duplex nothing is due until the
answer to the headers, and with BUFFERED the data plane is first asked to wait (`Delay`). In the other modes no request waits, for
the data plane would pass it by, or stop reading.

A data plane that sends no `:path` and does not say its mode asks for a pick and nothing else (NGINX Gateway Fabric): it gets one
destination in the answer to the headers, no body back, and no wait. Its clean close after the pick says nothing of the HTTP request.

Any other data plane that does not say its mode is taken to speak `assumed_modes`; a deployment that differs says so there.
What comes out of order but can be let pass is let pass and reported to the observer; StreamProtocolError is for what cannot.

Invariants: at most one pick; a pick is released exactly once, by `close` or `detach`; after a refusal nothing is answered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import msgspec

from epp.decision import Observer, Outcome, Pick, PickRequest
from epp.errors import BlockedPathError, BodyTooLargeError, NoEndpointError, NoRoomError, PickError
from epp.extproc.bodies import (
    ENCODED,
    NO_BODY,
    NO_ROOM,
    NOT_SEEN,
    OVERLOADED,
    pieces,
    read_body,
    skim_body,
)
from epp.extproc.events import (
    Action,
    Answer,
    BodyMode,
    Estimate,
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
from epp.extproc.gathering import Body
from epp.extproc.reading import (
    DESTINATION,
    LENGTH,
    REQUEST_ID,
    RESERVED,
    RequestHead,
    asks_for_models,
    model_list_answer,
    not_set,
    read_addresses,
    read_head,
    read_prescribed,
    refusal,
)
from epp.extproc.response import PLAIN, PickerPort, ResponseHalf, StreamSettings
from epp.extproc.waiting import GatePort, Wait, longest_wait_s
from epp.request.rewriting import with_model
from epp.types import Address, InferenceRequest


class _Phase(enum.Enum):
    START = enum.auto()
    """No request headers yet."""
    BODY = enum.auto()
    """Headers answered, the pick waits for the body."""
    HOLDING = enum.auto()
    """Headers not answered, the pick waits for the body."""
    PASSED = enum.auto()
    """Decided, or never to be: the rest goes on as it comes."""
    WAITING = enum.auto()
    """The body is there, and flow control holds the request. Nothing is answered until it is decided."""
    REFUSED = enum.auto()


class HttpStream:
    """One HTTP request. `receive` each event, carry out the actions in order, and `close` at the end, whatever happened.

    `timer` measures how long parsing and picking took, for the observer; `now` is monotonic time in seconds. Where `gate` holds the
    request, its answers are given to `deliver` later.
    """

    __slots__ = (
        "_asks_only", "_body", "_changed_body", "_changed_bytes", "_closed", "_deliver", "_head", "_hurry", "_kind", "_made_id", "_modes", "_new_id",
        "_observer", "_phase", "_pick", "_picker", "_request_done", "_response", "_settings", "_subset", "_timer", "_trace",
        "_wait", "hold", "passes",
    )  # fmt: skip

    def __init__(
        self,
        picker: PickerPort,
        observer: Observer,
        *,
        settings: StreamSettings,
        new_request_id: Callable[[], str],
        timer: Callable[[], float],
        unread: bool = False,
        gate: GatePort | None = None,
        deliver: Callable[[Sequence[Action]], None] | None = None,
        trace: str = "",
    ) -> None:
        """unread: the picker has too much to do: route by load, read no more than names the model, and let go at once.

        trace: the data plane's own trace context, which goes before the client's.
        """
        self._picker = picker
        self._wait = Wait(gate)
        self._deliver = deliver
        self._observer = observer
        self._settings = settings
        self._new_id = new_request_id
        self._timer = timer
        self._hurry = unread
        self._trace = trace
        self.hold = settings.hold_streams and not unread
        """Stay until the HTTP request ends; a drain sets it to False. If False, `detach` as soon as `can_detach` says so."""
        self.passes = False
        """Pieces of the response's body go on as they come, and say nothing to this stream until the last one."""
        self._phase = _Phase.START
        self._modes = settings.assumed_modes
        self._head: RequestHead | None = None
        self._subset: tuple[str, ...] | None = None
        self._asks_only = False
        self._made_id = False
        self._changed_body: bytes | None = None
        """With the model's name changed; until it is sent on."""
        self._changed_bytes = 0
        """Its size."""
        self._body = Body(settings.room)
        self._kind = NO_BODY.kind
        self._pick: Pick | None = None
        self._request_done = False
        self._response = ResponseHalf(picker, observer, settings=settings)
        self._closed = False

    def hurry(self) -> None:
        """There is no time to read the body after all: as `unread`. Changes nothing once the request is picked."""
        if self._pick is None:
            self._hurry, self.hold = True, False

    def receive(self, event: Event, *, now: float) -> Sequence[Action]:
        """Take one event. StreamProtocolError: the stream makes no sense any more; close it."""
        if self._closed:
            raise StreamProtocolError("event_after_end")
        if self._wait.waits and isinstance(event, RequestBody | RequestTrailers):
            raise StreamProtocolError("request_while_waiting")
        match event:
            case RequestHeaders():
                return self._on_request_headers(event, now=now)
            case RequestBody():
                return self._on_request_body(event, now=now)
            case ResponseHeaders():
                return self._on_response_headers(event, now=now)
            case ResponseBody():
                return self._on_response_body(event, now=now)
            case RequestTrailers():
                return self._on_request_trailers(now=now)
            case ResponseTrailers():
                return self._on_response_trailers(now=now)

    @property
    def first(self) -> bool:
        """No event has told the modes yet."""
        return self._phase is _Phase.START

    @property
    def picked(self) -> bool:
        return self._pick is not None

    @property
    def waits(self) -> bool:
        """Flow control holds the request; its answer comes later."""
        return self._wait.waits

    @property
    def closed(self) -> bool:
        """Whatever was held is released."""
        return self._closed

    @property
    def can_detach(self) -> bool:
        """What must be answered is answered and no body needs us: the stream may end without harm to the request."""
        if self._hurry and self._pick is not None and not self._modes.request_body.echoed:
            return True  # The data plane sends what is left of the request without us.
        response = self._response
        unneeded = response.done or response.mode is BodyMode.NONE or response.overridden
        if response.status is None or not unneeded:
            return False
        return self._request_done or not self._modes.request_body.echoed

    def detach(self, *, now: float) -> None:
        """Let go of the request on purpose while its answer runs on."""
        if self._closed:
            return
        if self._response.done:
            self.close(now=now)
            return
        self._closed, self.passes = True, False
        self._body.drop()
        self._leave()
        if self._pick is not None:
            self._picker.detach(self._pick, now=now)

    def half_close(self, *, now: float) -> None:
        """The data plane has ended its side in good order: the HTTP request is over, unless it wanted the pick alone."""
        if self._asks_only and self._response.status is None:
            self.detach(now=now)
        else:
            self.close(now=now)

    def close(self, *, now: float, broken: bool = False) -> None:
        """Release what the request holds. Idempotent. broken: the picker itself failed, not the data plane or client."""
        if self._closed:
            return
        self._closed, self.passes = True, False
        self._body.drop()
        self._leave()
        if self._pick is None:
            return
        self._response.give_feedback(now=now)
        outcome: Outcome = "failed" if broken else self._response.outcome()
        self._picker.end(self._pick, outcome=outcome, now=now)

    def check_integrity(self) -> None:
        assert self._body.size_bytes == 0 or self._phase is not _Phase.START
        assert len(self._body) <= self._settings.max_body_bytes
        assert not len(self._body) or self._phase in (_Phase.BODY, _Phase.HOLDING)
        assert self._pick is None or self._phase is _Phase.PASSED
        assert self._wait.waits == (self._phase is _Phase.WAITING)
        assert not self._wait.after or self._wait.waits
        assert not self._closed or self._pick is None or self._pick.over
        self._response.check_integrity()

    # -- the request ---------------------------------------------------------------------------------------------

    def _on_request_headers(self, event: RequestHeaders, *, now: float) -> Sequence[Action]:
        if self._phase is not _Phase.START or self._head is not None:
            raise StreamProtocolError("second_request_headers")
        self._learn(event.modes)
        self._request_done = event.end_of_stream
        spec = self._picker.policy.spec
        head = read_head(event.headers, spec, tried=self._wait.tried)
        if not head.request_id:
            head.request_id, self._made_id = self._new_id(), True
        self._head, self._subset = head, event.subset
        self._asks_only = event.modes is None and not (head.path and self._settings.shows_answers)
        if not self._trace:
            self._trace = head.trace
        if self._response.status is not None:
            return self._pass_on(Slot.REQUEST_HEADERS)
        if self._settings.blocked.refuse(head.path):
            return self._refuse(BlockedPathError("not served by this gateway"))
        if head.declared_bytes > self._settings.max_body_bytes and not event.end_of_stream:
            return self._refuse(self._too_large())
        if event.end_of_stream:
            return self._without_body(event, head, now=now)
        if self._decides_unseen():
            return self._decide(Slot.REQUEST_HEADERS, instead=self._unseen(), now=now)
        return self._await_body(head)

    def _without_body(self, event: RequestHeaders, head: RequestHead, *, now: float) -> Sequence[Action]:
        """The headers are all of the request."""
        if self._settings.answers_list and asks_for_models(event.headers, head.path):
            listed = self._picker.model_list(None if event.subset is None else read_addresses(event.subset))
            if listed is not None:
                self._phase = _Phase.REFUSED
                return (model_list_answer(listed),)
        return self._decide(Slot.REQUEST_HEADERS, instead=self._unseen(), now=now)

    def _await_body(self, head: RequestHead) -> Sequence[Action]:
        if self._modes.request_body not in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            self._phase = _Phase.HOLDING
            return ()
        self._phase = _Phase.BODY
        if head.reserved:
            # The pick removes them too, but only if it is made: nothing of them may survive a picker that dies now.
            return (Answer(Slot.REQUEST_HEADERS, remove_headers=head.reserved),)
        return PLAIN[Slot.REQUEST_HEADERS]

    def _on_request_body(self, event: RequestBody, *, now: float) -> Sequence[Action]:
        self._request_done = event.end_of_stream
        if self._phase is _Phase.START:
            self._learn(event.modes)
            self._phase = _Phase.PASSED
            self._observer.protocol_error("body_before_headers")
        if self._phase is _Phase.REFUSED:
            return ()
        if self._phase is _Phase.PASSED:
            return self._body_answers(Slot.REQUEST_BODY, event, self._modes.request_body)
        if self._body.size_bytes + len(event.data) > self._settings.max_body_bytes:
            return self._refuse(self._too_large())
        if not self._body.add(event.data):
            return self._without_room(end_of_stream=event.end_of_stream, now=now)
        mode = self._modes.request_body
        if self._phase is _Phase.BODY:
            partial = mode is BodyMode.BUFFERED_PARTIAL and not event.end_of_stream
            return self._decide(Slot.REQUEST_BODY, self._body.take(), partial=partial, now=now)
        if event.end_of_stream:
            return self._release(end_of_stream=True, now=now)
        if mode is BodyMode.STREAMED and self._body.size_bytes >= self._settings.streamed_hold_bytes:
            return self._release(end_of_stream=False, partial=True, now=now)
        if mode is BodyMode.STREAMED and self._looks_whole(event.data):
            return self._release(end_of_stream=False, now=now)
        return ()

    def _without_room(self, *, end_of_stream: bool, now: float) -> Sequence[Action]:
        """All bodies together are over their bound: this one goes on unread, or is refused where the policy refuses at overload."""
        load = self._picker.policy.spec.load
        if load.when_saturated == "Reject":
            return self._refuse(NoRoomError(retry_after_s=load.retry_after_seconds))
        if self._phase is _Phase.BODY:
            return self._decide(Slot.REQUEST_BODY, self._body.take(), instead=NO_ROOM, now=now)
        return self._release(end_of_stream=end_of_stream, instead=NO_ROOM, now=now)

    def _on_request_trailers(self, *, now: float) -> Sequence[Action]:
        answer = PLAIN[Slot.REQUEST_TRAILERS]
        self._request_done = True
        if self._phase is _Phase.REFUSED:
            return ()
        if self._phase is _Phase.HOLDING:
            released = self._release(end_of_stream=False, now=now)
            if self._wait.waits:
                self._wait.after = (*self._wait.after, *answer)
                return released
            return released if any(isinstance(a, Refuse) for a in released) else (*released, *answer)
        if self._phase is _Phase.BODY:
            # A body of no bytes, then trailers: only the dynamic metadata can still name the server.
            return self._decide(Slot.REQUEST_TRAILERS, instead=NO_BODY, now=now)
        if self._phase is _Phase.START:
            self._phase = _Phase.PASSED
            self._observer.protocol_error("trailers_before_headers")
        return answer

    def _looks_whole(self, piece: bytes | memoryview) -> bool:
        """Nothing more can matter. Where the data plane keeps trailers to itself, a body before them has no marked end."""
        declared_bytes = self._known_head().declared_bytes
        if declared_bytes:
            return self._body.size_bytes >= declared_bytes
        return self._body.looks_whole(piece)

    def _release(
        self,
        *,
        end_of_stream: bool,
        partial: bool = False,
        instead: InferenceRequest | None = None,
        now: float,
    ) -> Sequence[Action]:
        """The held answers, in order: headers, then the body as the mode wants it."""
        count, body = self._body.pieces, self._body.take()
        first = self._decide(Slot.REQUEST_HEADERS, body, instead=instead, partial=partial, now=now)
        if first and isinstance(first[0], Refuse):
            return first
        if self._asks_only:
            return first
        if not self._modes.request_body.echoed:
            return (*first, *(PLAIN[Slot.REQUEST_BODY] * count))
        if self._changed_body is not None:
            body, self._changed_body = self._changed_body, None
        echoes = pieces(Slot.REQUEST_BODY, body, end_of_stream=end_of_stream)
        if self._wait.waits:
            self._wait.after = echoes
            return first
        return (*first, *echoes)

    def _decides_unseen(self) -> bool:
        """Whether the pick is made at the headers: no body comes here before it, or there is no time to read one."""
        modes = self._modes
        if modes.request_body is BodyMode.NONE:
            return True
        if self._hurry and self._picker.one_model:
            return True
        return modes.request_body is BodyMode.STREAMED and not modes.early_body

    def _unseen(self) -> InferenceRequest:
        """What is known of a body at the time of the headers."""
        if self._request_done:
            return NO_BODY
        return OVERLOADED if self._hurry else NOT_SEEN

    def _decide(
        self,
        slot: Slot,
        body: bytes | memoryview = b"",
        *,
        instead: InferenceRequest | None = None,
        partial: bool = False,
        now: float,
    ) -> Sequence[Action]:
        """Pick, and say it in the answer to `slot`; or refuse. instead: what is taken for the body's content without reading it."""
        if self._response.status is not None:
            # The client has its answer already (the data plane's own, perhaps): no server will see this request.
            return self._pass_on(slot)
        try:
            request = self._asked(body, instead=instead, partial=partial)
            longest_s = longest_wait_s(slot, request, modes=self._modes, settings=self._settings)
            if self._hurry or self._asks_only or longest_s <= 0 or not self._wait.on:
                picked: Pick | Sequence[Action] = self._picker.pick(request, now=now)
            else:
                picked = self._wait.offer(
                    slot,
                    request,
                    self._known_head().claim,
                    self._on_decided,
                    longest_s=longest_s,
                    asks=self._settings.longest_delay_s > 0,
                    echoed=self._modes.request_body.echoed or self._changed_body is not None,
                    now=now,
                )
        except PickError as error:
            return self._refuse(error)
        if isinstance(picked, Pick):
            return self._picked(slot, picked)
        self._phase = _Phase.WAITING
        return picked

    def _on_decided(self, decided: Pick | PickError, now: float) -> None:  # noqa: ARG002 - as the gate calls it
        """Flow control has let the request go, or refused it."""
        after = self._wait.decided()
        assert self._deliver is not None, "a stream with a gate can be answered later"
        if isinstance(decided, PickError):
            self._deliver(self._refuse(decided))
        else:
            self._deliver((*self._picked(self._wait.slot, decided), *after))

    def _leave(self) -> None:
        if self._wait.waits:
            self._wait.leave()
            self._phase = _Phase.PASSED

    def _picked(self, slot: Slot, pick: Pick) -> Sequence[Action]:
        self._pick = pick
        self._phase = _Phase.PASSED
        self._known_head().forget()
        return (self._routed(slot, pick),)

    def _asked(
        self, body: bytes | memoryview, *, instead: InferenceRequest | None, partial: bool
    ) -> PickRequest:
        head, settings = self._known_head(), self._settings
        started = self._timer()
        inference, asked_model = NO_BODY, ""
        if instead is not None:
            inference = instead
        elif head.encoded:
            inference = ENCODED
        elif body:
            read = skim_body if self._hurry else read_body
            inference = read(head.path, body, partial=partial)
            self._kind = inference.kind
            if inference.model and self._picker.rewrites and self._can_change_body():
                asked_model, inference = inference.model, self._renamed(inference, body, head)
            self._observer.parsed(seconds=self._timer() - started, size_bytes=len(body))
        prescribed: tuple[Address, ...] = ()
        if settings.conformance_headers and head.prescribed:
            prescribed = read_prescribed(head.prescribed, self._picker.endpoints())
            if not prescribed:
                raise NoEndpointError("none of the prescribed endpoints exists", reason="subset_empty")
        subset, self._subset = self._subset, None
        return PickRequest(
            request_id=head.request_id,
            inference=inference,
            body_bytes=max(len(body), head.declared_bytes),
            subset=None if subset is None else read_addresses(subset),
            session=head.session,
            asked_model=asked_model if asked_model != inference.model else "",
            prescribed=prescribed,
            max_destinations=1 if self._asks_only else settings.max_destinations,
            hurried=self._hurry,
            trace=self._trace,
            began_s=started,
        )

    def _can_change_body(self) -> bool:
        """The picker may send another body on than came. In the other modes the data plane sends its own copy."""
        mode = self._modes.request_body
        return mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED) and not self._asks_only

    def _renamed(
        self, inference: InferenceRequest, body: bytes | memoryview, head: RequestHead
    ) -> InferenceRequest:
        """With the model that a rewrite puts in the place of the one that was sent."""
        model = self._picker.rewrites.target(inference, session=head.session, request_id=head.request_id)
        if model == inference.model:
            return inference
        self._changed_body = with_model(body, before=inference.model, after=model)
        self._changed_bytes = len(self._changed_body)
        return msgspec.structs.replace(inference, model=model)

    def _routed(self, slot: Slot, pick: Pick) -> Answer:
        destination = ",".join(map(str, pick.destinations))
        scores: tuple[tuple[str, float], ...] = ()
        if self._settings.scores_metadata:
            scores = tuple((str(c.address), c.score_s) for c in pick.decision.candidates if not c.excluded)
        cost: Estimate | None = None
        if self._settings.cost_metadata:
            decision = pick.decision
            cost = Estimate(decision.prompt_tokens, decision.matched_tokens, decision.predicted_s)
        if slot is Slot.REQUEST_TRAILERS:
            return Answer(slot, destination=destination, scores=scores, cost=cost)
        head = self._known_head()
        headers = [(DESTINATION, destination), *pick.set_headers]
        if self._made_id:
            headers.append((REQUEST_ID, head.request_id))
        if self._changed_bytes and head.declared_bytes:
            headers.append((LENGTH, str(self._changed_bytes)))
        changed = None
        if slot is Slot.REQUEST_BODY:
            changed, self._changed_body = self._changed_body, None
        return Answer(
            slot,
            set_headers=tuple(headers),
            body=changed,
            remove_headers=not_set(head.reserved, headers),
            clear_route_cache=self._settings.clear_route_cache,
            destination=destination,
            scores=scores,
            cost=cost,
        )

    def _refuse(self, error: PickError) -> Sequence[Action]:
        self._phase = _Phase.REFUSED
        self._body.drop()
        self._changed_body = None
        self._observer.refused(self._known_head().request_id, error, trace=self._trace)
        refused = refusal(error, self._known_head())
        self._known_head().forget()
        return (refused,)

    def _pass_on(self, slot: Slot) -> Sequence[Action]:
        """Go on without a destination, and without one that the client made up."""
        self._phase = _Phase.PASSED
        if slot is Slot.REQUEST_HEADERS:
            return (Answer(slot, remove_headers=RESERVED),)
        return PLAIN[slot]

    # -- the response --------------------------------------------------------------------------------------------

    def _on_response_headers(self, event: ResponseHeaders, *, now: float) -> Sequence[Action]:
        self._learn(event.modes)
        self._leave()  # The client has its answer: the data plane's own.
        answers = self._response.begin(
            event,
            pick=self._pick,
            modes=self._modes,
            kind=self._kind,
            debug=self._head is not None and self._head.debug,
            hold=self.hold,
            now=now,
        )
        self.passes = self._modes.response_body.echoed and not self._response.reads
        return answers

    def _on_response_body(self, event: ResponseBody, *, now: float) -> Sequence[Action]:
        self._learn(event.modes)
        answers = self._body_answers(Slot.RESPONSE_BODY, event, self._modes.response_body)
        self._response.feed(event, now=now)
        return answers

    def _on_response_trailers(self, *, now: float) -> Sequence[Action]:
        self._response.finish(now=now)
        return PLAIN[Slot.RESPONSE_TRAILERS]

    # -- shared --------------------------------------------------------------------------------------------------

    def _body_answers(
        self, slot: Slot, event: RequestBody | ResponseBody, mode: BodyMode
    ) -> Sequence[Action]:
        if mode.echoed:
            return pieces(slot, event.data, end_of_stream=event.end_of_stream)
        return PLAIN[slot]

    def _learn(self, modes: Modes | None) -> None:
        if modes is not None:
            self._modes, self.passes = modes, False

    def _known_head(self) -> RequestHead:
        assert self._head is not None, "decisions come after request headers"
        return self._head

    def _too_large(self) -> BodyTooLargeError:
        limit = self._settings.max_body_bytes
        return BodyTooLargeError(f"The request body is over the limit of {limit} bytes; send a shorter one.")
