"""The events of the picker, as one stream of typed values for all listeners.

The picker calls each listener with each event at once, in order. Metrics, the record of decisions, other
pickers (`sharing`) and exact mode (`kvevents`) are listeners. The picker knows none of them. A listener is on
the path of a request: it notes what it needs and returns. It must not keep `Began.question`, which holds the
whole prompt, without a bound.

Most events are about a `Pick`: one routed request. Only `commit` makes a `Pick`. `protocol` reads the
destinations of a pick, enters the phases of the answer's body, and passes the pick again at each later event
of the HTTP request.

A request has one `Phase`, from its first message to its end. Until the request goes to a server, its stream
(`protocol.stream`) keeps the phase. From then on the `Pick` keeps the phase: the stream reads it there, and
`commit` and the stream change it there. Replay, the simulator and tests begin with the pick, so their
requests begin with `SENT`. An answer may begin before the request's body has ended. It may even begin before
the request is picked, if the data plane itself answers. From then on the rest of the request goes on
unchanged.
"""

import enum
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final, Literal

from msgspec import Struct

from epp.base.errors import PickError
from epp.base.types import Address, ChunkHash
from epp.picker.decision import Decision, Question
from epp.picker.endpoints.backlog import Booking
from epp.picker.endpoints.endpoint_state import EndpointState, Wait
from epp.picker.prefix_index.table import Mirror, PrefixTable, Run
from epp.picker.scheduling.snapshot import SentPick
from epp.picker.server_caches import Prompt


class Phase(enum.Enum):
    START = enum.auto()
    """No request headers have come yet."""
    BODY = enum.auto()
    """The headers are answered. The pick waits for the body, which comes in one message."""
    HOLDING = enum.auto()
    """The headers are not answered. The pick waits for the pieces of the body."""
    WAITING = enum.auto()
    """The body has come, and flow control holds the request. Nothing is answered until flow
    control decides.
    """
    PASSED = enum.auto()
    """The request came without its headers, so it will never be picked. The rest of the request goes on
    unchanged.
    """
    REFUSED = enum.auto()
    """The picker has answered the client itself. Nothing more is answered."""
    SENT = enum.auto()
    """The pick is made, and its server has not answered yet. The rest of the request goes on unchanged."""
    ANSWERED = enum.auto()
    """The headers of the answer came, with a pick or without."""
    READING = enum.auto()
    """Part of the answer's body came, and the answer is sampled."""
    DONE = enum.auto()
    """The answer has ended."""
    ENDED = enum.auto()
    """The request is over, and nothing is held or booked for it any more. The same is true in the next three
    phases.
    """
    ABORTED = enum.auto()
    """The request went to a server, and it ended before its answer did."""
    FAILED = enum.auto()
    """The request went to a server, which failed."""
    DETACHED = enum.auto()
    """The stream was let go on purpose while the server goes on answering."""

    # The hash is by identity, in C. The hash of Enum is a Python function, which would be called for each
    # lookup.
    __hash__ = object.__hash__


BEGUN: Final = frozenset({Phase.ANSWERED, Phase.READING, Phase.DONE})
"""The phases in which the client's answer has begun, and the request is not over."""

OVER: Final = frozenset({Phase.ENDED, Phase.ABORTED, Phase.FAILED, Phase.DETACHED})
"""The phases in which nothing is held or booked for the request any more."""

_DECISION: Final = frozenset({Phase.SENT, Phase.REFUSED})
_WITHOUT_A_PICK: Final = frozenset({Phase.ANSWERED, Phase.ENDED})

FOLLOWS: Final[Mapping[Phase, AbstractSet[Phase]]] = {
    Phase.START: {Phase.BODY, Phase.HOLDING, Phase.PASSED, *_DECISION, *_WITHOUT_A_PICK},
    Phase.BODY: {Phase.WAITING, *_DECISION, *_WITHOUT_A_PICK},
    Phase.HOLDING: {Phase.WAITING, *_DECISION, *_WITHOUT_A_PICK},
    Phase.WAITING: {*_DECISION, *_WITHOUT_A_PICK},
    Phase.PASSED: _WITHOUT_A_PICK,
    Phase.REFUSED: {Phase.ENDED},
    Phase.SENT: {Phase.ANSWERED, *OVER},
    Phase.ANSWERED: {Phase.READING, Phase.DONE, *OVER},
    Phase.READING: {Phase.DONE, *OVER},
    Phase.DONE: OVER,
    **dict.fromkeys(OVER, frozenset()),
}
"""The phases that may follow each phase."""


class GuessedEntries(Struct, frozen=True, eq=False, gc=False):
    """The entries of one guess: the deepest run and its ancestors."""

    mirror: Mirror
    counts: dict[Run, int]
    """The mirror's `guessed` at that time. If the mirror has another one now, this guess is void."""
    leaf: Run


