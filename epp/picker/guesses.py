"""Decides what becomes of the picker's guesses: when a request is sent, its server is assumed to hold the
prompt and the adapter from then on.

A guess matches for other requests at once. It changes nothing else that is believed or learned, until the
server has computed the prompt. A server shows this in one of three ways: by the headers of a good answer,
unless these come before the prefill, as they do in an answer that is streamed; by its counters, if a page
shows that the booking is computed; by the good end of its answer, unless that came so soon that only the next
page can tell (`doubt`). Then the prompt becomes the newest use of the server's cache, and the request counts.
If the server refuses the request, or if it ends earlier, the guess is dropped. Then everything is as if the
request had never come. Nothing is assumed of a prompt that is certainly too long for its server. What does
not fit into `GUESSED_SHARE` of the server's cache is not written, so the newest guess is the first to go.

Each guess is settled once. Requests of other pickers have guesses too (`sharing.listener`), which are settled
as these pickers report. Synchronous; the picker owns the object.
"""

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Final

from epp.base.types import ChunkHash, EndpointMetrics, EndpointName
from epp.picker.endpoints.backlog import Booking
from epp.picker.endpoints.endpoint_state import LONGEST_PREFILL_S, PAGE_AGE_S, EndpointState
from epp.picker.events import Guess, GuessedEntries, OnEvent, Phase, Pick, PickerEvent, PrefillJob, Proved
from epp.picker.prefix_index.table import Mirror, PrefixTable, Run, chunks_in, end_bytes
from epp.picker.prefix_index.upkeep import disown
from epp.picker.scheduling.schedule import Rule
from epp.picker.server_caches import Prompt, ServerCaches

_CERTAINLY: Final = 1.5
"""A prompt is certainly too long if the estimate of its tokens is more than this many times what the server
can take."""
GUESSED_SHARE: Final = 0.5
"""Largest part of a server's capacity, and of the table's entries, that guesses may take."""
_MOST_DOUBTED: Final = 64
"""The most answers of one server that wait for its next page."""


class Listeners:
    """Sends each event to all listeners, in the order in which they subscribed. They may subscribe and
    unsubscribe meanwhile.
    """

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: tuple[OnEvent, ...] = ()

    def subscribe(self, listener: OnEvent) -> None:
        """Call `listener` with every later event, in order, before any other work is done."""
        self._all = (*self._all, listener)

    def unsubscribe(self, listener: OnEvent) -> None:
        """Stop calling `listener`. It may be unsubscribed already."""
        self._all = tuple(each for each in self._all if each != listener)

    def send(self, event: PickerEvent) -> None:
        for listener in self._all:
            listener(event)


