"""Asks the picker for one stream, and makes the answer: from the head and the body of a request to its
destinations or its refusal.

Owns the facts from the head, the body with a replaced model name, and the waiting request while flow control
holds it. A request waits only in modes that allow it. With full duplex, no message is due before the answer
to the headers. With BUFFERED, the picker asks the data plane for more time once, or the request waits within
the time-out of the data plane. In the other modes no request waits, because the data plane would go on
without the picker, or would stop reading.

A data plane that sends no `:path` and no mode wants only a pick (NGINX Gateway Fabric). It gets one
destination in the answer to the headers, and no body back, and its requests never wait. That it closes the
stream cleanly after the pick says nothing about the HTTP request.

Pure. Owned by `stream`, which knows when to ask.

Memory: a waiting request keeps its canonical prompt, and with full duplex the body that is to be sent on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

import msgspec

from epp.config.dialects import WAIT_SHARE
from epp.config.flow import Flow
from epp.decision import Observer, Pick, PickRequest
from epp.errors import NoEndpointError, PickError
from epp.extproc.bodies import ENCODED, NO_BODY, read_body, skim_body
from epp.extproc.events import Action, Answer, BodyMode, Delay, Estimate, Modes, Refuse, RequestHeaders, Slot
from epp.extproc.reading import (
    DESTINATION,
    LENGTH,
    REQUEST_ID,
    RequestHead,
    asks_for_models,
    model_list_answer,
    not_set,
    read_addresses,
    read_head,
    read_prescribed,
    refusal,
)
from epp.extproc.response import PickerPort, StreamSettings
from epp.gate import Claim
from epp.model_queue import WaitingRequest
from epp.request.rewriting import Rewrites, with_model
from epp.types import Address, InferenceRequest


class GatePort(Protocol):
    """The methods of `epp.gate.Gate` that a stream calls."""

    @property
    def on(self) -> bool: ...
    @property
    def read(self) -> Flow | None: ...
    def offer(
        self,
        request: PickRequest,
        claim: Claim,
        decided: Callable[[Pick | PickError, float], None],
        *,
        size_bytes: int,
        longest_s: float,
        now: float,
    ) -> Pick | WaitingRequest: ...
    def leave(self, waiting: WaitingRequest) -> None: ...


class Asking:
    """`read` the head and `ask` once; then `answer` or `refusal`.
    `leave` at the end of the stream, whatever happened.
    """

    __slots__ = (
        "_after",
        "_changed_body",
        "_changed_bytes",
        "_gate",
        "_head",
        "_made_id",
        "_new_id",
        "_observer",
        "_picker",
        "_settings",
        "_slot",
        "_subset",
        "_timer",
        "_trace",
        "_waiting",
        "asks_only",
        "hurried",
        "kind",
    )  # fmt: skip

    def __init__(
        self,
        picker: PickerPort,
        gate: GatePort | None,
        observer: Observer,
        *,
        settings: StreamSettings,
        new_request_id: Callable[[], str],
        timer: Callable[[], float],
        trace: str,
        hurried: bool,
    ) -> None:
        self._picker = picker
        self._gate = gate
        self._observer = observer
        self._settings = settings
        self._new_id = new_request_id
        self._timer = timer
        self._trace = trace
        self.hurried = hurried
        """The picker has too much work to read the body."""
        self.asks_only = False
        """The data plane wants only the pick."""
        self.kind = NO_BODY.kind
        self._head: RequestHead | None = None
        self._made_id = False
        self._subset: tuple[str, ...] | None = None
        self._changed_body: bytes | None = None
        """The body with the model's name replaced, until it is sent on."""
        self._changed_bytes = 0
        """The size of the changed body."""
        self._waiting: WaitingRequest | None = None
        self._slot = Slot.REQUEST_BODY
        """The message whose answer carries the pick of a request that waited."""
        self._after: Sequence[Action] = ()
        """The answers that follow that one."""

    @property
    def head(self) -> RequestHead:
        assert self._head is not None, "decisions come after request headers"
        return self._head

    @property
    def debug(self) -> bool:
        """The client asked for the reasons of its pick."""
        return self._head is not None and self._head.debug

    @property
    def waits(self) -> bool:
        """Flow control holds the request."""
        return self._waiting is not None

    def read(self, event: RequestHeaders) -> RequestHead:
        """Read the request's headers."""
        read = self._gate.read if self._gate is not None else None
        head = self._head = read_head(event.headers, self._picker.policy.spec, read=read)
        if not head.request_id:
            head.request_id, self._made_id = self._new_id(), True
        self._subset = event.subset
        self.asks_only = event.modes is None and not (head.path and self._settings.shows_answers)
        if not self._trace:
            self._trace = head.trace
        return head

    # -- the question ----------------------------------------------------------------------------------------

    def ask(
        self,
        slot: Slot,
        body: bytes | memoryview,
        decided: Callable[[Pick | PickError, float], None],
        *,
        instead: InferenceRequest | None,
        partial: bool,
        modes: Modes,
        now: float,
    ) -> Pick | Sequence[Action]:
        """Returns a pick, if the request goes at once. Otherwise the request waits, and this returns the
        actions that tell the data plane so. PickError: the request is refused.

        instead: taken for the body's content, which is then not read.

        decided: called with the pick or the refusal of a request that waited.
        """
        request = self._request(body, instead=instead, partial=partial, modes=modes)
        gate, settings = self._gate, self._settings
        if gate is None or self.hurried or self.asks_only or not gate.on:
            return self._picker.pick(request, now=now)
        longest_s = _longest_wait_s(slot, request, modes=modes, settings=settings)
        if longest_s <= 0:
            return self._picker.pick(request, now=now)
        echoed = modes.request_body.echoed or self._changed_body is not None
        offered = gate.offer(
            request,
            self.head.claim,
            decided,
            size_bytes=request.inference.held_bytes + (request.body_bytes if echoed else 0),
            longest_s=WAIT_SHARE * longest_s,
            now=now,
        )
        if isinstance(offered, Pick):
            return offered
        self._waiting, self._slot = offered, slot
        return (Delay(longest_s),) if settings.longest_delay_s > 0 and longest_s < inf else ()

    def model_list(self, event: RequestHeaders) -> Refuse | None:
        """The answer to `GET /v1/models`. None: this is another request, or no server has reported its
        models.
        """
        if not (self._settings.answers_list and asks_for_models(event.headers, self.head.path)):
            return None
        listed = self._picker.model_list(None if event.subset is None else read_addresses(event.subset))
        return None if listed is None else model_list_answer(listed)

    def answer_after(self, actions: Sequence[Action]) -> None:
        """Send these actions once the waiting request is picked, after the answer with the pick."""
        self._after = (*self._after, *actions)

    def decided(self) -> tuple[Slot, Sequence[Action]]:
        """The request no longer waits. Returns the message whose answer carries the pick, and the actions
        that follow.
        """
        after, self._after, self._waiting = self._after, (), None
        return self._slot, after

    def leave(self) -> None:
        """Stop waiting, since the stream no longer needs the answer. Idempotent."""
        waiting, self._waiting, self._after = self._waiting, None, ()
        if waiting is not None and self._gate is not None:
            self._gate.leave(waiting)

    def sent_on(self, body: bytes | memoryview) -> bytes | memoryview:
        """The body to send on: unchanged, or with another name for the model."""
        changed, self._changed_body = self._changed_body, None
        return body if changed is None else changed

    def check_integrity(self) -> None:
        assert not self._after or self.waits

    def _request(
        self, body: bytes | memoryview, *, instead: InferenceRequest | None, partial: bool, modes: Modes
    ) -> PickRequest:
        head, settings = self.head, self._settings
        started = self._timer()
        inference, asked_model = NO_BODY, ""
        if instead is not None:
            inference = instead
        elif head.encoded:
            inference = ENCODED
        elif body:
            read = skim_body if self.hurried else read_body
            inference = read(head.path, body, partial=partial)
            self.kind = inference.kind
            rewrites = self._picker.rewrites
            if rewrites is not None and inference.model and self._can_change_body(modes):
                asked_model, inference = inference.model, self._renamed(inference, body, head, rewrites)
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
            max_destinations=1 if self.asks_only else settings.max_destinations,
            hurried=self.hurried,
            trace=self._trace,
            began_s=started,
            path_hash=hash(head.path.partition("?")[0]),
        )

    def _can_change_body(self, modes: Modes) -> bool:
        """Whether the picker may send on another body than the one that came.

        In the other modes the data plane sends its own copy.
        """
        mode = modes.request_body
        return mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED) and not self.asks_only

    def _renamed(
        self, inference: InferenceRequest, body: bytes | memoryview, head: RequestHead, rewrites: Rewrites
    ) -> InferenceRequest:
        """The body with the model's name replaced by the name that a rewrite gives."""
        model = rewrites.target(inference, session=head.session, request_id=head.request_id)
        if model == inference.model:
            return inference
        self._changed_body = with_model(body, before=inference.model, after=model)
        self._changed_bytes = len(self._changed_body)
        return msgspec.structs.replace(inference, model=model)

    # -- the answer ------------------------------------------------------------------------------------------

    def answer(self, slot: Slot, pick: Pick) -> Answer:
        """The answer that says where the request goes. Parts of the head that only the pick needed are
        forgotten.
        """
        head = self.head
        pick.decision.tenant = pick.decision.tenant or head.claim.tenant
        head.forget()
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

    def refusal(self, error: PickError) -> Refuse:
        """The refusal, in the format of the request's API."""
        self._changed_body = None
        head = self.head
        self._observer.refused(head.request_id, error, trace=self._trace)
        refused = refusal(error, head)
        head.forget()
        return refused


def _longest_wait_s(slot: Slot, request: PickRequest, *, modes: Modes, settings: StreamSettings) -> float:
    """How many seconds the data plane can wait for the answer to `slot`; 0: the answer must come now.

    A request without a prompt costs its server next to nothing, and goes at once.
    """
    if not request.inference.prompt:
        return 0.0
    if modes.request_body.echoed:
        return inf
    return settings.longest_delay_s or settings.given_delay_s if slot is Slot.REQUEST_BODY else 0.0
