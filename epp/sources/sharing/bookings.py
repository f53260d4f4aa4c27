"""Books the requests of other pickers on the states of their servers. Pure; `listener` is the only caller.

Events of other pickers come late, so the last scrape of a server may have counted a request already. Each
function compares the time of the event with the time of the scrape.
"""

from __future__ import annotations

from epp.picker.endpoints.endpoint_state import Booking, EndpointState


def book(state: EndpointState, booking: Booking, *, at: float, now: float) -> None:
    """Book a request that another picker sent to the server, at `at` by our clock."""
    state.changed.add(state.slot)
    state.peers_in_flight += 1
    if _unseen(state, at):
        state.picks_since_scrape += 1
    state.backlog.book(booking, now=now, rate=state.tokens_per_s)


def release(state: EndpointState, booking: Booking, *, computed: bool, at: float, now: float) -> None:
    """Release the booking of another picker's request that is over, or whose picker is gone."""
    detach(state)
    if _unseen(state, at):
        state.ends_since_scrape += 1
    state.ended_loads += computed and booking.loads
    state.backlog.release(booking, computed=computed, now=now, rate=state.tokens_per_s)


def detach(state: EndpointState) -> None:
    """Stop counting a request that another picker no longer follows, although its answer continues. The
    booking drains, and scrapes count the request.
    """
    state.changed.add(state.slot)
    state.peers_in_flight -= 1


def _unseen(state: EndpointState, at: float) -> bool:
    """Return whether the last scrape was before `at`."""
    return state.metrics is None or at > state.metrics.scraped_at
