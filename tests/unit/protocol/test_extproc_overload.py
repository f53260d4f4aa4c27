"""The picker's own overload: which requests it reads, with a queue in simulated time."""

import heapq
import random
from dataclasses import dataclass, field
from typing import Literal

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from epp.protocol.conversation import TARGET_S, Conversation, LiveStreams, Overload
from epp.transport.http2.messages import OK
from tests.unit.protocol.calls_bench import NotingCaller, fill
from tests.unit.protocol.stream_bench import HEADERS, Bench

HEAD_S, BODY_S, UNREAD_S = 100e-6, 200e-6, 90e-6
HURRIED_BODY_S = 80e-6
ANSWER_S = 50e-6
"""The time until an answer's headers come. They come only for requests that were read, because the stream of
any other request has ended.
"""
CAPACITY = 1 / (HEAD_S + BODY_S + ANSWER_S)
"""The number of requests that can be read in a second."""
TO_THE_PROXY_AND_BACK_S = 0.0005
TO_THE_SERVER_AND_BACK_S = 0.001

What = Literal["head", "body", "answer"]


@dataclass
class SlowPicker:
    """A picker that is `slowness` times as slow as it should be. Requests arrive at random, and their
    heads wait behind all other messages.
    """

    slowness: float = 1.0
    overload: Overload = field(default_factory=Overload)
    heads: list[tuple[float, int, What, float]] = field(default_factory=list)
    others: list[tuple[float, int, What, float]] = field(default_factory=list)
    """For each message: when it was sent, its number, its kind, and when its request came."""
    now: float = 0.0
    sent: int = 0
    waits: list[tuple[float, float]] = field(default_factory=list)
    """The time when the last message of a request was answered, and the seconds that the request took."""
    read: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Times at which something else holds the process for 50 ms."""

    def send(self, at: float, what: What, came: float) -> None:
        self.sent += 1
        heapq.heappush(self.heads if what == "head" else self.others, (at, self.sent, what, came))

    def run(self, *, load: float, seconds: float) -> None:
        rng, at = random.Random(1), self.now
        while load and at < self.now + seconds:
            self.send(at, "head", at)
            at += rng.expovariate(load * CAPACITY / self.slowness)
        while lines := [line for line in (self.others, self.heads) if line]:
            self.now = max(self.now, min(line[0][0] for line in lines))
            self._message(*heapq.heappop(next(line for line in lines if line[0][0] <= self.now)))

    def _message(self, at: float, _: int, what: What, came: float) -> None:
        if self.pauses and self.pauses[0] <= self.now:
            self.now += 0.05
            del self.pauses[0]
        waited_s = self.now - at
        if what == "head":
            unread = self.overload.skips(waited_s=waited_s, now=self.now)
            self.now += self.slowness * (UNREAD_S if unread else HEAD_S)
            if not unread:
                self.send(self.now + TO_THE_PROXY_AND_BACK_S, "body", came)
                return
        elif what == "answer":
            self.now += self.slowness * ANSWER_S
        elif self.overload.late(waited_s=waited_s, now=self.now):
            self.now += self.slowness * HURRIED_BODY_S
        else:
            self.now += self.slowness * BODY_S
            self.read.append(self.now)
            self.send(self.now + TO_THE_SERVER_AND_BACK_S, "answer", came)
            return
        self.waits.append((self.now, self.now - came))


@pytest.mark.parametrize("slowness", [1, 4])
def test_below_its_capacity_every_request_is_read(slowness: float) -> None:
    queue = SlowPicker(slowness)
    queue.run(load=0.8, seconds=4.0)
    assert len(queue.read) == len(queue.waits)


@pytest.mark.parametrize("slowness", [1, 4, 8])
@pytest.mark.parametrize("load", [1.5, 2.0])
def test_in_overload_no_request_waits_60_ms_and_half_of_capacity_is_read(
    load: float, slowness: float
) -> None:
    queue = SlowPicker(slowness)
    queue.run(load=load, seconds=6.0)
    assert max(wait for _, wait in queue.waits) < 0.06
    assert len(queue.read) > 0.5 * CAPACITY / slowness * queue.now


def test_with_pauses_of_50_ms_at_twice_the_load_no_request_waits_100_ms() -> None:
    queue = SlowPicker(4.0, pauses=[0.5, 1.0, 2.0, 2.25, 3.0])
    queue.run(load=2.0, seconds=4.0)
    assert not queue.pauses
    assert max(wait for _, wait in queue.waits) < 0.1
    assert len(queue.read) > 0.4 * CAPACITY / 4.0 * queue.now


def test_the_overload_ends_with_the_load() -> None:
    queue = SlowPicker()
    queue.run(load=2.0, seconds=3.0)
    assert 0.4 < queue.overload.share(now=queue.now) < 0.9
    queue.run(load=0.5, seconds=3.0)
    before = queue.now - 2.0
    read, answered = sum(at > before for at in queue.read), sum(at > before for at, _ in queue.waits)
    assert read == answered > 0
    assert queue.overload.share(now=queue.now) == 0.0


def test_a_sudden_burst_of_600_requests_is_handled_within_150_ms() -> None:
    queue = SlowPicker()
    for _ in range(600):
        queue.send(0.0, "head", 0.0)
    queue.run(load=0.0, seconds=0.0)
    assert len(queue.waits) == 600
    assert max(wait for _, wait in queue.waits) < 0.15


def test_short_queues_do_not_begin_an_overload() -> None:
    overload = Overload()
    for n in range(100):
        at = n * 0.05
        assert not overload.skips(waited_s=0.03, now=at)
        assert not overload.skips(waited_s=0.03, now=at + 0.01)
        assert not overload.skips(waited_s=0.0, now=at + 0.015)
        assert not overload.late(waited_s=1.0, now=at + 0.02)


def test_in_an_overload_the_wait_of_each_request_decides() -> None:
    overload = Overload()
    assert [overload.skips(waited_s=1.0, now=n * 0.01) for n in range(17)] == [False] * 15 + [True] * 2
    assert not overload.skips(waited_s=TARGET_S, now=0.2)
    assert overload.skips(waited_s=1.01 * TARGET_S, now=0.2)


def test_single_late_requests_do_not_begin_an_overload() -> None:
    overload = Overload()
    assert not any(overload.skips(waited_s=0.03, now=n * 0.2) for n in range(100))
    assert not overload.late(waited_s=0.03, now=20.0)


def test_a_late_request_of_an_overload_is_routed_from_its_headers() -> None:
    bench = Bench()
    streams = LiveStreams(bench.picker, settings=bench.settings, clock=lambda: 1.0)
    for n in range(20):
        streams.overload.skips(waited_s=1.0, now=0.8 + 0.01 * n)
    call = NotingCaller(waited_s=1.0)
    asked = ext_proc.ProcessingRequest(protocol_config={"request_body_mode": 2})
    fill(asked.request_headers, HEADERS)
    Conversation(streams, call).message(asked.SerializeToString(), now=1.0)
    (decision,) = [pick.decision for pick in bench.seen.picks]
    assert (decision.unread, decision.outcome) == ("overload", "detached")
    assert (len(call.sent), call.ended, streams.live, bench.in_flight()) == (1, [(OK, "")], {}, 0)
