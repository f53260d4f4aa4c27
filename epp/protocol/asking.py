"""Makes the question of one stream to the picker, a `Question`, from the head and the body of a request.
Makes the answer to the data plane from the pick.

Owns the facts from the head. Also owns a body with a replaced model name until the body is sent on. `stream`
knows when the body is there, asks the picker, and knows in which message the answer goes.

Header names are matched in any case. The values of a repeated header are joined by commas, as HTTP says.

A data plane that sends no `:path` and no mode wants only a pick (NGINX Gateway Fabric). Such
a data plane gets one destination in the answer to the headers, and no body back, and its requests never wait.
It closes the stream cleanly after the pick, while the HTTP request goes on.

Pure. `stream` owns an `Asking`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from epp.base.errors import BadRequestError, NoEndpointError, NoRoomError, PickError
from epp.base.types import Address, ApiKind, InferenceRequest
from epp.config.flow import Flow
from epp.config.policy import PolicySpec
from epp.picker.decision import Question
from epp.picker.events import Pick, Refused
from epp.picker.gate import NO_CLAIM, FlowClaim
from epp.protocol.bodies import pieces
from epp.protocol.header_names import (
    DESTINATION,
    LENGTH,
    MAX_RETRIES,
    OBJECTIVES,
    REQUEST_ID,
    RESERVED,
    TEST_SELECTION,
    TRACEPARENT,
    TTFT_MS,
    read_addresses,
    read_claim,
    read_prescribed,
)
from epp.protocol.http_events import (
    Action,
    Answer,
    BodyMode,
    Estimate,
    Modes,
    Refuse,
    RequestHeaders,
    Slot,
)
from epp.protocol.refusals import refused
from epp.protocol.stream_settings import StreamContext
from epp.request.client_names import bounded_name
from epp.request.parse import parse_request, skim_request
from epp.request.rewriting import Rewrites, with_model
from epp.request.state_names import id_in_path, makes_state

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
"""All bodies together exceed `streams.maxHeldBodyBytes`. The request is refused if the policy refuses at
overload.
"""

_APART: Final = (ApiKind.OTHER, ApiKind.QUERY)
"""Requests whose paths may name what one server keeps."""
_KEEPING: Final = (ApiKind.RESPONSES, ApiKind.QUERY)
"""Requests whose answers may name what the server keeps."""
_RESERVED: Final = frozenset(RESERVED)
_REQUEST_NAMES: Final = _RESERVED.union(
    (":method", ":path", REQUEST_ID, LENGTH, "content-encoding", TEST_SELECTION)
)
_BODIES: Final = "bodies of requests"
"""Stands for a model in the seed of the hashes of bodies, which all pickers of a pool have in common."""
_RETRIES_IN_TROUBLE: Final = "2"
"""While servers fail, the first two that are named may both be dead."""
_MAX_REQUEST_ID_CHARS: Final = 256
_MAX_TRACEPARENT_CHARS: Final = 128
"""Version 00 has 55 characters, and a later version may add fields."""


class RequestHead(Struct, eq=False, gc=False):
    """The facts from the request headers. The state machine holds one object for each request."""

    path: str
    """Empty: the data plane sends no pseudo-headers, so the body has to show the API."""
    request_id: str
    """Empty: no request id came."""
    declared_bytes: int
    """Content-Length. 0 if the header is absent or not a number."""
    encoded: bool
    """Whether the body is compressed, so that it cannot be read."""
    reserved: tuple[str, ...]
    """The headers of `RESERVED` that the client sent, and the objectives and deadlines that the policy does
    not believe. They must not reach a server.
    """
    session: str
    debug: bool
    prescribed: str
    trace: str = ""
    """A trace context, not yet checked. It is read only if tracing is on."""
    claim: FlowClaim = NO_CLAIM

    def forget(self) -> None:
        """Forget the facts that only the pick needs. The stream may stay open for long, and clients choose
        the size of these facts.
        """
        self.path = self.session = self.prescribed = ""
        self.claim = NO_CLAIM


NO_HEAD: Final = RequestHead(
    path="",
    request_id="",
    declared_bytes=0,
    encoded=False,
    reserved=(),
    session="",
    debug=False,
    prescribed="",
)
"""No request headers came yet."""


class Asking:
    """Call `read` for the head, then `request` once, then `answer` or `refusal`."""

    __slots__ = (
        "_changed_body", "_changed_bytes", "_made_id", "_once", "_subset", "_trace", "asks_only", "context", "head", "hurried", "kind",
    )  # fmt: skip

    def __init__(self, context: StreamContext, *, trace: str, hurried: bool) -> None:
        self.context = context
        self._trace = trace
        self.hurried = hurried
        """Whether the picker has too much work to read the body."""
        self.asks_only = False
        """Whether the data plane wants only the pick."""
        self.kind = NO_BODY.kind
        self.head = NO_HEAD
        self._made_id = False
        self._once = False
        """Whether only one server may get the request."""
        self._subset: tuple[str, ...] | None = None
        self._changed_body: bytes | None = None
        """The body with the model's name replaced, until it is sent on."""
        self._changed_bytes = 0
        """The size of the changed body."""

    @property
    def changes_body(self) -> bool:
        """Whether another body than the one that came has to be sent on."""
        return self._changed_body is not None

    def read(self, event: RequestHeaders) -> RequestHead:
        """Read the request's headers."""
        context = self.context
        picker = context.picker
        head = self.head = read_head(event.headers, picker.policy.spec, flow=picker.flow_read)
        if not head.request_id:
            head.request_id, self._made_id = context.new_request_id(), True
        self._subset = event.subset
        self.asks_only = event.modes is None and not (head.path and context.settings.shows_answers)
        if not self._trace:
            self._trace = head.trace
        return head

    def body_back(self, body: bytes | memoryview, *, end_of_stream: bool) -> Sequence[Action]:
        """Return the answers to a body that was held. The body goes on unchanged, or with another name for
        the model.
        """
        if self.asks_only:
            return ()
        changed, self._changed_body = self._changed_body, None
        return pieces(Slot.REQUEST_BODY, body if changed is None else changed, end_of_stream=end_of_stream)

    def request(
        self,
        body: bytes | memoryview,
        *,
        instead: InferenceRequest | None,
        partial: bool,
        modes: Modes,
        now: float,
    ) -> Question:
        """Return the question to the picker. Raises PickError if the request is refused. instead: stands for
        the body, which is then not read.
        """
        head, context = self.head, self.context
        settings, started = context.settings, context.timer()
        fatal = context.picker.fatal
        body_hash = (
            xxh3_64_intdigest(body, context.picker.caches.roots.seed(model=_BODIES)) >> 2 if body else 0
        )
        self._once = bool(fatal.struck) and fatal.suspects(body_hash, now=now)
        inference, asked_model = NO_BODY, ""
        if instead is not None:
            load = context.picker.policy.spec.load
            if instead is NO_ROOM and load.when_saturated == "Reject":
                raise NoRoomError(retry_after_s=load.retry_after_seconds)
            inference = instead
        elif head.encoded:
            inference = ENCODED
        elif body:
            inference = self._read_body(head.path, body, partial=partial)
            self.kind = inference.kind
            rewrites = context.picker.rewrites
            if rewrites is not None and inference.model and self._can_change_body(modes):
                asked_model, inference = inference.model, self._renamed(inference, body, head, rewrites)
        prescribed: tuple[Address, ...] = ()
        if settings.conformance_headers and head.prescribed:
            prescribed = read_prescribed(head.prescribed, context.picker.endpoints())
            if not prescribed:
                raise NoEndpointError("none of the prescribed endpoints exists", reason="subset_empty")
        subset, self._subset = self._subset, None
        return Question(
            request_id=head.request_id,
            inference=inference,
            body_bytes=max(len(body), head.declared_bytes),
            subset=None if subset is None else read_addresses(subset),
            session=head.session,
            asked_model=asked_model if asked_model != inference.model else "",
            prescribed=prescribed,
            max_destinations=1 if self.asks_only or self._once else settings.max_destinations,
            hurried=self.hurried,
            trace=self._trace,
            began_s=started,
            path_hash=hash(head.path.partition("?")[0]),
            body_hash=body_hash,
            names_state=inference.names_state or (id_in_path(head.path) if inference.kind in _APART else ""),
            makes_state=inference.kind in _KEEPING and inference.stores and makes_state(head.path),
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
        head, settings = self.head, self.context.settings
        pick.decision.tenant = pick.decision.tenant or head.claim.tenant
        head.forget()
        destination = ",".join([address.text for address in pick.destinations])
        scores: tuple[tuple[str, float], ...] = ()
        if settings.scores_metadata:
            scores = tuple((str(c.address), c.score_s) for c in pick.decision.candidates if not c.excluded)
        cost: Estimate | None = None
        if settings.cost_metadata:
            decision = pick.decision
            cost = Estimate(decision.prompt_tokens, decision.matched_tokens, decision.predicted_s)
        if slot is Slot.REQUEST_TRAILERS:
            return Answer(slot, destination=destination, scores=scores, cost=cost)
        headers = [(DESTINATION, destination), *pick.set_headers]
        if self._once:
            headers.append((MAX_RETRIES, "0"))
        elif settings.retries_once and self.context.picker.fleet.failures.marks:
            headers.append((MAX_RETRIES, _RETRIES_IN_TROUBLE))
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
            clear_route_cache=settings.clear_route_cache,
            destination=destination,
            scores=scores,
            cost=cost,
        )

    def refusal(self, error: PickError) -> Refuse:
        """Return the refusal, in the format of the request's API."""
        self._changed_body = None
        head = self.head
        self.context.picker.report(Refused(head.request_id, error, self._trace))
        answer = refused(error, path=head.path, request_id=head.request_id)
        head.forget()
        return answer


