"""Names and prompts that never come again fill nothing: every collection of the picker has a bound.

`python -m tests.unit.picker.test_many_keys` prints the memory after one and two million different keys.
"""

import random
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from epp.base.types import Address, Endpoint, EndpointName
from epp.config.policy import PolicySpec, Table
from epp.observe.misses import Misses
from epp.observe.telemetry.decisions import DecisionRing
from epp.observe.telemetry.metrics import Metrics
from epp.observe.telemetry.picker_state import EndpointStatus, PickerStatus
from epp.sources.sharing.exchange import Exchange
from tests.harness.steps import blocks
from tests.unit.picker.picker_questions import a_picker, ask, endpoints

_MOST = 2**15
"""The largest bound of a collection."""


def sizes(*roots: object) -> Iterator[tuple[int, str]]:
    """Yield the length of each collection that the objects lead to, and the type that owns it."""
    known, todo = set[int](), [(root, "") for root in roots]
    while todo:
        value, owner = todo.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, dict | list | tuple | set | deque):
            yield len(value), owner
            todo += [(each, owner) for each in value]
            todo += [(each, owner) for each in (value.values() if isinstance(value, dict) else ())]
        elif type(value).__module__.startswith("epp."):
            slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
            names = slots or list(getattr(value, "__dict__", ()))
            todo += [(getattr(value, name, None), f"{type(value).__name__}.{name}") for name in names]


class Process:
    """A picker with its listeners, as in one process."""

    def __init__(self) -> None:
        self.picker = a_picker(PolicySpec(table=Table(default_capacity_tokens=5000)), on=endpoints("ab"))
        self.misses, self.ring = Misses(self.picker), DecisionRing(maxlen=100)
        self.exchange = Exchange(self.picker, me=b"1", outbox_bytes=2**16)
        self.metrics = Metrics(decisions=self.ring, state=self.status)
        for listener in (self.misses, self.metrics):
            self.picker.subscribe(listener.on_event)
        self._rng = random.Random(1)
        self._sent = 0

    def status(self) -> PickerStatus:
        states = self.picker.fleet.states()
        found = [EndpointStatus(name=s.endpoint.name, address=s.endpoint.address.text) for s in states]
        return PickerStatus(endpoints=tuple(found))

    def send(self, requests: int) -> None:
        """Send requests of which each has a model, salt, session and prompt of its own."""
        for n in range(self._sent, self._sent + requests):
            now, name, prompt = n * 0.01, f"name {n}", self._rng.randbytes(300).hex().encode()
            question = ask(prompt, model=name, salt=name, session=name, stream=True)
            pick = self.picker.pick(question, now=now)
            self.picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
            self.picker.end(pick, outcome="ended", now=now)
            self.picker.tidy(now=now)
            if n % 500 == 0:
                self.keep_house(now=now)
        self._sent += requests

    def keep_house(self, *, now: float) -> None:
        self.misses.work(steps=10**9)
        self.picker.housekeep(now=now)
        list(self.metrics.collect())

    def sizes(self) -> Iterator[tuple[int, str]]:
        return sizes(self.picker, self.misses, self.exchange, self.ring, self.metrics)

    def check(self) -> None:
        """Check that no collection is larger than its bound."""
        largest = max(self.sizes())
        assert largest[0] <= _MOST, largest
        assert sum(mirror.entries for mirror in self.picker.caches.table.mirrors.values()) < 200


@pytest.mark.slow
def test_34_000_different_keys_leave_no_collection_larger_than_its_bound() -> None:
    process = Process()
    process.send(34_000)
    process.check()


@pytest.mark.parametrize("uid", ["", "u"], ids=["from a file", "pods"])
def test_names_of_servers_that_left_stay_in_no_collection(uid: str) -> None:
    process, counted = Process(), list[Counter[str]]()
    for n in range(900):
        now, address = 10.0 * n, Address("10.1.0.0", 8000 + n)
        server = Endpoint(EndpointName(f"server {n}"), address, incarnation=uid and f"{uid}{n}")
        process.picker.news.set_endpoints([server], now=now)
        pick = process.picker.pick(ask(b"prompt", stream=True), now=now)
        process.picker.on_response_headers(pick, status=200, served=address, now=now)
        process.picker.end(pick, outcome="ended", now=now)
        if n % 300 == 299:
            process.keep_house(now=now)
            counted.append(Counter())
            for length, owner in process.sizes():
                counted[-1][owner] += length
    del counted[1]["Demand._times"], counted[2]["Demand._times"]  # 32,768 times of requests
    assert counted[2] == counted[1]


def main() -> None:
    process, after = Process(), list[int]()
    for million in (1, 2):
        process.send(250_000)  # each request has four keys
        process.check()
        after.append(blocks())
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
        print(f"{million} million keys: RSS {rss:.1f} MiB, {after[-1]:,} blocks", flush=True)
    assert after[1] <= 1.1 * after[0], after  # one block a request would be 1.7 times as many


if __name__ == "__main__":
    main()
