"""The events of the picker, as one stream of typed values for all listeners.

The picker calls each listener with each event at once, in order. Metrics, the record of decisions, other
pickers (`sharing`) and exact mode (`kvevents`) are listeners. The picker knows none of them. A listener is on
the path of a request: it notes what it needs and returns. It must not keep `Began.asked`, which holds the
whole prompt, without a bound.

Most events are about a `Pick`: one routed request, whose `Phase` says how far it is. Only `commit` makes and
changes a `Pick`. `extproc` reads the destinations of a pick, and passes the pick again at each later event of
the HTTP request.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final, Literal

from epp.decision import Decision, PickRequest
from epp.endpoints.answers import Wait
from epp.endpoints.state import Booking, EndpointState
from epp.errors import PickError
from epp.prefix_index.table import PrefixTable, Recorded
from epp.server_caches import Prompt
from epp.types import Address, ChunkHash, Entry, Facts, InferenceRequest


class Phase(enum.StrEnum):
    """The phase of a routed request."""

    SENT = "sent"
    """The request was sent to a server, which has not answered yet."""
    ANSWERED = "answered"
    """The headers of a good answer came, so the server computed the prompt."""
    DECLINED = "declined"
    """The headers of an error came (status 400 or more), so the server did not compute the prompt."""
    ENDED = "ended"
    ABORTED = "aborted"
    FAILED = "failed"
    DETACHED = "detached"
    """The stream was let go on purpose while the answer continues."""

    # The hash of a string is computed in C. The enum's own hash is a Python call for each lookup in
    # `FOLLOWS`.
    __hash__ = str.__hash__


OVER: Final = frozenset({Phase.ENDED, Phase.ABORTED, Phase.FAILED, Phase.DETACHED})
"""Phases in which nothing is booked for the request any more."""

FOLLOWS: Final[Mapping[Phase, AbstractSet[Phase]]] = {
    Phase.SENT: {Phase.ANSWERED, Phase.DECLINED, *OVER},
    Phase.ANSWERED: OVER,
    Phase.DECLINED: OVER,
    **dict.fromkeys(OVER, frozenset()),
}
"""The phases that may follow each phase."""


class PrefillJob(Entry):
    """The work of a prefill endpoint for one request."""

    state: EndpointState
    process: int
    booking: Booking
    recorded: Recorded | None
    table: PrefixTable
    over: bool = False


class Pick(Entry):
    """One routed request, with everything that may have to be undone or moved, or that the picker learns from
    later.
    """

    decision: Decision
    destinations: tuple[Address, ...]
    """The destinations to try in order, best first. Never empty."""
    sampled: bool
    """Whether to ask Envoy for the body of the answer."""
    phase: Phase
    set_headers: tuple[tuple[str, str], ...]
    """Headers to set on the request for the chosen server. They name the server that computes the prompt."""
    state: EndpointState
    booking: Booking
    streams: bool
    conversation: InferenceRequest | None
    """The request with only the end of its prompt, for learning from a sampled answer. Thousands of requests
    may be kept.
    """
    prompt: Prompt
    recorded: Recorded | None
    table: PrefixTable
    process: int
    """The process of the server that got the request. A restarted server holds nothing of the prompt."""
    wait: Wait
    """The wait for its first byte."""
    path_hash: int = 0
    """See `PickRequest.path_hash`."""
    prefill: PrefillJob | None = None
    """The work of a prefill server for this request. None: the chosen server computes the prompt."""
    prefix_lost: bool = False
    """Whether the table has forgotten this prompt, because the server did not compute it."""

    def enter(self, phase: Phase) -> None:
        """Enter the next phase. An assertion fails if this phase may not follow the current one."""
        assert phase in FOLLOWS[self.phase], f"{phase} does not follow {self.phase}"
        self.phase = phase

    @property
    def over(self) -> bool:
        return self.phase in OVER

    @property
    def explanation(self) -> str:
        """The decision in one line of printable ASCII, for a response header."""
        d = self.decision
        scores = " ".join(
            f"{c.name}={c.score_s * 1000:.1f}ms/{c.matched_tokens}" for c in islice(d.candidates, 4)
        )
        unread = f" unread={d.unread}" if d.unread else ""
        text = f"rule={d.rule} reason={d.reason}{unread} chosen={d.chosen} matched={d.matched_tokens}/{d.prompt_tokens} {scores}"
        return text.encode("ascii", "replace").decode().replace("\n", " ").replace("\r", " ").strip()

    @property
    def chain(self) -> list[ChunkHash]:
        return self.prompt.chain

    @property
    def asks(self) -> bool:
        """Whether the request has a body. A good answer to a request without one, such as `GET /health`, does
        not show that the server computes.
        """
        decision = self.decision
        return bool(decision.model) or self.prompt.size.text_bytes > 0 or bool(decision.unread)

    @property
    def computed(self) -> bool:
        """Whether the request is over and its server answered it well."""
        status = self.decision.status
        return self.phase is Phase.ENDED and status is not None and status < 400 and self.asks

    @property
    def failed(self) -> bool:
        """Whether the server is at fault, as far as the answer shows. An error counts against the server that
        computed the prompt.
        """
        status = self.decision.status
        if self.phase is Phase.FAILED:
            return True
        return self.prefill is None and status is not None and is_fault(status)


def is_fault(status: int) -> bool:
    """Return whether an answer of this status shows a sick server. Other errors are the client's. vLLM
    answers 501 if the model does not have the API that the client asks for.
    """
    return (status >= 500 and status != 501) or status == 429


class Began(Facts, frozen=True):
    """A request was sent to a server."""

    at: float
    request: Pick
    asked: PickRequest

    def picked_in_s(self, *, timer_s: float) -> float:
        """Return how long the picker took, by the streams' timer, without the time in a queue. 0: this was
        not measured.
        """
        if self.asked.began_s is None:
            return 0.0
        return max(0.0, timer_s - self.asked.began_s - self.request.decision.waited_s)


class Moved(Facts, frozen=True):
    """Another server than the first choice took the request. `request` already names this server. An
    `Answered` follows.
    """

    at: float
    request: Pick


class Answered(Facts, frozen=True):
    """The headers of the answer came. The decision has the status."""

    at: float
    request: Pick
    mismatch: bool
    """Whether another server than the first choice answered."""


class Grew(Facts, frozen=True):
    """A server holds a chain that no request asked for: a prompt with its answer."""

    at: float
    server: EndpointState
    chain: Sequence[ChunkHash]


class Ended(Facts, frozen=True):
    """The request is over, or was let go on purpose. The decision's `outcome` says which."""

    at: float
    request: Pick


