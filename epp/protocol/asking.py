"""Makes the question of one stream to the picker (`ask`), a `Question`, from the head and the body of a
request, and the answer to the data plane from the pick (`answer`). `stream` knows when the body is there,
asks the picker, and knows in which message the answer goes.

Header names are matched in any case. The values of a repeated header are joined by commas, as HTTP says.

A data plane that sends no `:path` and no mode wants only a pick (NGINX Gateway Fabric). Such a data plane
gets one destination in the answer to the headers, and no body back, and its requests never wait. It closes
the stream cleanly after the pick, while the HTTP request goes on. Pure.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from epp.base.errors import BodyTooLargeError, PickError, SaturatedError
from epp.base.types import Address, ApiKind, InferenceRequest
from epp.config.dialects import WAIT_SHARE
from epp.config.flow import Flow
from epp.config.policy import PolicySpec
from epp.picker.decision import Question
from epp.picker.events import Pick
from epp.picker.gate import NO_CLAIM, FlowClaim, WaitingRequest
from epp.picker.picker import Picker
from epp.picker.unserved import UnservedRequest
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
    read_address,
    read_addresses,
    read_claim,
    read_prescribed,
)
from epp.protocol.http_events import Action, Answer, BodyMode, Delay, Headers, Modes, Slot, pieces
from epp.protocol.settings import StreamContext, StreamSettings
from epp.request.client_names import bounded_name, id_in_path, makes_state
from epp.request.parse import parse_request, skim_request
from epp.request.rewriting import with_model

NO_BODY: Final = InferenceRequest(kind=ApiKind.OTHER)
ENCODED: Final = InferenceRequest(kind=ApiKind.OTHER, unread="encoded_body")
"""The body is compressed in a way that the picker does not read."""
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
_KEEP: Final = (ApiKind.RESPONSES, ApiKind.QUERY)
"""Requests whose answers may name what the server keeps."""
_CHANGEABLE: Final = (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED)
"""The modes in which the picker may send on another body than the one that came."""
_RESERVED: Final = frozenset(RESERVED)
_REQUEST_NAMES: Final = _RESERVED.union(
    (":method", ":path", REQUEST_ID, LENGTH, "content-encoding", TEST_SELECTION)
)
_BODIES: Final = "bodies of requests"
"""Stands for a model in the seed of the hashes of bodies, which all pickers of a pool have in common."""
_RETRIES_IN_TROUBLE: Final = "2"
"""While servers fail, the first two that are named may both be dead."""

_MAX_REQUEST_ID_CHARS: Final = 256
MOST_KEPT_CHARS: Final = 8192
"""The most of a path, and of prescribed addresses, that a call keeps while it waits for its body."""
_MAX_TRACEPARENT_CHARS: Final = 128
"""Version 00 has 55 characters, and a later version may add fields."""


class Head(Struct, eq=False, gc=False):
    """The facts from the request headers. A stream keeps them until the pick or the refusal: it may stay open
    for long, and clients choose the size of these facts.
    """

    path: str
    """Empty: the data plane sends no pseudo-headers, so the body has to show the API."""
    request_id: str
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
    trace: str
    """A trace context, not yet checked. It is read only if tracing is on."""
    claim: FlowClaim
    made_id: bool = False
    """Whether no request id came, so that the picker made one."""
    subset: tuple[str, ...] | None = None
    """As in `Headers`."""
    asks_only: bool = False
    """Whether the data plane wants only the pick."""


class Asked(Struct, frozen=True, gc=False):
    """What the picker is asked, and what the answer needs besides the pick."""

    question: Question
    head: Head
    slot: Slot
    """The message whose answer carries the pick."""
    only_once: bool
    """Whether only one server may get the request."""
    changed_body: bytes | None
    """The body with the model's name replaced. None: the body goes on as it came."""
    after: Sequence[Action]
    """The actions behind the answer."""


