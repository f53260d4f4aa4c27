"""Three pickers with any traffic; batches are lost, doubled and late. Every invariant holds, and after
some silence all agree.

Each picker's batches reach another picker in their order, as from a Redis stream, or not at all.
"""

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.base.types import EndpointMetrics, EndpointName
from epp.picker.events import Pick
from tests.unit.picker.picker_questions import text
from tests.unit.sources.sharing.pickers import TIMEOUT_S, Replica, endpoints, meet

PIECES = [text(str(n), 600) for n in range(4)]
prompts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map(b"".join)
replicas = st.integers(0, 2)


@dataclass(eq=False)
class OpenPick:
    replica: int
    pick: Pick


class SharingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.replicas = [Replica(n + 1, outbox_bytes=3000) for n in range(3)]
        self.under_way: dict[tuple[int, int], deque[bytes]] = {
            (a, b): deque() for a in range(3) for b in range(3) if a != b
        }
        self.open: list[OpenPick] = []

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0]))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds

    @rule(at=replicas, prompt=prompts)
    def picks(self, at: int, prompt: bytes) -> None:
        self.open.append(OpenPick(at, self.replicas[at].pick(prompt, now=self.now)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), status=st.sampled_from([200, 500]))
    def ends(self, data: st.DataObject, status: int) -> None:
        done = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.replicas[done.replica].end(done.pick, now=self.now, status=status)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def is_let_go(self, data: st.DataObject) -> None:
        done = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.replicas[done.replica].picker.detach(done.pick, now=self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), served=st.sampled_from([e.address for e in endpoints()]))
    def is_served_elsewhere(self, data: st.DataObject, served: object) -> None:
        moved = self.open[data.draw(st.integers(0, len(self.open) - 1))]
        address = next(e.address for e in endpoints() if e.address == served)
        self.replicas[moved.replica].picker.on_response_headers(
            moved.pick, status=200, served=address, now=self.now
        )

    @rule(at=replicas, name=st.sampled_from("ab"), tokens=st.sampled_from([None, 5.0, 100.0]))
    def is_scraped(self, at: int, name: str, tokens: float | None) -> None:
        page = EndpointMetrics(scraped_at=self.now, running=1, prompt_tokens=tokens, finished=tokens)
        self.replicas[at].picker.news.observe(EndpointName(name), page, now=self.now)

    @rule(at=replicas, incarnation=st.sampled_from(["", "2"]), names=st.sampled_from(["ab", "a", "abc"]))
    def sees_other_endpoints(self, at: int, incarnation: str, names: str) -> None:
        self.replicas[at].picker.news.set_endpoints(endpoints(names, incarnation=incarnation), now=self.now)

    @rule(at=replicas)
    def speaks(self, at: int) -> None:
        batches = self.replicas[at].send(now=self.now)
        for (speaker, _), queue in self.under_way.items():
            if speaker == at:
                queue.extend(batches)

    @rule(at=replicas, to=replicas, fate=st.sampled_from(["heard", "heard", "heard", "twice", "lost"]))
    def a_batch_arrives(self, at: int, to: int, fate: str) -> None:
        queue = self.under_way.get((at, to))
        if queue:
            batch = queue.popleft()
            self.replicas[to].receive(
                [batch] * {"heard": 1, "twice": 2, "lost": 0}[fate], now=self.now, age_s=0.05
            )

    @rule(at=replicas)
    def expires(self, at: int) -> None:
        self.replicas[at].exchange.listener.expire(now=self.now)

    @invariant()
    def invariants_hold(self) -> None:
        for replica in self.replicas:
            replica.check()

    def teardown(self) -> None:
        """All requests end, and every picker hears of it. Then no picker counts a request of another."""
        for done in self.open:
            self.replicas[done.replica].end(done.pick, now=self.now)
        for queue in self.under_way.values():
            queue.clear()
        meet(self.replicas, now=self.now + 1.0)
        for replica in self.replicas:
            assert replica.in_flight_of_peers() == {}
            replica.exchange.listener.expire(now=self.now + 10 * TIMEOUT_S)
            replica.check()


TestSharingMachine = pytest.mark.slow(SharingMachine.TestCase)
TestSharingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
