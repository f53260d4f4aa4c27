"""The loops of a picker's sharing over links that work, fail, and come back."""

import asyncio
import itertools
import logging
import time
from collections import Counter

import pytest

from epp.config.sharing import Sharing
from epp.picker.prefix_index.secret import derived
from epp.sources.sharing.batches import Batch, LinkError, Received, SharedBegan, encode, identity_of
from tests.harness.clock import Clock
from tests.harness.processes import wait_until
from tests.harness.sharing import met, sharing
from tests.unit.picker.picker_questions import text

SETTINGS = Sharing(flush_interval_seconds=0.02)


class Channel:
    """The memory that the links of one channel share, as Redis would be."""

    def __init__(self) -> None:
        self.links: list[MemoryLink] = []
        self.shown = b""
        self.fault: LinkError | None = None
        """The answer to every call, if there is one."""


class MemoryLink:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.received: list[bytes] = []
        self.calls: Counter[str] = Counter()
        self.closed = False
        self.age_s = 0.0
        self.hangs_at = 0
        """The number of the read that does not end."""
        channel.links.append(self)

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if self._channel.fault is not None:
            raise self._channel.fault

    async def agree(self, pool: str, mine: bytes) -> bytes:
        self._called("agree")
        self._channel.shown = self._channel.shown or mine
        return self._channel.shown

    async def join(self, channel: str) -> None:
        self._called("join")

    async def send(self, batch: bytes) -> None:
        self._called("send")
        for link in self._channel.links:
            link.received.append(batch)

    async def read(self) -> list[Received]:
        self._called("read")
        if self.calls["read"] == self.hangs_at:
            await asyncio.get_running_loop().create_future()
        for _ in range(1_000):
            await asyncio.sleep(0.001)
            if self.received:
                break
        received, self.received = self.received, []
        return [Received(data, self.age_s) for data in received]

    async def close(self) -> None:
        self.closed = True


async def test_link_that_fails_is_logged_once_and_missed_news_arrives_afterwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "epp.sources.sharing")
    channel = Channel()
    async with (
        sharing(MemoryLink(channel), settings=SETTINGS) as one,
        sharing(MemoryLink(channel), settings=SETTINGS) as other,
    ):
        await met(one, other)
        channel.fault = LinkError("connection refused.", reason="connection")
        for sharer in (one, other):
            sharer.serve(text("meanwhile"))
            await wait_until(
                lambda s=sharer: s.counts.errors["connection"] >= 6,  # type: ignore[misc]  # as above
                what="several failures to send and to receive",
            )
        assert not one.service.connected
        channel.fault = None
        await other.learns(text("meanwhile"))
        await wait_until(lambda: one.service.connected and other.service.connected, what="both are back")
    lines = Counter(record.getMessage() for record in caplog.records)
    cannot = (
        "cannot send to the other pickers: connection refused; this picker goes on with its own knowledge"
    )
    assert lines[cannot] == lines["can send to the other pickers again"] == 2, "once for each of two pickers"


async def test_a_picker_is_warm_once_it_has_read_the_current_batches() -> None:
    link = MemoryLink(Channel())
    link.age_s = 60.0
    async with sharing(link, settings=SETTINGS) as one:
        link.received.append(b"old")
        await wait_until(lambda: one.counts.skipped["malformed"] == 1, what="the old batch is read")
        assert not one.service.warm
        link.age_s = 0.0
        await wait_until(lambda: one.service.warm, what="it is warm")


async def test_a_silent_picker_is_forgotten_while_the_link_hangs() -> None:
    link, clock = MemoryLink(Channel()), Clock()
    link.hangs_at = 2
    link.received.append(encode(Batch(b"other", 1, 0, [])))
    async with sharing(link, settings=SETTINGS, clock=clock) as one:
        await wait_until(lambda: link.calls["read"] == 2 and one.peers == 1, what="the link hangs")
        clock.now = 5.1
        await wait_until(lambda: one.peers == 0, what="the other is forgotten", timeout_s=20)


async def test_a_picker_without_a_link_is_warm_at_once() -> None:
    channel = Channel()
    channel.fault = LinkError("away", reason="connection")
    async with sharing(MemoryLink(channel), settings=SETTINGS) as one:
        await wait_until(lambda: one.service.warm, what="it is warm")
        assert not one.service.connected


async def test_a_picker_that_ends_closes_its_link_after_its_last_events() -> None:
    link = MemoryLink(Channel())
    async with sharing(link, settings=Sharing(flush_interval_seconds=5)) as one:
        await wait_until(lambda: one.service.connected, what="the picker has joined")
        one.serve(text("p"))
        sent = link.calls["send"]
    assert link.calls["send"] == sent + 1
    assert link.closed


@pytest.mark.parametrize("num_batches", [1, 100])
async def test_other_work_goes_on_while_many_events_are_applied(num_batches: int) -> None:
    calls, link, seen = itertools.count(), MemoryLink(Channel()), set[int]()

    def clock() -> float:
        """Return a time at which each event has taken a millisecond."""
        return time.monotonic() + next(calls) / 1000

    async with sharing(link, settings=SETTINGS, clock=clock) as one:
        state = next(iter(one.replica.picker.fleet.states()))
        name, process = state.endpoint.name, identity_of(state)
        began = [SharedBegan(0, name, process, number, 10, "", b"") for number in range(1, 101)]
        size = len(began) // num_batches
        for number in range(num_batches):
            part = began[number * size : (number + 1) * size]
            link.received.append(encode(Batch(b"other", number + 1, 0, [*part])))
        async with asyncio.timeout(60):
            while 100 not in seen:
                seen.add(sum(one.replica.in_flight_of_peers().values()))
                await asyncio.sleep(0)
    assert len(seen) > 20, "a pause after each three events"


def hurried() -> float:
    """Return a time that passes a hundred times as fast."""
    return time.monotonic() * 100


async def test_different_hash_secrets_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    channel = Channel()
    links = [MemoryLink(channel) for _ in range(2)]
    async with (
        sharing(links[0], settings=SETTINGS, secret=derived(b"the secret of one"), clock=hurried),
        sharing(links[1], settings=SETTINGS, secret=derived(b"another secret"), clock=hurried),
    ):
        await wait_until(lambda: all(link.calls["agree"] >= 3 for link in links), what="comparisons")
    complaints = [r for r in caplog.records if "hash secret" in r.getMessage()]
    assert len(complaints) == 1, "the first picker's secret is that of the pool"
