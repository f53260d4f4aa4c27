"""Reads what routing needs out of headers and hints, and turns an error into the client's answer.
Pure functions.

Names are matched in any case. The values of a repeated header are joined by commas, as HTTP says. Values that
cannot be read are skipped here, and `stream` decides what to do. Nothing in this module raises an error
because of a peer's bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from epp.config.flow import Flow
from epp.config.policy import PolicySpec
from epp.errors import FlowRefusedError, PickError, SaturatedError
from epp.extproc.events import Refuse
from epp.gate import NO_CLAIM, Claim
from epp.request.names import MAX_TENANT_CHARS, bounded_name
from epp.types import SERVER_HEADERS, Address, Endpoint, Entry

DESTINATION: Final = "x-gateway-destination-endpoint"
REQUEST_ID: Final = "x-request-id"
LENGTH: Final = "content-length"
DECISION: Final = "x-prefix-gateway-decision"
TEST_SELECTION: Final = "test-epp-endpoint-selection"
TEST_SERVED: Final = "x-conformance-test-served-endpoint"

OBJECTIVES: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""Headers that name an InferenceObjective. The second is the older name."""
TTFT_MS: Final = "x-llm-d-slo-ttft-ms"
DROPPED: Final = "x-llm-d-request-dropped-reason"

TRACEPARENT: Final = "traceparent"
_MAX_TRACEPARENT_CHARS: Final = 128
"""Version 00 has 55 characters, and a later version may add fields."""

RESPONSE_NAMES: Final = frozenset((":status", "content-type", "content-encoding"))
RESERVED: Final = (DESTINATION, *SERVER_HEADERS)
"""Request headers that only the picker may set."""
_RESERVED: Final = frozenset(RESERVED)
_REQUEST_NAMES: Final = _RESERVED.union(
    (":method", ":path", REQUEST_ID, "content-length", "content-encoding", TEST_SELECTION)
)
_MAX_REQUEST_ID_CHARS: Final = 256


def request_names(spec: PolicySpec, *, read: Flow | None = None, traced: bool = False) -> frozenset[str]:
    """The request headers that the picker reads. A transport may leave out all others. read: see
    `Gate.read`.
    """
    names = _REQUEST_NAMES | {spec.session_header, spec.debug_header, TRACEPARENT if traced else ""} - {""}
    flow = _claimed(spec, read)
    if flow is None:
        return names
    return names.union(OBJECTIVES, (TTFT_MS, flow.tenant_header))


