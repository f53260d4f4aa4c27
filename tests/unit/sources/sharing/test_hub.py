"""The local socket between the workers of one machine, with both of its ends in one process."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from epp.config.sharing import Sharing
from epp.sources.sharing.hub import Hub, HubLink, frame
from epp.sources.sharing.link import LinkError
from tests.harness.arriving import TURNS, connect_and_stop
from tests.harness.clock import Clock
from tests.harness.sharing import both_ways, met, sharing

SETTINGS = Sharing(flush_interval_seconds=0.02)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture
async def links(tmp_path: Path, clock: Clock) -> AsyncIterator[tuple[HubLink, HubLink]]:
    """Return two links to one hub, on one channel."""
    hub = Hub(tmp_path / "hub.sock", clock=clock)
    hub.start()
    one, other = HubLink(tmp_path / "hub.sock"), HubLink(tmp_path / "hub.sock")
    for link in (one, other):
        await link.join("c")
        await link.stored()  # the answer shows that the hub has seen the channel
    yield one, other
    await one.close()
    await other.close()
    await hub.close()


async def test_a_batch_reaches_all_others_and_not_its_sender(links: tuple[HubLink, HubLink]) -> None:
    one, other = links
    await one.send(b"first")
    await one.send(b"second")
    received = await other.read()
    while len(received) < 2:
        received += await other.read()
    assert [bytes(each.data) for each in received] == [b"first", b"second"]
    await one.stored()
    assert one._received.empty()  # noqa: SLF001 - reading would wait a second for nothing


async def test_a_turn_is_free_again_after_its_period(links: tuple[HubLink, HubLink], clock: Clock) -> None:
    one, other = links
    assert await one.take_turn("store", period_s=10)
    assert not await other.take_turn("store", period_s=10)
    assert await other.take_turn("join", period_s=10), "another turn"
    clock.now += 10.1
    assert await other.take_turn("store", period_s=10)


async def test_the_age_of_a_table_is_measured_by_the_hubs_clock(
    links: tuple[HubLink, HubLink], clock: Clock
) -> None:
    one, other = links
    await one.store(b"table")
    await one.stored()
    clock.now += 7
    found = await other.stored()
    assert found is not None
    assert (bytes(found.data), found.age_s) == (b"table", 7.0)


async def test_without_a_hub_each_call_is_one_typed_error(tmp_path: Path) -> None:
    link = HubLink(tmp_path / "nowhere.sock")
    with pytest.raises(LinkError, match="nowhere") as caught:
        await link.join("c")
    assert caught.value.reason == "connection"
    await link.close()


def test_a_path_that_cannot_be_used_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Hub(tmp_path / "no folder" / "hub.sock").start()


async def test_the_hub_keeps_a_table_only_while_a_picker_is_on_its_channel(tmp_path: Path) -> None:
    hub = Hub(tmp_path / "hub.sock")
    hub.start()
    one, other = HubLink(tmp_path / "hub.sock"), HubLink(tmp_path / "hub.sock")

    async def table_after_joining(link: HubLink, channel: str) -> bytes | None:
        await link.join(channel)
        table = await link.stored()
        return None if table is None else bytes(table.data)

    for link in (one, other):
        assert await table_after_joining(link, "chunks of 256") is None
    await one.store(b"table")
    assert await table_after_joining(one, "chunks of 512") is None
    assert await table_after_joining(other, "chunks of 256") == b"table"
    assert await table_after_joining(other, "chunks of 512") is None
    assert await table_after_joining(other, "chunks of 256") is None
    for link in (one, other):
        await link.close()
    await hub.close()


@pytest.mark.parametrize(
    "junk", [b"\xff" * 64, frame(b"N", b""), frame(b"?", b"x"), struct.pack(">IB", 2**31, 83)]
)
async def test_bytes_that_are_not_a_frame_end_only_their_own_connection(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "hub.sock"
    hub = Hub(path)
    hub.start()
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
    await hub.close()


@pytest.mark.parametrize("turns", TURNS)
async def test_worker_that_connects_while_the_hub_closes_is_cut_without_an_error(
    tmp_path: Path, turns: int
) -> None:
    hub = Hub(tmp_path / "hub.sock")
    hub.start()
    await connect_and_stop(tmp_path / "hub.sock", hub.close, turns=turns)
