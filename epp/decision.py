"""The types of a question to the picker, of its answer, and of the record of the pick.

The caller passes a `PickRequest` and gets a `Pick`. It passes the `Pick` again at each later event of the
same HTTP request. The `Phase` of a pick says how far the request is. The `Decision` is the record that people
see. The edges report events through an `Observer`, which counts them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Literal, NamedTuple, Protocol

from msgspec import Struct

from epp.config.dialects import MOST_DESTINATIONS
from epp.errors import PickError
from epp.types import Address, EndpointName, InferenceRequest


class PickRequest(Struct, frozen=True, gc=False):
    """One HTTP request that needs an endpoint."""

    request_id: str
    inference: InferenceRequest
    body_bytes: int = 0
    subset: frozenset[Address] | None = None
    """Addresses that the data plane allows; None: all."""
    session: str = ""
    prescribed: tuple[Address, ...] = ()
    """Conformance runs only: addresses that the test names, in order."""
    asked_model: str = ""
    """The name that the client sent, where a rewrite put another one in its place; empty: none did."""
    max_destinations: int = MOST_DESTINATIONS
    """The most that whoever asks can read; the policy may allow fewer."""
    hurried: bool = False
    """The picker has too much to do: choose by load alone, at the least cost."""
    trace: str = ""
    """The caller's trace context as it came, where tracing is on."""
    began_s: float | None = None
    """When the picker began to read the request, by the streams' timer; None: nobody measures."""


class Queued(NamedTuple):
    """What flow control says of a request that goes to a server."""

    waited_s: float
    priority: int
    tenant: str
    would: str
    """What the flow control of a policy in dry run would have done; empty: there is none."""


DIRECT: Final = Queued(0.0, 0, "", "")
"""No flow control."""


class Candidate(Struct, frozen=True):
    """One endpoint as the rule saw it."""

    name: EndpointName
    address: Address
    matched_tokens: int
    uncached_tokens: int
    backlog_tokens: int
    in_flight: int
    waiting: int | None
    """None: the metrics are stale, or there are none; so for `kv_usage`."""
    kv_usage: float | None
    prefill_tokens_per_s: float
    score_s: float
    """Predicted cost in seconds, the least wins; 0 where the rule does not score."""
    parts_s: dict[str, float]
    """What the score is the sum of: backlog, prefill, stall, in_flight, lora, failing."""
    excluded: str = ""
    """What it was left out for: failing answers (failing), or a load threshold (waiting, kv_usage, undone);
    empty: considered."""


class WouldPick(Struct, frozen=True):
    """What a policy in dry run would have picked."""

    policy: str
    rule: str
    chosen: EndpointName
    """Empty: it would have refused the request."""
    reason: str
    agrees: bool
    """It would have picked the endpoint that was picked."""
    more_cached_tokens: int = 0
    """Of this prompt that are cached there, beyond those that are cached where it went."""
    more_s: float = 0.0
    """Until the first token there, beyond where it went; negative: sooner."""
    flow: str = ""
    """What its flow control would have done:
    `go`, `wait`, `demote`, or the reason of a refusal such as `flow_deadline`. Empty: it has none."""


class Prefill(Struct, frozen=True):
    """Which server computes the prompt for the one that answers, and why (P/D)."""

    name: EndpointName
    address: str
    matched_tokens: int
    """Of the prompt, in its cache."""
    uncached_tokens: int
    """That it has to compute."""
    transfer_s: float
    """Predicted time until the other one has what it lacks."""
    predicted_s: float
    """Predicted time from the pick until the answering server has the whole prompt."""
    cost_s: float
    """What was compared: predicted cost in seconds by the least-cost rule, the transfer included."""
    instead_of_s: float
    """What it would have cost to compute the prompt where it is answered."""