class Guesses:
    def __init__(self, caches: ServerCaches, send: OnEvent) -> None:
        """send: sends an event to all listeners."""
        self._caches = caches
        self._send = send
        self.rules: Sequence[Rule] = ()
        """The rules that choose: the policy's, and that of the policy in dry run."""
        self._awaited: dict[Booking, Pick | PrefillJob] = {}
        """This picker's own requests whose guesses are open."""
        self._doubted: dict[EndpointState, deque[tuple[float, float, Pick]]] = {}
        """Requests whose answers may have had no token, with the times of their ends and the prompt tokens
        that their server had counted then."""

    # -- guesses of any picker -------------------------------------------------------------------------------

    def guess(self, state: EndpointState, chain: list[ChunkHash], *, booking: Booking, adapter: str) -> Guess:
        """Assume that the server will hold the chain and the adapter, since a request was sent there."""
        table, name = self._caches.table, state.endpoint.name
        if state.gone:
            chain = []
        if adapter:
            booking.loads = state.expect_adapter(adapter)
        entries = guess_chain(table, name, chain) if chain else None
        return Guess(state, state.process, chain, booking, adapter, table, entries)

    def holds(self, guess: Guess) -> bool:
        """Return whether the table still has chunks of this guess for the same server.

        The server may have been removed, another server may have its name, or prompts may be cut differently
        now.
        """
        state = guess.state
        same_server = not state.gone and state.process == guess.process
        return same_server and guess.table is self._caches.table and bool(guess.chain)

    def prove(self, guess: Guess, *, now: float) -> int | None:
        """Take in that the server has computed the prompt. Return the same as `PrefixTable.record`."""
        if not guess.open:
            return None
        guess.open, guess.proven = False, True
        if guess.adapter and guess.state.process == guess.process:
            guess.state.settle_adapter(guess.adapter)
            slots = self._caches.spec.lora.slots_per_endpoint
            guess.booking.loads |= guess.state.use_adapter(guess.adapter, most=slots, now=now)
        name, holds = guess.state.endpoint.name, self.holds(guess)
        held = guess.table.record(name, guess.chain, now=now) if holds else None
        drop_guess(guess.table, guess.entries)
        return held

    def drop(self, guess: Guess) -> None:
        """Take in that the server has not computed the prompt, and will not."""
        if not guess.open:
            return
        guess.open = False
        if guess.adapter and guess.state.process == guess.process:
            guess.state.settle_adapter(guess.adapter)
        drop_guess(guess.table, guess.entries)

    def used(self, guess: Guess, *, now: float) -> None:
        """Take in that a proven request has ended: servers order their blocks by the time when they are
        freed.
        """
        if guess.proven and self.holds(guess):
            guess.table.touch(guess.state.endpoint.name, guess.chain, now=now)

    # -- guesses about this picker's own requests ------------------------------------------------------------

    def expect(self, state: EndpointState, prompt: Prompt, *, cached: int, adapter: str, now: float) -> Guess:
        """Book a request that was sent to a server, and assume what the server will hold. cached: tokens of
        the prompt that the server need not compute. `follow` has to be called next.
        """
        limit = state.max_model_len or (state.metrics.capacity_tokens if state.metrics else None)
        fits = not (limit and prompt.chain) or prompt.tokens <= _CERTAINLY * limit
        booking = Booking(tokens=prompt.tokens - cached if fits else 0, booked_at=now)
        state.book(booking, now=now)
        return self.guess(state, prompt.chain if fits else [], booking=booking, adapter=adapter)

    def follow(self, work: Pick | PrefillJob) -> None:
        """Wait for the counters to show that the server has computed this work. Work without tokens does not
        show there.
        """
        if work.guess.booking.tokens:
            self._awaited[work.guess.booking] = work

    def computed(self, work: Pick | PrefillJob, *, now: float) -> None:
        """Take in that the server has computed the prompt, as its answer or its counters show."""
        self._awaited.pop(work.guess.booking, None)
        guess, prompt, state = work.guess, work.prompt, work.state
        if not guess.open:
            return
        held = self.prove(guess, now=now)
        if held:
            cached = self._caches.cached_at(state, prompt, held)
            state.predicted_tokens += cached
            state.missed += cached > 0
        if isinstance(work, Pick):
            for rule in self.rules:
                rule.ended(work.sent, computed=True)
        self._send(Proved(now, work, held))

    def lost(self, work: Pick | PrefillJob, *, over: bool = True) -> None:
        """Take in that the server has not computed the prompt. over: no other server will compute it."""
        self._awaited.pop(work.guess.booking, None)
        if over and work.guess.open and isinstance(work, Pick):
            for rule in self.rules:
                rule.ended(work.sent, computed=False)
        self.drop(work.guess)

    def doubt(self, pick: Pick, *, now: float) -> None:
        """Take in that an answer ended, and that only the server's next page can show whether it had a token.
        Until then the prompt matches for nobody.
        """
        page = pick.state.metrics
        if pick.state.gone or page is None:  # no page will come
            self.lost(pick)
            return
        self._awaited.pop(pick.guess.booking, None)
        for rule in self.rules:
            rule.ended(pick.sent, computed=False)
        drop_guess(pick.guess.table, pick.guess.entries)
        pick.guess.entries = None
        doubted = self._doubted.setdefault(pick.state, deque())
        doubted.append((now, page.prompt_tokens or 0.0, pick))
        if len(doubted) > _MOST_DOUBTED:
            self.drop(doubted.popleft()[2].guess)

    def detach(self, work: Pick | PrefillJob) -> None:
        """Take in that only the counters of later pages can show what becomes of this work."""
        booking, state = work.guess.booking, work.state
        if state.gone or booking not in self._awaited or booking not in state.backlog.bookings:
            self.lost(work)

    def page(self, state: EndpointState, *, now: float) -> None:
        """Take in the bookings that the server's last page showed to be computed, or that were lost."""
        removed, state.backlog.removed = state.backlog.removed, []
        for booking, computed in removed:
            if (work := self._awaited.get(booking)) is None or not (computed or work.over):
                continue  # it may be on its way to an idle server; its end settles its guess
            if work.guess.process != state.process or booking.booked_at < now - LONGEST_PREFILL_S:
                if work.over:
                    self.lost(work)
            elif not (isinstance(work, Pick) and work.streams and work.phase is Phase.SENT):
                # Headers of a stream come before its prefill. Until they come, the page counts others.
                self.computed(work, now=now)
        if state in self._doubted and state.metrics is not None:
            self._judge(state, state.metrics, now=now)

    def _judge(self, state: EndpointState, page: EndpointMetrics, *, now: float) -> None:
        """Enter the prompts of doubted answers if the server's counters have grown since these answers ended.
        If an answer ended before its prompt can be computed, the counter of prompt tokens has to grow by half
        of the prompt.
        """
        doubted, counted = self._doubted[state], inf if page.prompt_tokens is None else page.prompt_tokens
        while doubted and doubted[0][0] < page.scraped_at - PAGE_AGE_S:
            ended_at, before, pick = doubted.popleft()
            tokens = 0 if pick.computed else pick.prompt.tokens / 2
            if state.account.grew_at > ended_at and counted - before >= tokens:
                counted -= tokens
                self.computed(pick, now=now)
            else:
                self.drop(pick.guess)
        if not doubted:
            del self._doubted[state]

    def answered(self, work: Pick, *, now: float) -> None:
        """Take in the headers of a good answer. They prove nothing if a page or the body will show more. If
        another server was to compute the prompt, it has finished. If a page took the booking of a stream
        before its headers, which come before its prefill, the page did not see this request.
        """
        state, booking, page = work.state, work.guess.booking, work.state.metrics
        counts = page is not None and page.ttft_count is not None
        if work.prefill is not None or not (counts if work.streams else work.sampled):
            self.computed(work, now=now)
        elif work.streams and state.process == work.guess.process and booking not in state.backlog.bookings:
            booking.booked_at = now
            state.detach()  # since the next line counts it again
            state.book(booking, now=now)

    def forget(self, state: EndpointState) -> None:
        """Drop guesses about a server that has left, if only its pages could show what became of them."""
        for work in [each for each in self._awaited.values() if each.state is state and each.over]:
            self.lost(work)
        for _, _, pick in self._doubted.pop(state, ()):
            self.drop(pick.guess)


