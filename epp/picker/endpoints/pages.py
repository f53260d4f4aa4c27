"""Corrects the state of a server by its metrics page: the backlog, the prefill rate and the adapters.

The backlog drains as an estimate between pages. The counters of a page then confirm what was really computed.
The estimate keeps only what the server cannot have counted yet: servers count a prompt when its prefill has
finished, so at most the oldest booking is computed and not counted.

The counter is that of first tokens (`begun`). Each first token ends one booking, even if more of the prompt
was cached than expected, or if its size was guessed wrong. If a server does not count them, the estimate is
used as it is (`settle`). A request that was computed and released between two pages is also in the counters
of the later page. The backlog remembers the request until that page. Otherwise the request would be counted a
second time, against requests that still wait.

Pure: times are monotonic seconds. The picker calls this module for each page.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import islice
from math import inf
from typing import Final

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.endpoint_state import LONGEST_PREFILL_S, Backlog, EndpointState
from epp.picker.endpoints.learned import computed_growth, growth

_BUSY_HALF_LIFE_S: Final = 20.0


def take_in(state: EndpointState, after: EndpointMetrics, *, now: float) -> None:
    """Take in the next page of the same process."""
    state.changed.add(state.slot)
    before, rate = state.metrics, state.tokens_per_s
    if before is not None:
        _learn_busy(state, before, after)
    if after.ttft_count is None:
        settle(state.backlog, now=now, rate=rate)
    elif before is None:
        state.backlog.unbegun = 0  # the first counters of a server contain all that was released so far
    else:
        _answers_begun(state, before, after, now=now)
    # A request may be on its way to the server while the page is written. So only work that the scrape
    # before this one could have seen is known to be done.
    all_begun = _all_begun(state, after)
    done_before = before.scraped_at if all_begun and before is not None else now - LONGEST_PREFILL_S
    state.backlog.clear_before(done_before, now=now, rate=rate)
    if before is not None:
        # Bookings from before the earlier page that are not done yet kept the server busy all the time.
        state.rate.observe(before, after, busy=state.backlog.oldest_at <= before.scraped_at)
        if after.loaded_adapters is not None:
            _forget_unloaded(state, after.known_adapters, before=before.scraped_at)
    state.metrics = after
    state.failures = 0
    state.picks_since_scrape = 0
    state.ends_since_scrape = 0
    state.uncounted_end_at = inf


def _answers_begun(
    state: EndpointState, before: EndpointMetrics, after: EndpointMetrics, *, now: float
) -> None:
    """Release the requests whose first tokens came between two scrapes, and learn from their times."""
    requests = int(growth(before.ttft_count, after.ttft_count))
    first = begun(state.backlog, requests, now=now, rate=state.tokens_per_s)
    if first is not None:
        seconds = growth(before.ttft_sum_s, after.ttft_sum_s)
        state.rate.began(requests=requests, tokens=first[0], ahead_tokens=first[1], seconds=seconds)


def _learn_busy(state: EndpointState, before: EndpointMetrics, after: EndpointMetrics) -> None:
    elapsed_s = after.scraped_at - before.scraped_at
    if elapsed_s > 0:
        keep = 0.5 ** (elapsed_s / _BUSY_HALF_LIFE_S)
        computed = computed_growth(before, after) / elapsed_s
        state.computed_per_s = keep * state.computed_per_s + (1 - keep) * computed


def _forget_unloaded(state: EndpointState, known: AbstractSet[str], *, before: float) -> None:
    """Forget adapters that the server does not name, if they were last used before this time. The server
    would name them if it still held them.
    """
    for adapter in [a for a, used_at in state.adapters.items() if used_at < before and a not in known]:
        del state.adapters[adapter]


def _all_begun(state: EndpointState, after: EndpointMetrics) -> bool:
    """Return whether every request at the server has its first token, as far as this page shows.

    First tokens minus ended requests are the requests that decode, except for a constant: requests
    that ended without a first token, and counts from before. If we subtract the requests at the
    server, the number is largest on pages without a request in prefill. So a page with the largest number
    seen so far shows no request in prefill.
    """
    inside = after.inside
    if inside is None or after.ttft_count is None or after.finished is None:
        return inside == 0
    surplus = after.ttft_count - after.finished - inside
    if inside == 0 or state.surplus is None or surplus > state.surplus:
        state.surplus = surplus
    return surplus == state.surplus


def begun(backlog: Backlog, requests: int, *, now: float, rate: float) -> tuple[int, float] | None:
    """Release the oldest bookings: since the last call the server's counters show first tokens of `requests`
    more. Returns the tokens of all these requests together, and their `ahead_tokens`. None: not all of the
    requests are known, or some of them had to wait for an adapter.
    """
    backlog.advance(now, rate)
    more = min(max(0, requests - backlog.unbegun), len(backlog.bookings))  # `islice` refuses a huge number
    ended = list(islice(backlog.bookings, more))
    known = len(ended) == requests and not any(booking.loads for booking in ended)
    tokens = sum([booking.tokens for booking in ended])
    for _ in ended:
        backlog.drop_oldest()
    backlog.unbegun = max(0, backlog.unbegun - requests)
    oldest = next(iter(backlog.bookings), None)
    backlog.drained_tokens = min(backlog.drained_tokens, oldest.tokens if oldest else 0.0)
    return (tokens, sum([booking.ahead_tokens for booking in ended])) if known else None


def settle(backlog: Backlog, *, now: float, rate: float) -> None:
    """Take the drain estimate as true, since the server does not count first tokens. Bookings without tokens
    are removed too, because bookings of requests of unknown size would stay for ever.
    """
    backlog.advance(now, rate)
    left = int(backlog.drained_tokens)
    backlog.drained_tokens = 0.0
    backlog.unbegun = 0
    while backlog.bookings:
        oldest = next(iter(backlog.bookings))
        if oldest.tokens > left:
            oldest.tokens -= left
            backlog.tokens -= left
            return
        left -= oldest.tokens
        backlog.count(oldest)
