"""The local socket between the workers of one machine, with both of its ends in one process."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from epp.config.sharing import Sharing
from epp.sources.sharing import hub as hub_module
from epp.sources.sharing.batches import LinkError, Received
from epp.sources.sharing.hub import Hub, HubLink, frame, read_frame
from tests.harness.arriving import TURNS, connect_and_stop
from tests.harness.clock import Clock
from tests.harness.sharing import both_ways, met, sharing

SETTINGS = Sharing(flush_interval_seconds=0.02)


@pytest_asyncio.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    hub = Hub(tmp_path / "hub.sock")
    hub.start()
    yield tmp_path / "hub.sock"
    await hub.close()


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def joined(
    path: Path, stack: AsyncExitStack, *, channel: str = "c", clock: Callable[[], float] = lambda: 5.0
) -> HubLink:
    link = HubLink(path, clock=clock)
    stack.push_async_callback(link.close)
    await link.join(channel)
    return link


async def read(link: HubLink, count: int) -> list[tuple[bytes, float]]:
    received: list[Received] = []
    while len(received) < count:
        received += await link.read()
    return [(bytes(each.data), each.age_s) for each in received]


async def test_a_batch_reaches_all_others_of_its_channel_and_not_its_sender(
    path: Path, stack: AsyncExitStack
) -> None:
    one, other = await joined(path, stack), await joined(path, stack)
    stranger = await joined(path, stack, channel="chunks of 512")
    await one.send(b"first")
    await one.send(b"second")
    assert await read(other, 2) == [(b"first", 0.0), (b"second", 0.0)]
    await other.send(b"third")
    assert await read(one, 1) == [(b"third", 0.0)]
    assert await stranger.read() == []


async def test_batches_have_their_age_for_slow_and_for_late_readers(
    path: Path, stack: AsyncExitStack
) -> None:
    clock = Clock()
    one, other = [await joined(path, stack, clock=clock) for _ in range(2)]
    await one.send(b"first")
    await read(await joined(path, stack), 1)
    clock.now += 7
    for reader in (other, await joined(path, stack, clock=clock)):
        assert await read(reader, 1) == [(b"first", 7.0)]


async def test_a_worker_is_not_sent_what_was_kept_of_other_channels(
    path: Path, stack: AsyncExitStack
) -> None:
    one, other = await joined(path, stack), await joined(path, stack, channel="new")
    await other.send(b"first")
    await one.send(b"of the old channel")
    await read(await joined(path, stack), 1)
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(frame(5.0, b"new\0"))
    await other.send(b"second")
    assert [await read_frame(reader) for _ in range(2)] == [(5.0, b"new\0first"), (5.0, b"new\0second")]
    writer.close()


async def test_a_worker_that_changes_its_channel_reads_nothing_of_the_old_one(
    path: Path, stack: AsyncExitStack
) -> None:
    one, other = await joined(path, stack), await joined(path, stack)
    await one.send(b"first")
    await other.send(b"second")
    await read(one, 1)
    await other.join("chunks of 512")
    await one.join("chunks of 512")
    await one.send(b"third")
    assert await read(other, 1) == [(b"third", 0.0)]


async def test_the_kept_batches_are_bounded(path: Path, stack: AsyncExitStack) -> None:
    one, other = await joined(path, stack), await joined(path, stack)
    for n in range(20):
        await one.send(bytes([n]) * (2**20 - len(b"c\0")))
        await read(other, 1)
    late = await read(await joined(path, stack), 16)
    assert [batch[0] for batch, _ in late] == list(range(4, 20))


async def test_a_worker_that_reads_much_at_its_start_misses_nothing_new(
    path: Path, stack: AsyncExitStack
) -> None:
    one, other = await joined(path, stack), await joined(path, stack)
    for _ in range(500):
        await one.send(bytes(30_000))
        await read(other, 1)
    late = await joined(path, stack)
    for n in range(200):
        await one.send(b"new %d" % n)
        await read(other, 1)
    while batches := await late.read():
        last = batches[-1]
    assert last.data == b"new 199"


async def test_few_batches_wait_in_a_worker_that_reads_none(
    path: Path, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_MOST_WAITING", 4)
    one, other, third = [await joined(path, stack) for _ in range(3)]
    for _ in range(50):
        await one.send(b"batch")
        await read(third, 1)
    assert len(await other.read()) <= 4


async def test_without_a_hub_each_call_is_one_typed_error(tmp_path: Path) -> None:
    link = HubLink(tmp_path / "nowhere.sock")
    with pytest.raises(LinkError, match="nowhere") as caught:
        await link.join("c")
    assert caught.value.reason == "connection"


def test_a_path_that_cannot_be_used_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Hub(tmp_path / "no folder" / "hub.sock").start()


@pytest.mark.parametrize("junk", [b"\xff" * 64, frame(0, b"c") + b"\xff" * 64, struct.pack(">Id", 2**31, 0)])
async def test_bytes_that_are_not_a_frame_end_only_their_own_connection(path: Path, junk: bytes) -> None:
    async with (
        sharing(HubLink(path), settings=SETTINGS) as one,
        sharing(HubLink(path), settings=SETTINGS) as other,
    ):
        await met(one, other)
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(junk)
        await writer.drain()
        await both_ways(one, other, name="p")
        writer.close()


@pytest.mark.parametrize("turns", TURNS)
async def test_worker_that_connects_while_the_hub_closes_is_cut_without_an_error(
    tmp_path: Path, turns: int
) -> None:
    hub = Hub(tmp_path / "hub.sock")
    hub.start()
    await connect_and_stop(tmp_path / "hub.sock", hub.close, turns=turns)