# -- what guesses write into the table -----------------------------------------------------------------------


def guess_chain(table: PrefixTable, name: EndpointName, chain: Sequence[ChunkHash]) -> GuessedEntries | None:
    """Assume that the server will hold the chain, or the part of it for which there is room. None: nothing is
    written, since the server has left, has no room, or has a cache that is smaller than the chain.
    """
    mirror, size_bytes = table.taking(name), end_bytes(table.schedule, len(chain))
    if mirror is None or size_bytes > mirror.capacity_bytes:
        return None
    most = _most_chunks(table, mirror, chain, size_bytes=size_bytes)
    runs = table.whole_path(chain if most == len(chain) else chain[:most])
    if not runs:
        return None
    counts = mirror.guessed
    for run in runs:
        known = counts.get(run, 0)
        counts[run] = known + 1
        if not known and run not in mirror.last_use:
            table.own(mirror, run)
            mirror.guessed_bytes += table.size_bytes(run.start, run.end)
            table.guessed_entries += len(run.hashes)
    return GuessedEntries(mirror, counts, runs[-1])


def drop_guess(table: PrefixTable, guess: GuessedEntries | None) -> None:
    """Remove what is only held for this guess."""
    if guess is None or guess.mirror.guessed is not guess.counts:
        return
    mirror, counts = guess.mirror, guess.counts
    run: Run | None = guess.leaf
    left: list[Run] = []
    while run is not None:
        above = run.parent
        if counts[run] > 1:
            counts[run] -= 1
            left.append(run)
        else:
            del counts[run]
            if run in mirror.last_use:
                left.append(run)
            else:
                mirror.guessed_bytes -= table.size_bytes(run.start, run.end)
                table.guessed_entries -= len(run.hashes)
                disown(table, mirror, run)
        run = above
    table.mend(left[::-1])


def _most_chunks(table: PrefixTable, mirror: Mirror, chain: Sequence[ChunkHash], *, size_bytes: int) -> int:
    """Return how many chunks of the chain may be written: those that the mirror holds, and those for which
    there is room. size_bytes: the bytes of the whole chain.
    """
    room_bytes = int(GUESSED_SHARE * mirror.capacity_bytes) - mirror.guessed_bytes
    room = int(GUESSED_SHARE * table.max_entries) - table.guessed_entries
    if size_bytes <= room_bytes and len(chain) <= room:
        return len(chain)
    runs, covered = table.path(chain)
    while runs and not runs[-1].holders & mirror.bit:
        covered = runs.pop().start
    by_bytes = chunks_in(table.schedule, end_bytes(table.schedule, covered) + max(0, room_bytes))
    return min(len(chain), by_bytes, covered + max(0, room))