def ask(
    head: Head,
    slot: Slot,
    body: bytes | memoryview,
    context: StreamContext,
    *,
    modes: Modes,
    instead: InferenceRequest | None = None,
    partial: bool = False,
    overload: bool = False,
    ends: bool | None = None,
    after: Sequence[Action] = (),
    now: float,
) -> Asked:
    """Return the question to the picker. Raises PickError if the request is refused. instead: stands for the
    body, which is then not read. partial: the data plane hands over only the start of the body. overload: the
    picker has too much work to read the body. In both cases only names are read. ends: whether the body ends
    the stream, if it was held and goes back behind the answer. after: the actions behind that.
    """
    picker, settings, started = context.picker, context.settings, context.timer()
    body_hash = xxh3_64_intdigest(body, picker.caches.roots.seed(model=_BODIES)) >> 2 if body else 0
    only_once = bool(picker.fatal.struck) and picker.fatal.suspects(body_hash, now=now)
    inference, asked_model, changed = NO_BODY, "", None
    if instead is not None:
        load = picker.policy.spec.load
        if instead is NO_ROOM and load.when_saturated == "Reject":
            later_s = load.retry_after_seconds
            message = f"the gateway holds too many unfinished bodies; try again in {later_s} s"
            raise SaturatedError(message, reason="no_room", retry_after_s=later_s)
        inference = instead
    elif head.encoded:
        inference = ENCODED
    elif body:
        if partial or overload:
            unread = OVERLOADED.unread if overload else "partial_body"
            inference = skim_request(head.path, body, unread=unread)
        else:
            inference = parse_request(head.path, body)
        if picker.news.rewrites is not None and (inference.model or inference.prompt) and not head.asks_only:
            target = picker.news.rewrites.target(inference, session=head.session, request_id=head.request_id)
            # In the other modes the data plane sends its own copy of the body.
            if target != inference.model and modes.request_body in _CHANGEABLE:
                asked_model = inference.model
                changed = with_model(body, model=target)
                inference = msgspec.structs.replace(inference, model=target)
    prescribed: tuple[Address, ...] | None = None
    if settings.conformance_headers and head.prescribed:
        prescribed = read_prescribed(head.prescribed, picker.news.endpoints())
    question = Question(
        request_id=head.request_id,
        inference=inference,
        body_bytes=max(len(body), head.declared_bytes),
        subset=None if head.subset is None else read_addresses(head.subset),
        session=head.session,
        asked_model=asked_model,
        prescribed=prescribed,
        max_destinations=1 if head.asks_only or only_once else settings.caller.max_destinations,
        asks_only=head.asks_only,
        overload=overload,
        trace=head.trace,
        began_s=started,
        path_hash=hash(head.path.partition("?")[0]),
        body_hash=body_hash,
        names_state=inference.names_state or (id_in_path(head.path) if inference.kind in _APART else ""),
        makes_state=not overload and inference.kind in _KEEP and inference.stores and makes_state(head.path),
    )
    if ends is not None and not head.asks_only:
        back = body if changed is None else changed
        after = (*pieces(Slot.REQUEST_BODY, back, end_of_stream=ends), *after)
    return Asked(question, head, slot, only_once, changed, after)


def offer(
    asked: Asked,
    context: StreamContext,
    *,
    modes: Modes,
    on_decided: Callable[[Asked, Pick | PickError, float], None],
    now: float,
) -> tuple[Pick | WaitingRequest | UnservedRequest, Sequence[Delay]]:
    """Return the pick, or the request that flow control lets wait until `on_decided` is called, with the
    message that tells the data plane so. Raises PickError.
    """
    question, head, settings, gate = asked.question, asked.head, context.settings, context.gate
    longest_s = 0.0
    if context.picker.flow_decides and not question.overload and not head.asks_only:
        longest_s = longest_wait_s(asked.slot, question, modes, settings)
    if gate is None or longest_s <= 0 or not gate.on:
        return context.picker.pick(question, now=now), ()
    keeps_body = asked.changed_body is not None or modes.request_body.echoed
    offered = gate.offer(
        question,
        head.claim,
        functools.partial(on_decided, asked),
        size_bytes=len(question.inference.prompt) + (question.body_bytes if keeps_body else 0),
        longest_s=WAIT_SHARE * longest_s,
        now=now,
    )
    return offered, (Delay(longest_s),) if settings.longest_delay_s > 0 and longest_s < inf else ()


def longest_wait_s(slot: Slot, question: Question, modes: Modes, settings: StreamSettings) -> float:
    """Return how many seconds the data plane can wait for the answer to `slot`. 0: the answer must come now.

    With full duplex, no message is due before the answer to the headers. With BUFFERED, the picker asks for
    more time once, or the request waits within the data plane's time-out. In the other modes the data plane
    would go on without the picker, or would stop reading. A request without a prompt costs its server next to
    nothing, and goes at once.
    """
    if not question.inference.prompt:
        return 0.0
    if modes.request_body.echoed:
        return inf
    return settings.longest_delay_s or settings.given_delay_s if slot is Slot.REQUEST_BODY else 0.0