# -- heads -----------------------------------------------------------------------------------------------


def request_names(spec: PolicySpec, *, flow: Flow | None = None, traced: bool = False) -> frozenset[str]:
    """Return the request headers that the picker reads. A transport may leave out all others. flow: see
    `Picker.flow_read`.
    """
    names = _REQUEST_NAMES | {spec.session_header, spec.debug_header, TRACEPARENT if traced else ""} - {""}
    if flow is None:
        return names
    return names.union(OBJECTIVES, (TTFT_MS, flow.tenant_header))


def read_head(
    headers: Sequence[tuple[str, str]], spec: PolicySpec, *, flow: Flow | None = None
) -> RequestHead:
    found = collect(headers)
    length = found.get(LENGTH, "")
    session = found.get(spec.session_header, "")
    return RequestHead(
        path=found.get(":path", ""),
        request_id=found.get(REQUEST_ID, "").strip()[:_MAX_REQUEST_ID_CHARS],
        declared_bytes=int(length) if length.isascii() and length.isdigit() and len(length) < 19 else 0,
        encoded=found.get("content-encoding", "").strip().lower() not in ("", "identity"),
        reserved=_to_remove(found, spec.flow),
        session=session and bounded_name(session),
        debug=bool(spec.debug_header) and spec.debug_header in found,
        prescribed=found.get(TEST_SELECTION, ""),
        trace=bounded_trace(found.get(TRACEPARENT, "")),
        claim=NO_CLAIM if flow is None else read_claim(found, flow),
    )


