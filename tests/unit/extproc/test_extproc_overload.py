"""The picker's own overload: which share of the requests is read, against a queue in simulated time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import pytest

from epp.extproc.overload import TARGET_S, Overload

HEAD_S, BODY_S, SKIPPED_S = 100e-6, 300e-6, 100e-6
CAPACITY = 1 / (HEAD_S + BODY_S)
"""Requests that can be read in a second."""
TURN_S = 0.002
PROBE_PAUSE_S = 0.02
TO_THE_PROXY_AND_BACK_S = 0.0005


@dataclass
class Queue:
    """A picker behind one connection: messages and the answers to its PINGs wait in one line."""

    overload: Overload = field(default_factory=Overload)
    line: deque[tuple[float, Literal["head", "body", "ping"], float]] = field(default_factory=deque)
    """When it was sent, what, and when its request came."""
    now: float = 0.0
    probed_at: float | None = None
    waited_s: float | None = None
    probe_due: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When an answer with a pick was given, and how long its request had waited for this process in all."""
    read: list[float] = field(default_factory=list)

    def run(self, *, rate: float, seconds: float) -> None:
        start, arrived = self.now, 0
        while self.now < start + seconds:
            due = int((self.now - start) * rate)
            while arrived < due:
                at = start + arrived / rate
                self._send(at, "head", at)
                arrived += 1
            if not self.line or self.line[0][0] > self.now:
                self.now += 0.0001
                continue
            self._turn()

    def _send(self, at: float, what: Literal["head", "body", "ping"], came: float) -> None:
        self.line.append((at, what, came))
        if len(self.line) > 1 and self.line[-2][0] > at:
            self.line = deque(sorted(self.line, key=lambda m: m[0]))

    def _turn(self) -> None:
        started = self.now
        while self.line and self.line[0][0] <= self.now < started + TURN_S:
            at, what, came = self.line.popleft()
            if what == "ping":
                self.waited_s, self.probed_at = self.now - at, None
            elif what == "head" and self.overload.skips(now=self.now):
                self.now += SKIPPED_S
                self.waits.append((self.now, self.now - came))
            elif what == "head":
                self.now += HEAD_S
                self._send(self.now + TO_THE_PROXY_AND_BACK_S, "body", came)
            else:
                self.now += BODY_S
                self.read.append(self.now)
                self.waits.append((self.now, self.now - came))
        if self.probed_at is None and self.now >= self.probe_due:
            self.probed_at, self.probe_due = self.now, self.now + PROBE_PAUSE_S
            self._send(self.now + TO_THE_PROXY_AND_BACK_S, "ping", self.now)
        waited = self.waited_s
        if self.probed_at is not None:
            waited = max(self.waited_s or 0.0, self.now - self.probed_at)
        self.overload.turn(worked_s=self.now - started, waited_s=waited, now=self.now)


def test_below_its_capacity_every_request_is_read() -> None:
    queue = Queue()
    queue.run(rate=0.8 * CAPACITY, seconds=3.0)
    assert len(queue.read) == len(queue.waits)


@pytest.mark.parametrize("load", [1.5, 2.0])
def test_at_twice_the_load_nobody_waits_long_and_half_of_what_could_be_read_is_read(load: float) -> None:
    queue = Queue()
    queue.run(rate=load * CAPACITY, seconds=6.0)
    settled = [(at, wait) for at, wait in queue.waits if at > 1.0]
    assert max(wait for _, wait in settled) < 0.1
    seconds = queue.now - 1.0
    assert sum(at > 1.0 for at in queue.read) > 0.5 * CAPACITY * seconds


def test_it_is_over_with_the_load() -> None:
    queue = Queue()
    queue.run(rate=2 * CAPACITY, seconds=3.0)
    queue.run(rate=0.5 * CAPACITY, seconds=3.0)
    before = queue.now - 1.0
    read, answered = sum(at > before for at in queue.read), sum(at > before for at, _ in queue.waits)
    assert read == answered > 0


def test_a_burst_out_of_nothing_is_worked_off_in_time() -> None:
    queue = Queue()
    for _ in range(600):
        queue._send(0.0, "head", 0.0)
    queue.run(rate=0.0, seconds=1.0)
    assert len(queue.waits) == 600
    assert max(wait for _, wait in queue.waits) < 0.25


def test_a_data_plane_that_is_late_itself_changes_nothing() -> None:
    overload = Overload()
    for n in range(100):
        overload.turn(worked_s=0.001, waited_s=1.0, now=n * 0.02)
    assert not overload.skips(now=2.0)


def test_the_share_is_kept_evenly() -> None:
    overload = Overload()
    now = 0.0
    while overload.share(now=now) < 0.3:
        now += 0.01
        overload.turn(worked_s=0.01, waited_s=TARGET_S * 1.01, now=now)
    skipped = [overload.skips(now=now) for _ in range(100)]
    assert 28 <= sum(skipped) <= 45
    assert max(len(run) for run in "".join("x" if s else " " for s in skipped).split()) <= 2
