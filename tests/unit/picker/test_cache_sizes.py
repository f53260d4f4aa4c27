"""The picker's mirrors follow what the servers' pages say of their caches."""

from __future__ import annotations

from collections import OrderedDict

from epp.base.types import EndpointMetrics, EndpointName
from epp.config.policy import PolicySpec
from epp.config.routing import Table
from tests.unit.picker.picker_questions import a_picker, ask, check, endpoints, serve, text

A = EndpointName("a")
PROMPT_BYTES = 8000


class LruServer:
    """Keeps a number of whole prompts, and counts as vLLM does. Its page has no cache size unless a test
    sets one.
    """

    def __init__(self, prompts: int, *, stated_tokens: int | None = None) -> None:
        self._prompts = prompts
        self._stated_tokens = stated_tokens
        self._held: OrderedDict[str, None] = OrderedDict()
        self._queries = self._hits = 0.0

    def serve(self, name: str) -> None:
        self._queries += PROMPT_BYTES / 4
        if name in self._held:
            self._hits += PROMPT_BYTES / 4
            self._held.move_to_end(name)
        self._held[name] = None
        while len(self._held) > self._prompts:
            self._held.popitem(last=False)

    def holds(self, name: str) -> bool:
        return name in self._held

    def wipe(self) -> None:
        self._held.clear()

    def page(self, now: float) -> EndpointMetrics:
        return EndpointMetrics(
            scraped_at=now,
            waiting=0,
            capacity_tokens=self._stated_tokens,
            prompt_tokens=self._queries,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
        )


def test_a_wiped_cache_is_noticed_by_hits_that_stand_still() -> None:
    picker, server, wrong = a_picker(on=endpoints("a")), LruServer(100), 0
    for second in range(72):
        if second == 60:
            server.wipe()
        name = f"p{second % 12}"
        pick = serve(picker, ask(text(name, PROMPT_BYTES)), now=float(second))
        wrong += bool(pick.decision.matched_tokens) and not server.holds(name)
        server.serve(name)
        picker.observe(A, server.page(second + 0.6), now=second + 0.6)
        if second < 60:
            assert not wrong
    assert 0 < wrong <= 5
    check(picker)


def test_a_server_that_falls_asleep_has_lost_its_cache() -> None:
    picker = a_picker(on=endpoints("a"))
    serve(picker, ask(text("p")), now=1.0)
    for at, asleep in ((2.0, True), (3.0, False)):
        picker.observe(A, EndpointMetrics(scraped_at=at, asleep=asleep), now=at)
    assert serve(picker, ask(text("p")), now=4.0).decision.matched_tokens == 0


def test_a_mirror_has_the_size_that_the_server_states_or_the_policys() -> None:
    picker = a_picker(PolicySpec(table=Table(default_capacity_tokens=60_000)), on=endpoints("a"))
    assert picker.table.mirrors[A].capacity_bytes == 240_000
    picker.observe(A, LruServer(1, stated_tokens=30_000).page(1.0), now=1.0)
    assert picker.table.mirrors[A].capacity_bytes == 120_000
