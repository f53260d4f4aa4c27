"""The question of one stream to the picker, and the answer to the data plane: from the head and the body of a
request to a `PickRequest`, and from a pick to destinations, or from an error to a refusal.

Owns the facts from the head, and the body with a replaced model name until it is sent on. `stream` collects
the body, asks the picker, and knows in which message the answer goes.

A data plane that sends no `:path` and no mode wants only a pick (NGINX Gateway Fabric). It gets one
destination in the answer to the headers, and no body back, and its requests never wait. That it closes the
stream cleanly after the pick says nothing about the HTTP request.

Pure. Owned by `stream`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from epp.config.flow import Flow
from epp.decision import Observer, PickRequest
from epp.errors import BadRequestError, FlowRefusedError, NoEndpointError, PickError, SaturatedError
from epp.extproc.events import Answer, BodyMode, Estimate, Modes, Refuse, RequestHeaders, Slot
from epp.extproc.reading import (
    DESTINATION,
    LENGTH,
    REQUEST_ID,
    RequestHead,
    not_set,
    read_addresses,
    read_head,
    read_prescribed,
)
from epp.extproc.response import StreamSettings
from epp.picker import Picker
from epp.picker_events import Pick
from epp.request.parse import parse_request, skim_request
from epp.request.rewriting import Rewrites, with_model
from epp.types import Address, ApiKind, InferenceRequest

DROPPED: Final = "x-llm-d-request-dropped-reason"

NO_BODY: Final = InferenceRequest(kind=ApiKind.OTHER)
ENCODED: Final = InferenceRequest(kind=ApiKind.OTHER, unread="encoded_body")
"""The body is compressed in a way that the picker does not read."""
PARTIAL: Final = InferenceRequest(kind=ApiKind.OTHER, unread="partial_body")
"""The data plane hands over only the start of the body."""
OVERLOADED: Final = InferenceRequest(kind=ApiKind.OTHER, unread="overload")
"""The picker has too much work to read the body."""
NOT_SEEN: Final = InferenceRequest(kind=ApiKind.OTHER, unread="body_not_seen")
"""The data plane has to know the server before it hands over the body."""
NO_ROOM: Final = InferenceRequest(kind=ApiKind.OTHER, unread="no_room")
"""All bodies together exceed `streams.maxHeldBodyBytes`."""


class Asking:
    """`read` the head; make the `request` once; then `answer` or `refusal`."""

    __slots__ = (
        "_changed_body",
        "_changed_bytes",
        "_head",
        "_made_id",
        "_new_id",
        "_observer",
        "_picker",
        "_settings",
        "_subset",
        "_timer",
        "_trace",
        "asks_only",
        "hurried",
        "kind",
    )  # fmt: skip

    def __init__(
        self,
        picker: Picker,
        observer: Observer,
        *,
        settings: StreamSettings,
        new_request_id: Callable[[], str],
        timer: Callable[[], float],
        trace: str,
        hurried: bool,
    ) -> None:
        self._picker = picker
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

    @property
    def head(self) -> RequestHead:
        assert self._head is not None, "decisions come after request headers"
        return self._head

    @property
    def debug(self) -> bool:
        """The client asked for the reasons of its pick."""
        return self._head is not None and self._head.debug

    @property
    def changes_body(self) -> bool:
        """Another body than the one that came has to be sent on."""
        return self._changed_body is not None

    def read(self, event: RequestHeaders, *, read: Flow | None) -> RequestHead:
        """Read the request's headers. read: see `Gate.read`."""
        head = self._head = read_head(event.headers, self._picker.policy.spec, read=read)
        if not head.request_id:
            head.request_id, self._made_id = self._new_id(), True
        self._subset = event.subset
        self.asks_only = event.modes is None and not (head.path and self._settings.shows_answers)
        if not self._trace:
            self._trace = head.trace
        return head

    def model_list(self, event: RequestHeaders) -> Refuse | None:
        """Return the answer to `GET /v1/models`. None: this is another request, or no server has reported its
        models.
        """
        # Any prefix that a gateway put before the path is allowed.
        asked = self.head.path.partition("?")[0].rstrip("/").endswith("/v1/models")
        if not (self._settings.answers_list and asked and (":method", "GET") in event.headers):
            return None
        listed = self._picker.model_list(None if event.subset is None else read_addresses(event.subset))
        if listed is None:
            return None
        headers = (("content-type", "application/json"),)
        return Refuse(status=200, headers=headers, body=listed, reason="model_list")

    def sent_on(self, body: bytes | memoryview) -> bytes | memoryview:
        """Return the body to send on: unchanged, or with another name for the model."""
        changed, self._changed_body = self._changed_body, None
        return body if changed is None else changed

    def request(
        self, body: bytes | memoryview, *, instead: InferenceRequest | None, partial: bool, modes: Modes
    ) -> PickRequest:
        """Return the question to the picker. PickError: the request is refused.

        instead: taken for the body's content, which is then not read.
        """
        head, settings = self.head, self._settings
        started = self._timer()
        inference, asked_model = NO_BODY, ""
        if instead is not None:
            inference = instead
        elif head.encoded:
            inference = ENCODED
        elif body:
            inference = self._read_body(head.path, body, partial=partial)
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

    def _read_body(self, path: str, body: bytes | memoryview, *, partial: bool) -> InferenceRequest:
        if self.hurried:
            return skim_request(path, body, unread=OVERLOADED.unread)
        try:
            return parse_request(path, body)
        except BadRequestError:
            if partial:
                return PARTIAL
            raise

    def _can_change_body(self, modes: Modes) -> bool:
        """Return whether the picker may send on another body than the one that came.

        In the other modes the data plane sends its own copy.
        """
        mode = modes.request_body
        return mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED) and not self.asks_only

    def _renamed(
        self, inference: InferenceRequest, body: bytes | memoryview, head: RequestHead, rewrites: Rewrites
    ) -> InferenceRequest:
        """Return the body with the model's name replaced by the name that a rewrite gives."""
        model = rewrites.target(inference, session=head.session, request_id=head.request_id)
        if model == inference.model:
            return inference
        self._changed_body = with_model(body, before=inference.model, after=model)
        self._changed_bytes = len(self._changed_body)
        return msgspec.structs.replace(inference, model=model)

    def answer(self, slot: Slot, pick: Pick) -> Answer:
        """Return the answer that says where the request goes. Parts of the head that only the pick needed are
        forgotten.
        """
        head = self.head
        pick.decision.tenant = pick.decision.tenant or head.claim.tenant
        head.forget()
        destination = ",".join([address.text for address in pick.destinations])
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
        """Return the refusal, in the format of the request's API."""
        self._changed_body = None
        head = self.head
        self._observer.refused(head.request_id, error, trace=self._trace)
        refused = _refused(error, head)
        head.forget()
        return refused


_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _refused(error: PickError, head: RequestHead) -> Refuse:
    """Return the error in the format of the request's API: Anthropic's for /v1/messages and paths below it,
    such as `/v1/messages/count_tokens`, else OpenAI's.
    """
    body: dict[str, object]
    details: dict[str, object]
    if "/v1/messages/" in head.path.partition("?")[0] + "/":
        details = {"type": _ANTHROPIC_TYPES.get(error.status, "api_error"), "message": str(error)}
        body = {"type": "error", "error": details, "request_id": head.request_id}
    else:
        details = {"message": str(error), "type": error.error_type, "param": None, "code": error.reason}
        body = {"error": details}
    headers = [("content-type", "application/json")]
    if isinstance(error, SaturatedError):
        headers.append(("retry-after", str(error.retry_after_s)))
    if isinstance(error, FlowRefusedError):
        headers.append((DROPPED, error.reason))
    return Refuse(
        status=error.status, headers=tuple(headers), body=msgspec.json.encode(body), reason=error.reason
    )
