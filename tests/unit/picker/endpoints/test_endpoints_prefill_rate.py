"""How fast servers compute prompts, learned from their times to first tokens and from busy times."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.base.types import EndpointMetrics
from epp.picker.endpoints.prefill_rate import ModelRate, PrefillRate


class FirstTokens:
    """First tokens of a server. Each prefill takes `fixed_s`, and its tokens are computed at `rate`. Each
    `work` reports the work between two pages.
    """

    def __init__(self, model: ModelRate, *, rate: float, fixed_s: float = 0.0) -> None:
        self.learned = PrefillRate(model)
        self._rate, self._fixed_s = rate, fixed_s
        self._at = 0.0

    def work(self, *prompts: int) -> None:
        seconds = sum(self._fixed_s + tokens / self._rate for tokens in prompts)
        total = sum(prompts)
        self.learned.began(requests=len(prompts), tokens=total, ahead_tokens=total, seconds=seconds)
        self._at += 1.0
        pages = _pages((self._at - 1.0, 0.0, 0.0), (self._at, 0.0, 0.0))
        self.learned.observe(*pages, busy=False)


def v_of(server: PrefillRate) -> float:
    """Return the server's rate, as its state computes it."""
    return server.model.tokens_per_s / server.slowness


def test_the_rate_follows_the_times_to_first_tokens() -> None:
    server = FirstTokens(ModelRate(start=8000.0), rate=2000.0)
    for _ in range(30):
        server.work(1000, 3000)
    assert v_of(server.learned) == pytest.approx(2000.0, rel=0.02)


def test_a_constant_part_of_every_prefill_is_not_taken_for_slowness() -> None:
    """Prompts are mostly cached: to compute 50 tokens takes 50 ms and a step. The rate is still 4,000."""
    model, rng = ModelRate(start=8000.0), random.Random(1)
    server = FirstTokens(model, rate=4000.0, fixed_s=0.05)
    for _ in range(200):
        server.work(*(rng.choice((50, 60, 2000)) for _ in range(rng.randint(1, 4))))
    assert v_of(server.learned) == pytest.approx(4000.0, rel=0.05)
    assert model.per_request_s == pytest.approx(0.05, rel=0.2)


def test_equal_servers_get_equal_rates_under_different_loads() -> None:
    model, rng = ModelRate(start=8000.0), random.Random(2)
    warm, cold = (FirstTokens(model, rate=3000.0, fixed_s=0.04) for _ in range(2))
    for _ in range(100):
        warm.work(*[rng.randint(20, 120) for _ in range(6)])
        cold.work(rng.randint(2000, 6000))
    assert v_of(warm.learned) == pytest.approx(v_of(cold.learned), rel=0.1)


def test_a_server_half_as_fast_gets_half_the_rate_of_its_peers() -> None:
    model, rng = ModelRate(start=8000.0), random.Random(3)
    servers = [FirstTokens(model, rate=rate) for rate in (6000.0, 6000.0, 6000.0, 3000.0)]
    for _ in range(120):
        for server in servers:
            server.work(rng.randint(1000, 6000), rng.randint(1000, 6000))
    fast, slow = servers[0].learned, servers[3].learned
    assert v_of(slow) / v_of(fast) == pytest.approx(0.5, rel=0.1)


def test_the_rate_of_an_unused_server_returns_to_that_of_its_peers() -> None:
    model = ModelRate(start=8000.0)
    server = FirstTokens(model, rate=1000.0)
    peer = FirstTokens(model, rate=4000.0)
    for _ in range(60):
        peer.work(4000, 4000, 4000)
        server.work(4000)
    assert server.learned.slowness > 1.8
    for _ in range(900):
        server.work()
    assert server.learned.slowness == pytest.approx(1.0, abs=0.05)


def test_the_first_server_is_not_slow_because_the_guess_was_high() -> None:
    model = ModelRate(start=8000.0)
    first, unread = FirstTokens(model, rate=800.0), PrefillRate(model)
    first.work(4000, 4000, 4000)
    assert v_of(first.learned) > v_of(unread) / 1.6


@given(
    scrapes=st.lists(
        st.tuples(
            st.integers(0, 10**6), st.floats(0, 1e7), st.floats(0, 1e7), st.floats(0, 1e5), st.booleans()
        ),
        max_size=30,
    )
)
def test_the_rate_stays_a_positive_number_whatever_the_counters_say(
    scrapes: list[tuple[int, float, float, float, bool]],
) -> None:
    rate = PrefillRate(ModelRate(start=8000.0))
    for at, (requests, tokens, ahead, seconds, busy) in enumerate(scrapes):
        rate.began(requests=1 + requests, tokens=tokens, ahead_tokens=max(tokens, ahead), seconds=seconds)
        rate.observe(*_pages((at, 0.0, 0.0), (at + 1.0, tokens, 0.0)), busy=busy)
        assert 0 < v_of(rate) < float("inf")


