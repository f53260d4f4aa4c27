"""The types of a question to the picker and of the record of its pick.

The caller passes a `Question` and gets a `Pick` (`picker.events`). The `Decision` is the record that
people see.
"""

from collections.abc import Iterable
from typing import Final, Literal

from msgspec import Struct

from epp.base.types import Address, EndpointName, InferenceRequest
from epp.config.dialects import MOST_DESTINATIONS

SHOWN_CHARS: Final = 256
"""Longest part of a model's name that a decision keeps: clients choose it, and decisions stay in memory."""


class Question(Struct, frozen=True, gc=False):
    """One HTTP request that needs an endpoint."""

    request_id: str
    inference: InferenceRequest
    body_bytes: int = 0
    subset: frozenset[Address] | None = None
    """Addresses that the data plane allows. None: all."""
    session: str = ""
    prescribed: tuple[Address, ...] | None = None
    """In conformance runs only: the addresses that the test names, in order. None: it names none."""
    asked_model: str = ""
    """The name that the client sent, if a rewrite replaced it. Empty: no rewrite."""
    max_destinations: int = MOST_DESTINATIONS
    """Most destinations that the caller can read. The policy may allow fewer."""
    asks_only: bool = False
    """The caller takes the destination, and changes no other header of the request."""
    overload: bool = False
    """The picker has too much to do, so it chooses by load alone, at the least cost."""
    trace: str = ""
    """The caller's trace context as it came, if tracing is on."""
    began_s: float | None = None
    """When the picker began to read the request, by the streams' timer. None: this was not measured."""
    path_hash: int = 0
    """A hash of the path without its query, to tell whether two requests ask for the same path."""
    names_state: str = ""
    """The id of something that one server keeps. See `picker.remembered`."""
    makes_state: bool = False
    """Whether the answer may have the id of something that its server keeps."""
    body_hash: int = 0
    """A keyed hash of the body, by which `picker.remembered` knows the request. 0: it has none."""


class Candidate(Struct, frozen=True):
    """One endpoint as the rule saw it."""

    name: EndpointName
    address: Address
    matched_tokens: int
    uncached_tokens: int
    backlog_tokens: int
    in_flight: int
    waiting: int | None
    """None: there are no fresh metrics. The same holds for `kv_usage`."""
    kv_usage: float | None
    prefill_tokens_per_s: float
    score_s: float
    """Predicted cost in seconds. The least cost wins. 0: the rule gives no scores."""
    parts_s: dict[str, float]
    """The parts that add up to the score: backlog, prefill, stall (what others lose), lora, failing."""
    excluded: str = ""
    """Why it was not considered: failing answers (failing), or a load threshold (waiting, kv_usage,
    undone). Empty: it was considered."""


class WouldPick(Struct, frozen=True):
    """The pick of the policy in dry run."""

    policy: str
    rule: str
    chosen: EndpointName
    """Empty: the policy would have refused the request."""
    reason: str
    agrees: bool
    """Whether this is also the endpoint that was picked."""
    more_cached_tokens: int = 0
    """Tokens of this prompt cached at `chosen`, minus those cached at the picked endpoint."""
    more_s: float = 0.0
    """Time to the first token at `chosen`, minus the time at the picked endpoint. Negative: sooner."""


class Prefill(Struct, frozen=True):
    """The server that computes the prompt for the answering server, and the reason (P/D)."""

    name: EndpointName
    address: str
    matched_tokens: int
    """Tokens of the prompt in the cache of this server."""
    uncached_tokens: int
    """Tokens of the prompt that this server has to compute."""
    transfer_s: float
    """Predicted time until the answering server has the tokens that it lacks."""
    predicted_s: float
    """Predicted time from the pick until the answering server has the whole prompt."""
    cost_s: float
    """Predicted cost in seconds by the least-cost rule, with the transfer. The picker compared this cost with
    `instead_of_s`.
    """
    instead_of_s: float
    """Predicted cost of computing the prompt on the answering server."""


class Decision(Struct, gc=False, kw_only=True):
    """The reasons why a request went to its server. More fields are filled in as the answer comes."""

    request_id: str
    at_unix_s: float
    kind: str
    model: str
    adapter: str
    rule: str
    policy: str
    prompt_tokens: int
    prompt_chunks: int
    matched_tokens: int = 0
    reason: str
    """A short label: prefix, load, lora, hash, session, turn, chance, prescribed, saturated, overload (of the
    picker), deadline (the rule's own choice would miss it), state (the server that keeps what the request
    names), no_state (that server is not known), trial (for an ejected server)."""
    chosen: EndpointName
    destinations: tuple[Address, ...]
    candidates: Iterable[Candidate] = ()
    """The chosen endpoint first, then the others by score, then the excluded ones. Ten at most. The
    code may make them only when somebody reads them.
    """
    predicted_s: float = 0.0
    """Predicted time from the pick until the chosen server has computed the prompt. 0 if no candidate was
    scored.
    """
    served: Address | None = None
    served_by: EndpointName = EndpointName("")
    """The endpoint at `served`, once the answer has begun. If no endpoint has this address: the address."""
    headers_s: float | None = None
    """Time from the pick to the headers of the answer."""
    status: int | None = None
    """The status of the answer, or the code of the error that its body tells, if the picker has read it."""
    outcome: str = ""
    """ended, aborted, failed or detached (its stream was let go on purpose before the answer ended). Empty
    until then."""
    ttft_s: float | None = None
    cached_tokens: int | None = None
    """Cached tokens of the prompt as the server itself reported, if the answer was sampled."""
    output_tokens: int | None = None
    """Length of the answer as the server reported, if the answer was sampled."""
    unread: str = ""
    """Why the body was not read, so that the request was routed by load: costly_body, encoded_body,
    partial_body, body_not_seen, not_understood, no_room, overload."""
    asked_model: str = ""
    """The name that the client sent, if a rewrite replaced it. Empty: no rewrite."""
    waited_s: float = 0.0
    """How long flow control held the request."""
    priority: int = 0
    """The priority that flow control used. 0 if flow control is off."""
    tenant: str = ""
    """The tenant that a header names. Empty: flow control is off and no requests are recorded, or no tenant
    was named.
    """
    trace_id: str = ""
    """The trace of the pick's span. Empty: tracing is off, or the request is not sampled."""
    dry_run: WouldPick | None = None
    """The pick of the policy in dry run, if there is one."""
    prefill: Prefill | None = None
    """The prefill endpoint of this request. None: the chosen endpoint computes the prompt itself."""


Outcome = Literal["ended", "aborted", "failed"]
"""How an HTTP request ended: with its answer, before its end, or by a fault of its server."""
