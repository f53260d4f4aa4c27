"""Endpoints, bookings and metrics pages for the tests of undone work."""

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.picker.endpoints.backlog import Backlog, Booking
from epp.picker.endpoints.endpoint_state import EndpointState
from epp.picker.endpoints.prefill_rate import ModelRate, PrefillRate
from tests.invariants.fleet import check_backlog

RATE = 100.0


def booked(backlog: Backlog, tokens: int, *, now: float) -> Booking:
    booking = Booking(tokens=tokens, booked_at=now)
    backlog.book(booking, now=now, rate=RATE)
    return booking


def undone_at(backlog: Backlog, *, now: float) -> float:
    check_backlog(backlog)
    return backlog.undone_tokens(now=now, rate=RATE)


def a_state() -> EndpointState:
    endpoint = Endpoint(name=EndpointName("a"), address=Address("10.0.0.1", 8000))
    return EndpointState(endpoint, PrefillRate(ModelRate(start=1000.0)))


def book(state: EndpointState, tokens: int, *, now: float) -> Booking:
    booking = Booking(tokens=tokens, booked_at=now)
    state.book(booking, now=now)
    return booking


def page(
    at: float,
    *,
    running: int = 0,
    waiting: int = 0,
    prompt_tokens: float | None = None,
    cached: float | None = None,
    begun: float | None = None,
    ttft_sum_s: float | None = None,
    finished: float | None = None,
) -> EndpointMetrics:
    return EndpointMetrics(
        scraped_at=at,
        running=running,
        waiting=waiting,
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=cached,
        ttft_count=begun,
        ttft_sum_s=ttft_sum_s,
        finished=finished,
    )