@pytest.mark.parametrize("rate", [1e-9, 1e9])
@pytest.mark.parametrize("liar_first", [True, False])
def test_false_counters_move_the_rate_of_others_by_at_most_a_tenth(*, rate: float, liar_first: bool) -> None:
    """Before, a server with one token in 30 years lowered the rate of all servers of its model to half a
    token a second.
    """
    model = ModelRate(start=8000.0)
    liar, *others = (FirstTokens(model, rate=r) for r in (rate, 6000.0, 6000.0, 6000.0))
    for n in range(2000 if liar_first else 200):
        if liar_first or n > 20:
            liar.work(1)
        for server in others:
            server.work(1000, 3000)
    assert v_of(others[0].learned) == pytest.approx(6000.0, rel=0.1)


def test_the_rate_follows_when_faster_servers_replace_slow_ones() -> None:
    model = ModelRate(start=8000.0)
    servers = [FirstTokens(model, rate=200.0) for _ in range(4)]
    for _ in range(50):
        for server in servers:
            server.work(1000)
    faster = [FirstTokens(model, rate=20_000.0) for _ in range(4)]
    for server in servers:
        model.leave(server.learned)
    for _ in range(800):
        for server in faster:
            server.work(1000)
    assert v_of(faster[0].learned) == pytest.approx(20_000.0, rel=0.1)


def _pages(*counters: tuple[float, float, float]) -> list[EndpointMetrics]:
    """Return for each page its time, its prompt tokens, and how many of them were cached."""
    return [
        EndpointMetrics(scraped_at=at, prompt_tokens=prompt, cached_prompt_tokens=cached)
        for at, prompt, cached in counters
    ]


def test_the_rate_is_that_of_busy_servers_once_there_were_some() -> None:
    model = ModelRate(start=8000.0)
    server = PrefillRate(model)
    for _ in range(20):
        model.observe(server, requests=1, tokens=4000, seconds=1.0)
    assert model.tokens_per_s == pytest.approx(4000.0, rel=0.05)
    pages = _pages(*((float(at), 3000.0 * (at // 2) * 2, 1000.0 * (at // 2) * 2) for at in range(40)))
    for before, after in pairwise(pages):
        server.observe(before, after, busy=True)
    assert model.tokens_per_s == pytest.approx(2000.0, rel=0.1)


def test_a_single_busy_server_cannot_move_the_rate_far() -> None:
    model = ModelRate(start=8000.0)
    for _ in range(20):
        for tokens in (4000.0, 4000.0, 4000.0, 1e12):
            model.worked(tokens=tokens, seconds=0.5)
    assert model.tokens_per_s < 3 * 8000


def _answering(rates: Sequence[float], *, seconds: int, waiting_tokens: float = 0.0) -> list[PrefillRate]:
    """Run servers of one model that begin two answers a second. Each prompt has 2,000 tokens."""
    model = ModelRate(start=8000.0)
    servers = [PrefillRate(model) for _ in rates]
    for at in range(seconds):
        for server, rate in zip(servers, rates, strict=True):
            server.observe(*_pages((at, 0.0, 0.0), (at + 1.0, 0.0, 0.0)), busy=False)
            ahead_tokens = 4000.0 + waiting_tokens
            taken_s = 2 * 0.02 + ahead_tokens / rate
            server.began(requests=2, tokens=4000, ahead_tokens=ahead_tokens, seconds=taken_s)
    return servers


@pytest.mark.parametrize("waiting_tokens", [0.0, 12_000.0])
def test_times_to_first_tokens_show_early_which_server_is_slow(waiting_tokens: float) -> None:
    slow, fast, other = _answering([2000.0, 4000.0, 4000.0], seconds=20, waiting_tokens=waiting_tokens)
    assert v_of(slow) == pytest.approx(v_of(fast) / 2, rel=0.35)
    assert v_of(slow) < 0.7 * v_of(fast)
    assert v_of(fast) == pytest.approx(v_of(other), rel=0.05)


def test_a_long_wait_counts_at_most_as_much_as_the_prompt_itself() -> None:
    direct, waited = (
        _answering([2000.0, 4000.0, 4000.0], seconds=10, waiting_tokens=tokens)[0].slowness
        for tokens in (0.0, 400_000.0)
    )
    assert direct > 1.2
    assert waited == pytest.approx(direct, rel=0.03), "a hundred times as many seconds"


def test_servers_whose_first_tokens_differ_by_little_count_as_equal() -> None:
    one, other = _answering([3500.0, 4000.0], seconds=20)
    assert one.slowness == other.slowness == 1.0


def test_a_leap_in_a_counter_of_times_does_not_make_a_server_slow_for_long() -> None:
    usual, leaps = _answering([4000.0, 4000.0], seconds=20)
    leaps.began(requests=2, tokens=4000, ahead_tokens=4000.0, seconds=1e12)
    assert v_of(leaps) > 0.6 * v_of(usual)
    for at in range(20, 60):
        leaps.observe(*_pages((at, 0.0, 0.0), (at + 1.0, 0.0, 0.0)), busy=False)
        leaps.began(requests=2, tokens=4000, ahead_tokens=4000.0, seconds=1.04)
    assert leaps.slowness == 1.0