def answer(asked: Asked, pick: Pick, context: StreamContext) -> Sequence[Action]:
    """Return the answer that says where the request goes, and the actions behind it."""
    head, slot, settings, decision = asked.head, asked.slot, context.settings, pick.decision
    decision.tenant = decision.tenant or head.claim.tenant
    destination = ",".join([address.text for address in pick.destinations])
    if slot is Slot.REQUEST_TRAILERS:
        return (Answer(slot, destination=destination),)
    headers = [(DESTINATION, destination), *pick.set_headers]
    if asked.only_once:
        headers.append((MAX_RETRIES, "0"))
    elif settings.retries_once and context.picker.fleet.failures.marks:
        headers.append((MAX_RETRIES, _RETRIES_IN_TROUBLE))
    if head.made_id:
        headers.append((REQUEST_ID, head.request_id))
    if asked.changed_body is not None and head.declared_bytes:
        headers.append((LENGTH, str(len(asked.changed_body))))
    whole = Answer(
        slot,
        set_headers=tuple(headers),
        body=asked.changed_body if slot is Slot.REQUEST_BODY else None,
        remove_headers=tuple([name for name in head.reserved if name not in dict(headers)]),
        destination=destination,
    )
    return (whole, *asked.after)


def require_fits(size_bytes: int, settings: StreamSettings) -> None:
    """Raises BodyTooLargeError if no body may be so large."""
    if size_bytes > settings.max_body_bytes:
        raise BodyTooLargeError(limit_bytes=settings.max_body_bytes)


# -- heads -----------------------------------------------------------------------------------------------


def request_names(spec: PolicySpec, *, flow: Flow | None = None, traced: bool = False) -> frozenset[str]:
    """Return the request headers that the picker reads. A transport may leave out all others. flow: see
    `Picker.flow_read`.
    """
    names = _REQUEST_NAMES | {spec.session_header, spec.debug_header, TRACEPARENT if traced else ""} - {""}
    if flow is None:
        return names
    return names.union(OBJECTIVES, (TTFT_MS, flow.tenant_header))


def head_of(event: Headers, context: StreamContext, *, trace: str) -> Head:
    """Return the head of a stream's request. trace: the data plane's own trace context, which goes before the
    client's.
    """
    picker, settings = context.picker, context.settings
    head = read_head(event.headers, picker.policy.spec, flow=picker.flow_read)
    head.subset, head.trace = event.subset, trace or head.trace
    head.asks_only = event.modes is None and not (head.path and not settings.caller.body_only)
    if not head.request_id:
        head.request_id, head.made_id = context.new_request_id(), True
    return head


def read_head(headers: Sequence[tuple[str, str]], spec: PolicySpec, *, flow: Flow | None = None) -> Head:
    """Read what the headers of a request say."""
    found = collect(headers)
    length = found.get(LENGTH, "")
    session = found.get(spec.session_header, "")
    return Head(
        path=found.get(":path", ""),
        request_id=found.get(REQUEST_ID, "").strip()[:_MAX_REQUEST_ID_CHARS],
        declared_bytes=int(length) if length.isascii() and length.isdigit() and len(length) < 19 else 0,
        encoded=found.get("content-encoding", "").strip().lower() not in ("", "identity"),
        reserved=_to_remove(found, spec.flow),
        session=session and bounded_name(session),
        debug=bool(spec.debug_header) and spec.debug_header in found,
        prescribed=found.get(TEST_SELECTION, "")[:MOST_KEPT_CHARS],
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


def note_answer(event: Headers, pick: Pick, picker: Picker, *, now: float) -> None:
    """Tell the picker that the answer to a pick has begun. A status that cannot be read is 0."""
    text = dict(event.headers).get(":status", "")
    status = int(text) if len(text) == 3 and text.isascii() and text.isdigit() else 0
    first = pick.destinations[0]
    served = first if event.served == first.text else read_address(event.served)
    picker.on_response_headers(pick, status=status, served=served, lost=event.lost, now=now)


def _to_remove(found: Mapping[str, str], flow: Flow) -> tuple[str, ...]:
    """Return the headers to remove, which `Head.reserved` holds."""
    removed = () if _RESERVED.isdisjoint(found) else tuple(name for name in RESERVED if name in found)
    if flow.mode == "Hold":
        for claim, names in (("Objective", OBJECTIVES), ("Deadline", (TTFT_MS,))):
            if claim not in flow.claims:
                removed += tuple(name for name in names if name in found)
    return removed


def bounded_trace(text: str) -> str:
    """Return the text, or an empty text if it is too long to be a trace context. Streams keep the text for as
    long as they live.
    """
    return text if len(text) <= _MAX_TRACEPARENT_CHARS else ""