def collect(headers: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Names in lower case. Several values of one name are joined by commas."""
    found = dict(headers)
    if len(found) == len(headers) and "".join(found).islower():
        return found  # the usual case
    found.clear()
    for name, value in headers:
        key = name.lower()
        found[key] = f"{found[key]},{value}" if key in found else value
    return found


class RequestHead(Entry):
    """What the request headers say. The state machine holds one for each request."""

    path: str
    """Empty: the data plane sends no pseudo-headers, so the body has to show the API."""
    request_id: str
    """Empty: no request id came."""
    declared_bytes: int
    """Content-Length; 0 if it is absent or not a number."""
    encoded: bool
    """The body is compressed, so it cannot be read."""
    reserved: tuple[str, ...]
    """The headers of `RESERVED` that the client sent, and the objectives and deadlines that the policy does
    not believe. They must not reach a server.
    """
    session: str
    debug: bool
    prescribed: str
    trace: str = ""
    """A trace context, not yet checked. It is read only if tracing is on."""
    claim: Claim = NO_CLAIM

    def forget(self) -> None:
        """Forget what only the pick needs: the stream may stay open for long, and clients choose how much
        this is.
        """
        self.path = self.session = self.prescribed = ""
        self.claim = NO_CLAIM


def read_head(
    headers: Sequence[tuple[str, str]], spec: PolicySpec, *, read: Flow | None = None
) -> RequestHead:
    found, flow = collect(headers), _claimed(spec, read)
    length = found.get("content-length", "")
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
        claim=NO_CLAIM if flow is None else _claim(found, flow),
    )


def _to_remove(found: Mapping[str, str], flow: Flow) -> tuple[str, ...]:
    """See `RequestHead.reserved`."""
    removed = () if _RESERVED.isdisjoint(found) else tuple(name for name in RESERVED if name in found)
    if flow.mode == "Hold":
        for claim, names in (("Objective", OBJECTIVES), ("Deadline", (TTFT_MS,))):
            if claim not in flow.claims:
                removed += tuple(name for name in names if name in found)
    return removed


def not_set(reserved: tuple[str, ...], headers: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The reserved headers that a client sent and that the picker does not overwrite. They have to be
    removed.
    """
    return reserved and tuple(name for name in reserved if name not in {name for name, _ in headers})


def asks_for_models(headers: Sequence[tuple[str, str]], path: str) -> bool:
    """Whether this is `GET /v1/models`, with any prefix that a gateway put before the path."""
    return path.partition("?")[0].rstrip("/").endswith("/v1/models") and (":method", "GET") in headers


def model_list_answer(listed: bytes) -> Refuse:
    """The answer with the list of models, which the gateway itself gives."""
    return Refuse(
        status=200, headers=(("content-type", "application/json"),), body=listed, reason="model_list"
    )


def bounded_trace(text: str) -> str:
    """The text, or nothing if it is too long to be a trace context: streams keep it for as long
    as they live.
    """
    return text if len(text) <= _MAX_TRACEPARENT_CHARS else ""


def _claimed(spec: PolicySpec, read: Flow | None) -> Flow | None:
    """The flow control whose headers are read. This is the flow control of the policy in force if it holds
    requests.
    """
    return spec.flow if spec.flow.mode == "Hold" else read


def _claim(found: Mapping[str, str], flow: Flow) -> Claim:
    """What the headers claim about a request's place in a queue. Headers that cannot be read
    count as absent.
    """
    claims = flow.claims
    milliseconds = found.get(TTFT_MS, "").strip() if "Deadline" in claims else ""
    readable = milliseconds.isascii() and milliseconds.isdigit() and len(milliseconds) < 9
    return Claim(
        objective=next((bounded_name(found[name].strip()) for name in OBJECTIVES if name in found), "")
        if "Objective" in claims
        else "",
        tenant=bounded_name(found.get(flow.tenant_header, "").strip(), most_chars=MAX_TENANT_CHARS)
        if "Tenant" in claims
        else "",
        path=found.get(":path", "").partition("?")[0] if flow.paths else "",
        ttft_s=int(milliseconds) / 1000 if readable else None,
    )


def read_status(text: str) -> int:
    """An HTTP status; 0 if the text is not a status."""
    return int(text) if len(text) == 3 and text.isascii() and text.isdigit() else 0


_LONGEST_ADDRESS: Final = 80
"""Longer text is not an address, and is not cached."""


def read_address(text: str) -> Address | None:
    """The address from `ip:port`; None for anything else."""
    return _read_address(text) if len(text) <= _LONGEST_ADDRESS else None


@functools.lru_cache(maxsize=4096)
def _read_address(text: str) -> Address | None:
    """Cached, since a fleet's addresses come again with every request."""
    try:
        return Address.parse(text)
    except ValueError:
        return None


def read_addresses(entries: Iterable[str]) -> frozenset[Address]:
    """Every well-formed address in the entries. Each entry may be a comma list."""
    found = (read_address(part.strip()) for entry in entries for part in entry.split(","))
    return frozenset(address for address in found if address is not None)


def read_prescribed(text: str, endpoints: Sequence[Endpoint]) -> tuple[Address, ...]:
    """The list of addresses that a test prescribes, in its order. An address without a port means every
    endpoint on that host.
    """
    chosen: list[Address] = []
    for part in (p.strip() for p in text.split(",")):
        address = read_address(part)
        host = part.strip("[]")
        chosen += [address] if address else [e.address for e in endpoints if e.address.host == host]
    return tuple(dict.fromkeys(chosen))


_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def refusal(error: PickError, head: RequestHead) -> Refuse:
    """The error in the format of the request's API: Anthropic's under /v1/messages, else OpenAI's."""
    body: dict[str, object]
    told: dict[str, object]
    if is_messages(head.path):
        told = {"type": _ANTHROPIC_TYPES.get(error.status, "api_error"), "message": str(error)}
        body = {"type": "error", "error": told, "request_id": head.request_id}
    else:
        told = {"message": str(error), "type": error.error_type, "param": None, "code": error.reason}
        body = {"error": told}
    headers = [("content-type", "application/json")]
    if isinstance(error, SaturatedError):
        headers.append(("retry-after", str(error.retry_after_s)))
    if isinstance(error, FlowRefusedError):
        headers.append((DROPPED, error.reason))
    return Refuse(
        status=error.status, headers=tuple(headers), body=msgspec.json.encode(body), reason=error.reason
    )


def is_messages(path: str) -> bool:
    """Anthropic's API, and paths below it, such as `/v1/messages/count_tokens`."""
    plain = path.partition("?")[0] + "/"
    return "/v1/messages/" in plain