class Guess(Struct, eq=False, gc=False):
    """What the picker assumes since a request was sent: the server will hold its prompt and its adapter. See
    `guesses`.
    """

    state: EndpointState
    process: int
    """The process of the server that got the request. A restarted server holds nothing of the prompt."""
    chain: list[ChunkHash]
    """Empty: nothing is written."""
    booking: Booking
    adapter: str
    table: PrefixTable
    entries: GuessedEntries | None
    open: bool = True
    """Whether it is not known yet what became of the request."""
    proven: bool = False
    """Whether the server has computed the prompt, as far as its answer or its counters show."""


class PrefillJob(Struct, eq=False, gc=False):
    """The work of a prefill endpoint for one request."""

    state: EndpointState
    prompt: Prompt
    guess: Guess
    over: bool = False


class Pick(Struct, eq=False, gc=False):
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
    streams: bool
    prompt: Prompt
    guess: Guess
    sent: SentPick
    """What the rules remember of the request."""
    asks: bool
    """Whether the request has a body. A good answer to a request without one, such as `GET /health`, does not
    show that the server computes."""
    wait: Wait
    """The wait for its first byte."""
    path_hash: int = 0
    """See `Question.path_hash`."""
    body_hash: int = 0
    """A keyed hash of the body, by which `picker.remembered` knows the request. 0: it has none."""
    prefill: PrefillJob | None = None
    """The work of a prefill server for this request. None: the chosen server computes the prompt."""
    computed: bool = False
    """Whether the request is over and its server answered it well."""
    failed: bool = False
    """Whether the server is at fault, as far as the answer shows. An error counts against the server that
    computed the prompt."""
    no_token: bool = False
    """Whether its answer counts as one without a token. See `Answers.no_token`."""

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


class PickerEvent(Struct, frozen=True, eq=False, gc=False):
    """Something that happened in the picker. The other options hold for the subclasses too."""


class TimedEvent(PickerEvent, frozen=True):
    at: float


class OfRequest(TimedEvent, frozen=True):
    pick: Pick


class OfServer(TimedEvent, frozen=True):
    server: EndpointState


class Began(OfRequest, frozen=True):
    """A request was sent to a server."""

    question: Question

    def picked_in_s(self, *, timer_s: float) -> float:
        """Return how long the picker took, by the streams' timer, without the time in a queue. 0: this was
        not measured.
        """
        if self.question.began_s is None:
            return 0.0
        return max(0.0, timer_s - self.question.began_s - self.pick.decision.waited_s)


class Moved(OfRequest, frozen=True):
    """Another server than the first choice took the request. `pick` already names this server. An
    `Answered` follows.
    """


class Proved(TimedEvent, frozen=True):
    """The server has computed the prompt of a request, as far as its answer or its counters show. The request
    may be over.
    """

    work: Pick | PrefillJob
    held: int | None
    """Number of leading chunks of the prompt that were proven before. None: the table records nothing."""


class Answered(OfRequest, frozen=True):
    """The headers of the answer came. The decision has the status."""

    mismatch: bool
    """Whether another server than the first choice answered."""


class Ended(OfRequest, frozen=True):
    """The request is over, or was let go on purpose. The decision's `outcome` says which."""


class PrefillBegan(TimedEvent, frozen=True):
    """Another server has to compute the prompt of a request. The request's `Began` came just before."""

    prefill: PrefillJob


class PrefillEnded(TimedEvent, frozen=True):
    """That server has computed the prompt, or will not, or its end will not be known."""

    prefill: PrefillJob
    outcome: Literal["computed", "lost", "detached"]
    failed: bool = False
    """Whether the prefill server is at fault, as far as the answer shows."""


class Restarted(OfServer, frozen=True):
    """A server's counters went back, so another process with a cold cache serves under its name."""


class Hangs(OfServer, frozen=True):
    """Requests of this picker are open at a server, and nothing moves there. See `Answers.look`."""


class Cut(OfServer, frozen=True):
    """A server cut an answer midway, as the data plane's access log says."""


class Fatal(TimedEvent, frozen=True):
    """A request ended servers, or may have. See `picker.remembered`."""

    body_hash: int
    strikes: int


class MadeState(OfServer, frozen=True):
    """A server has made something that later requests may name. See `picker.remembered`."""

    id_hash: int


class Refused(PickerEvent, frozen=True):
    """A stream has answered a request itself, with an error."""

    request_id: str
    error: PickError


class ProtocolFault(PickerEvent, frozen=True):
    """The data plane sent something that a stream could not understand."""

    reason: str


OnEvent = Callable[[PickerEvent], None]
