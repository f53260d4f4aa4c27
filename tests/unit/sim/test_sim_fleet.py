"""The fleet: one clock, events in order, and the reports that a router gets."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from model_server.sim.engine import EngineShape, Snapshot
from model_server.sim.fleet import Change, Fleet, FleetPlan, Outcome
from model_server.sim.prompts import Segment, block_names, render
from model_server.sim.request import Record, SimRequest

SHAPE = EngineShape(num_blocks=200, block_tokens=16)


class InTurn:
    """Routes round robin, and records everything that it hears."""

    def __init__(self) -> None:
        self.servers: list[str] = []
        self.teaches: list[tuple[object, ...]] = []
        self.pages: list[tuple[int, str, Snapshot, float]] = []
        self._turn = 0

    def set_servers(self, names: Sequence[str], *, restarted: str, now: float) -> None:
        self.servers = list(names)
        self.teaches.append(("servers", len(names), restarted))

    def route(self, request: SimRequest, *, now: float) -> str | None:
        self._turn += 1
        return self.servers[self._turn % len(self.servers)]

    def first_token(self, request_id: int, *, now: float) -> None:
        self.teaches.append(("first", request_id, now))

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        self.teaches.append(("failed" if failed else "ended", request_id, now))

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None:
        self.pages.append((scraper, server, page, now))


class Steady:
    """Requests at fixed gaps. After each end, `turns` more of the same session follow."""

    def __init__(self, *, count: int, gap_s: float, turns: int = 0) -> None:
        self._count, self._gap_s, self._turns = count, gap_s, turns
        self._next_id = count

    def start(self) -> Iterable[tuple[float, SimRequest]]:
        for number in range(self._count):
            segments = (Segment(1, 64), Segment(100 + number, 40))
            yield (
                number * self._gap_s,
                SimRequest(request_id=number, segments=segments, answer=Segment(10_000 + number, 20)),
            )

    def after(self, record: Record, *, now: float) -> Iterable[tuple[float, SimRequest]]:
        if self._turns and record.completed:
            self._turns -= 1
            old = record.request
            self._next_id += 1
            yield (
                now + 1.0,
                SimRequest(
                    request_id=self._next_id,
                    segments=(*old.segments, old.answer, Segment(20_000 + self._next_id, 30)),
                    answer=Segment(30_000 + self._next_id, 20),
                ),
            )


def run(plan: FleetPlan, workload: Steady) -> tuple[Outcome, InTurn]:
    router = InTurn()
    return Fleet(plan, router=router, workload=workload, rng=random.Random(1)).run(), router


def test_every_request_gets_its_first_token_before_its_end() -> None:
    outcome, router = run(FleetPlan(shape=SHAPE, num_servers=2), Steady(count=30, gap_s=0.01, turns=5))
    assert len(outcome.records) == 35
    for record in outcome.records:
        assert record.completed
        assert record.first_token_s is not None
        assert record.ended_s is not None
        assert record.arrived_s < record.first_token_s < record.ended_s
    assert sum(word == "ended" for word, *_ in router.teaches) == 35


def test_a_next_turn_finds_the_answer_in_the_cache() -> None:
    outcome, _ = run(FleetPlan(shape=SHAPE, num_servers=1), Steady(count=1, gap_s=1.0, turns=1))
    first, second = outcome.records
    computed = first.num_prompt_tokens + 19  # an answer's last token is never computed
    assert second.num_cached_tokens == computed // 16 * 16


def test_a_server_that_restarts_fails_its_open_requests_and_is_cold() -> None:
    plan = FleetPlan(shape=SHAPE, num_servers=1, changes=(Change(at_s=2.0, restart="pod-0"),))
    outcome, router = run(plan, Steady(count=5, gap_s=0.95))
    assert ("servers", 1, "pod-0") in router.teaches
    states = [(record.failed, record.num_cached_tokens) for record in outcome.records]
    assert states == [(False, 0), (False, 64), (True, 64), (False, 0), (False, 64)]


def test_a_server_that_joins_is_scraped_and_used() -> None:
    plan = FleetPlan(shape=SHAPE, num_servers=1, changes=(Change(at_s=1.0, add="pod-new"),))
    outcome, router = run(plan, Steady(count=20, gap_s=0.2))
    assert any(record.server == "pod-new" for record in outcome.records)
    assert all(now >= 1.0 for _, server, _, now in router.pages if server == "pod-new")
    assert any(server == "pod-new" for _, server, _, _ in router.pages)


def test_pages_come_late_by_the_lag_and_to_every_scraper() -> None:
    plan = FleetPlan(shape=SHAPE, num_servers=2, scrape_lag_s=0.3, num_scrapers=2)
    _, router = run(plan, Steady(count=20, gap_s=0.2))
    assert {scraper for scraper, *_ in router.pages} == {0, 1}
    assert all(abs(now - page.taken_s - 0.3) < 1e-9 for _, _, page, now in router.pages)


def test_prompts_share_blocks_as_far_as_their_segments_do() -> None:
    shared = (Segment(1, 50), Segment(2, 30))
    one = block_names((*shared, Segment(3, 40)), block_tokens=16)
    other = block_names((*shared, Segment(4, 40)), block_tokens=16)
    longer = block_names((Segment(1, 50), Segment(2, 31), Segment(3, 40)), block_tokens=16)
    assert (len(one), one[:5], one[5] == other[5]) == (7, other[:5], False)
    assert one[:5] == longer[:5]
    assert not set(one) & set(block_names(shared, block_tokens=16, root="lora"))
    assert len(render(shared, bytes_per_token=3.5)) == 175 + 105


def test_the_counters_of_a_page_agree_with_the_records() -> None:
    plan = FleetPlan(shape=SHAPE, num_servers=1, scrape_interval_s=0.05)
    # The pages stop at the last end, so only a request that comes after all others has time for one more
    # page.
    outcome, router = run(plan, Steady(count=8, gap_s=1.0))
    last_ended = max(record.ended_s or 0.0 for record in outcome.records[:-1])
    page = next(page for _, _, page, now in router.pages if now > last_ended)
    done = outcome.records[: page.counters.finished]
    assert len(done) == 7
    assert page.counters.cached_prompt_tokens == sum(r.num_cached_tokens or 0 for r in done)
    waits = [(r.first_token_s or 0.0) - r.arrived_s for r in done]
    assert abs(page.counters.ttft_sum_s - sum(waits)) < 1e-9
    assert page.counters.generated_tokens >= 20 * 7
    assert (page.running, page.waiting, page.shape.capacity_tokens) in {(0, 0, 3200), (1, 0, 3200)}


def test_a_page_counts_each_step_of_a_long_answer() -> None:
    shape = replace(SHAPE, num_blocks=10, block_tokens=512)
    plan = FleetPlan(shape=shape, num_servers=1, scrape_interval_s=0.03)
    _, router = run(plan, Steady(count=1, gap_s=1.0))
    counted = [page.counters.generated_tokens for _, _, page, _ in router.pages if page.running]
    assert len(counted) > 3
    assert all(one < next_one for one, next_one in pairwise(counted)), "a stalled server would look like this"