def collect(headers: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the names in lower case. Several values of one name are joined by commas."""
    found = dict(headers)
    if len(found) == len(headers) and "".join(found).islower():
        return found  # the usual case
    values: dict[str, list[str]] = {}
    for name, value in headers:
        values.setdefault(name.lower(), []).append(value)
    return {name: ",".join(several) for name, several in values.items()}


def answer_status(headers: Sequence[tuple[str, str]]) -> int:
    """Return the HTTP status of an answer. 0 if it cannot be read."""
    text = collect(headers).get(":status", "")
    return int(text) if len(text) == 3 and text.isascii() and text.isdigit() else 0


def _to_remove(found: Mapping[str, str], flow: Flow) -> tuple[str, ...]:
    """Return the headers to remove, which `RequestHead.reserved` holds."""
    removed = () if _RESERVED.isdisjoint(found) else tuple(name for name in RESERVED if name in found)
    if flow.mode == "Hold":
        for claim, names in (("Objective", OBJECTIVES), ("Deadline", (TTFT_MS,))):
            if claim not in flow.claims:
                removed += tuple(name for name in names if name in found)
    return removed


def not_set(reserved: tuple[str, ...], headers: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the reserved headers that a client sent and that the picker does not overwrite. They have to be
    removed.
    """
    return reserved and tuple(name for name in reserved if name not in {name for name, _ in headers})


def bounded_trace(text: str) -> str:
    """Return the text, or an empty text if it is too long to be a trace context. Streams keep the text for as
    long as they live.
    """
    return text if len(text) <= _MAX_TRACEPARENT_CHARS else ""