class PrefillBegan(Facts, frozen=True):
    """Another server has to compute the prompt of a request. The request's `Began` came just before."""

    at: float
    prefill: PrefillJob
    chain: Sequence[ChunkHash]
    adapter: str


class PrefillEnded(Facts, frozen=True):
    """That server has computed the prompt, or will not, or its end will not be known."""

    at: float
    prefill: PrefillJob
    outcome: Literal["computed", "lost", "detached"]
    failed: bool = False
    """Whether the prefill server is at fault, as far as the answer shows."""


class Restarted(Facts, frozen=True):
    """A server's counters went back, so another process with a cold cache serves under its name."""

    at: float
    server: EndpointState


class Hangs(Facts, frozen=True):
    """Requests wait for their first byte at a server while other servers answer. See `endpoints.answers`."""

    at: float
    server: EndpointState


class Cut(Facts, frozen=True):
    """A server cut an answer midway, as the data plane's access log says."""

    at: float
    server: EndpointState


class Parsed(Facts, frozen=True):
    """A stream has read the body of a request."""

    seconds: float
    size_bytes: int


class Refused(Facts, frozen=True):
    """A stream has answered a request itself, with an error."""

    request_id: str
    error: PickError
    trace: str = ""
    """The caller's trace context as it came, if tracing is on."""


class ProtocolFault(Facts, frozen=True):
    """The data plane sent something that a stream could not understand."""

    reason: str


StreamEvent = Parsed | Refused | ProtocolFault
"""The events that streams report through the picker, since the picker cannot know of them."""

PickerEvent = (
    Began
    | Moved
    | Answered
    | Grew
    | Ended
    | PrefillBegan
    | PrefillEnded
    | Restarted
    | Hangs
    | Cut
    | StreamEvent
)

Listener = Callable[[PickerEvent], None]


class Listeners:
    """The listeners, in the order in which they subscribed."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> None:
        self._all = (*self._all, listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling this listener. It may be removed already. This is allowed while an event is sent."""
        self._all = tuple(each for each in self._all if each != listener)

    def send(self, event: PickerEvent) -> None:
        for listener in self._all:
            listener(event)