class Decision(Struct, gc=False):
    """Why a request went where it went. Filled in as its answer comes."""

    request_id: str
    at_unix_s: float
    kind: str
    model: str
    adapter: str
    rule: str
    policy: str
    prompt_tokens: int
    prompt_chunks: int
    matched_tokens: int
    reason: str
    """A short label: prefix, load, lora, session, turn, chance, prescribed, saturated,
    trial (of a server that was left out)."""
    chosen: EndpointName
    destinations: tuple[Address, ...]
    candidates: Sequence[Candidate]
    """The chosen one first, then by score, the left-out last; at most ten.
    May be made when they are looked at."""
    predicted_s: float = 0.0
    """Predicted time from the pick until the chosen server has computed the prompt;
    0 where nobody was scored."""
    served: Address | None = None
    served_by: EndpointName = EndpointName("")
    """The endpoint at `served`, once the answer has begun; its address where no endpoint has it."""
    headers_s: float | None = None
    """Time from the pick to the headers of the answer."""
    status: int | None = None
    outcome: str = ""
    """ended, aborted, failed or detached (its stream ended on purpose before its answer did),
    once it is over."""
    ttft_s: float | None = None
    cached_tokens: int | None = None
    """What the server itself said, where the answer was sampled."""
    output_tokens: int | None = None
    """Length of the answer by the server's own account, where it was sampled."""
    unread: str = ""
    """Why the body was not read, so that the request went by load: costly_body, encoded_body, partial_body,
    body_not_seen, no_room."""
    asked_model: str = ""
    """The name that the client sent, where a rewrite put `model` in its place."""
    waited_s: float = 0.0
    """How long flow control held it."""
    priority: int = 0
    """What flow control took its priority to be; 0 where it is off."""
    tenant: str = ""
    """Whose request it is, by a header;
    empty where flow control is off and nobody records, or where none was named."""
    trace_id: str = ""
    """Of the trace that the pick's span belongs to; empty: tracing is off, or the request is not sampled."""
    dry_run: WouldPick | None = None
    """Of the policy that is tried beside, if there is one."""
    prefill: Prefill | None = None
    """The prefill endpoint beside the chosen one; None: the chosen one computes the prompt itself."""


Outcome = Literal["ended", "aborted", "failed"]
"""How an HTTP request ended: with its answer, before it, or by a fault of its server."""


class Phase(enum.StrEnum):
    """Where one routed request stands."""

    SENT = "sent"
    """To a server, which has not answered yet."""
    ANSWERED = "answered"
    """The headers of a good answer came: the server computed the prompt."""
    DECLINED = "declined"
    """The headers of an error came (status 400 or more): the server did not compute the prompt."""
    ENDED = "ended"
    ABORTED = "aborted"
    FAILED = "failed"
    DETACHED = "detached"
    """The stream was let go on purpose while the answer runs on."""

    # As the string that it is, in C: the enum's own is a Python call for each lookup in `FOLLOWS`.
    __hash__ = str.__hash__


OVER: Final = frozenset({Phase.ENDED, Phase.ABORTED, Phase.FAILED, Phase.DETACHED})
"""Nothing is booked for the request any more."""

FOLLOWS: Final[Mapping[Phase, AbstractSet[Phase]]] = {
    Phase.SENT: {Phase.ANSWERED, Phase.DECLINED, *OVER},
    Phase.ANSWERED: OVER,
    Phase.DECLINED: OVER,
    **dict.fromkeys(OVER, frozenset()),
}
"""The phases that may follow each phase."""


class Pick(Struct, eq=False, gc=False):
    """One routed request as its stream sees it: where to send it, and its phase."""

    decision: Decision
    destinations: tuple[Address, ...]
    """Ordered fallback list, best first, never empty."""
    sampled: bool
    """Ask Envoy for the body of the answer."""
    phase: Phase = Phase.SENT
    set_headers: tuple[tuple[str, str], ...] = ()
    """For the chosen server, on the request: which other server computes the prompt."""

    def enter(self, phase: Phase) -> None:
        """The next phase. An assertion fails if it may not follow this one."""
        assert phase in FOLLOWS[self.phase], f"{phase} does not follow {self.phase}"
        self.phase = phase

    @property
    def over(self) -> bool:
        return self.phase in OVER

    @property
    def explanation(self) -> str:
        """The decision in one line of printable ASCII, for a response header."""
        d = self.decision
        scores = " ".join(f"{c.name}={c.score_s * 1000:.1f}ms/{c.matched_tokens}" for c in d.candidates[:4])
        unread = f" unread={d.unread}" if d.unread else ""
        text = f"rule={d.rule} reason={d.reason}{unread} chosen={d.chosen} matched={d.matched_tokens}/{d.prompt_tokens} {scores}"
        return text.encode("ascii", "replace").decode().replace("\n", " ").replace("\r", " ").strip()


class Observer(Protocol):
    """Told by the streams what the picker cannot know: times, refusals, faults of the data plane.
    Never waits.

    That a request was picked, and what happens to it then, comes as events of the picker (`picker_events`).
    """

    def parsed(self, *, seconds: float, size_bytes: int) -> None: ...

    def refused(self, request_id: str, error: PickError, *, trace: str = "") -> None:
        """trace: the caller's trace context as it came, where tracing is on."""

    def protocol_error(self, reason: str) -> None:
        """The data plane sent something that the stream could not make sense of."""
